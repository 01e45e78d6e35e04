"""What the stage commands of the command line share: options, reading the configuration, running or planning a stage."""

from __future__ import annotations

import inspect
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from drafters.errors import UserError
from pipeline import ranks
from pipeline.config import Config, load_config
from pipeline.stage_plan import choose_drafter, newer_drafter, plan_stage

Function = TypeVar("Function", bound=Callable[..., None])

ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        show_default=False,
        help="A YAML file, or the name of a preset such as quickstart.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Override one dotted key, such as train.steps=500; may be repeated.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", show_default=False, help="Output directory, in place of the config's own."),
]
DryRunOption = Annotated[
    bool,
    typer.Option("--dry-run", show_default=False, help="Print what would be read and written, and stop."),
]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume", show_default=False, help="Continue from this stage's last checkpoint."),
]
DrafterOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=False,
        help="Drafter directory to take; that of the latest earlier stage by default.",
    ),
]

SpoolOption = Annotated[
    str | None,
    typer.Option(
        "--spool",
        metavar="DIR|redis://…",
        show_default=False,
        help="For online rounds: where serving leaves its verification records.",
    ),
]
ServeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--serve",
        metavar="URL",
        show_default=False,
        help="For online rounds: a running SGLang server to keep on the champion; may be repeated.",
    ),
]
ServersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--to",
        metavar="URL",
        show_default=False,
        help="A running SGLang server; may be repeated. Those of sglang.urls by default.",
    ),
]


def command(group: typer.Typer, name: str, panel: str | None = None) -> Callable[[Function], Function]:
    """Register a command. Its help is its docstring, with the line breaks of the source undone."""

    def register(function: Function) -> Function:
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        group.command(name, help=text, rich_help_panel=panel)(function)
        return function

    return register


def read_config(source: Path, assignments: Sequence[str] | None, output: Path | None = None) -> Config:
    """The configuration with overrides applied, `--output` last.

    Raises:
        UserError: naming the file or dotted key.
    """
    config = load_config(source, list(assignments or []))
    # A path given on the command line is a path: as an override it would be read as YAML.
    return config if output is None else config.model_copy(update={"output": output})


@dataclass(frozen=True)
class Invocation:
    """A stage command as it was called; the configuration is read at once."""

    source: Path
    assignments: list[str] | None
    output: Path | None
    dry_run: bool
    config: Config = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", read_config(self.source, self.assignments, self.output))

    def drafter_for(self, command: str, given: Path | None) -> Path:
        """The drafter a command starts from; says which if nobody named it, and if it looks out of date."""
        output = self.config.output
        drafter = choose_drafter(output, command, given)
        if given is None:
            newer = newer_drafter(output, command, drafter)
            note = f" ({newer} is newer; --drafter takes that one)" if newer else ""
            typer.echo(f"drafter: {drafter}{note}", err=True)
        return drafter

    def execute(self, command: str, stage: Callable[[], Path], *, then: str | None, **inputs: Any) -> None:
        """Run a stage and print where its output is; or print its plan under `--dry-run`.

        `then` is the command that follows in the loop. `inputs` go to `plan_stage`.

        Raises:
            UserError: in a dry run, if something that the stage needs is missing.
        """
        if self.dry_run:
            plan = plan_stage(command, self.config, **inputs)
            typer.echo("\n".join(plan.lines()))
            if plan.missing:
                raise UserError("; ".join(plan.missing))
            return
        try:
            written = stage()
        except SystemExit as stop:
            # Lightning turns Ctrl-C into exit code 1, and SIGTERM into 0.
            if isinstance(stop.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise SystemExit(stop.code or 128 + signal.SIGTERM) from None
        if not ranks.is_first():
            return
        typer.echo(str(written))
        if then is not None:
            typer.echo(f"next: {self._command_line(then)}", err=True)

    def _command_line(self, command: str) -> str:
        words = ["draftsmith", *command.split(), str(self.source)]
        for assignment in self.assignments or []:
            words += ["--set", assignment]
        if self.output is not None:
            words += ["--output", str(self.output)]
        return shlex.join(words)

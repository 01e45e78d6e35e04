"""`draftsmith registry`: registered drafters for people."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.invocation import command

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.registry import RegisteredVersion

registry_app = typer.Typer(
    no_args_is_help=True, help="List, compare, promote and roll back registered drafters."
)

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A YAML file, the name of a preset, or the address of a store: sqlite:///… or http://….",
    ),
]
VersionArgument = Annotated[
    str,
    typer.Argument(metavar="VERSION", show_default=False, help="A number, or an alias such as champion."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        show_default=False,
        help="Registered model; by default the configuration's, or the only one of a store.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", show_default=False, help="Print JSON.")]
ReasonOption = Annotated[
    str, typer.Option(metavar="TEXT", show_default=False, help="Why; kept in the registry.")
]


@command(registry_app, "list")
def list_versions(source: SourceArgument, model: ModelOption = None, as_json: JsonOption = False) -> None:
    """Print all versions, the newest first.

    With aliases, acceptance length at the gate, date, parent, data, hash of the configuration, code commit, and what
    was decided.

    Example: draftsmith registry list quickstart

    Example: draftsmith registry list http://127.0.0.1:5000 --json
    """
    from pipeline.registry_views import open_registry, row

    with open_registry(source, model) as registry:
        rows = [row(found) for found in reversed(registry.list_versions())]
        name = registry.model_name
    if as_json:
        typer.echo(json.dumps({"model": name, "versions": rows}, indent=2, ensure_ascii=False))
        return
    columns = ["version", "aliases", "τ", "registered", "parent", "config", "commit", "data", "decision"]
    table = [
        [
            str(r["version"]),
            ", ".join(r["aliases"]),
            "" if r["tau"] is None else f"{r['tau']:.3f}",
            r["registered"],
            r["parent_version"] or "",
            (r["config_hash"] or "")[:8],
            _short_commit(r["git_commit"]),
            r["data_window"] or "",
            r["decision"].partition(":")[0],
        ]
        for r in rows
    ]
    _print_table(name, columns, table)


@command(registry_app, "show")
def show(
    source: SourceArgument,
    version: VersionArgument,
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the model card of a version.

    Its origin, acceptance by domain, data, and what was decided about it. The same card is among the artifacts of
    its run and is MLflow's description of the version. JSON has all tags and the whole lineage.

    Example: draftsmith registry show quickstart champion
    """
    from pipeline.registry_views import open_registry, row

    with open_registry(source, model) as registry:
        found = registry.resolve(version)
        if not as_json:
            typer.echo(registry.card(found.version), nl=False)
            return
        lineage = registry.lineage(found.version)
    content = {**row(found), "tags": found.tags, "lineage": None if lineage is None else lineage.to_json()}
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False))


@command(registry_app, "diff")
def diff(
    source: SourceArgument,
    first: Annotated[str, typer.Argument(metavar="A", show_default=False, help="A version or alias.")],
    second: Annotated[str, typer.Argument(metavar="B", show_default=False, help="Another.")],
    model: ModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what differs between two versions.

    Identity, origin, keys of the configuration, documents by domain, and acceptance length by domain. Two
    rounds of one online run share its configuration.

    Example: draftsmith registry diff quickstart previous-champion champion
    """
    from rich.console import Console

    from pipeline.registry_views import compare, open_registry

    with open_registry(source, model) as registry:
        a, b = registry.resolve(first), registry.resolve(second)
        found = compare(registry, a, b)
    if as_json:
        parts = {key: [asdict(d) for d in found[key]] for key in found if key != "problems"}
        content = {"first": a.version, "second": b.version, **parts, "problems": found["problems"]}
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    titles = {
        "identity": "identity",
        "origin": "origin",
        "config": "configuration",
        "data": "documents by domain",
        "metrics": "acceptance length",
    }
    for key, title in titles.items():
        columns = [title, f"version {a.version}", f"version {b.version}"]
        rows = [[d.name, _shown(d.first), _shown(d.second)] for d in found[key]]
        if key == "metrics":
            columns.append("change")
            rows = [[*line, _change(d.first, d.second)] for line, d in zip(rows, found[key], strict=True)]
        if rows:
            _print_table("", columns, rows)
    for problem in found["problems"]:
        _console().print(f"not compared: {problem}", markup=False, soft_wrap=True)
    if not any(found[key] for key in titles):
        Console().print("no difference was found", markup=False)


@command(registry_app, "promote")
def promote(
    source: SourceArgument, version: VersionArgument, reason: ReasonOption, model: ModelOption = None
) -> None:
    """Make a version champion, without a gate; a warning says if the gate refused it or never saw it.

    The old champion becomes previous-champion. Servers follow with `deploy swap`, or with the next `retrain run-once` that
    is given them; `deploy register` and online rounds promote by themselves what the gate accepts.

    Example: draftsmith registry promote quickstart 4 --reason "checked by hand on our own prompts"
    """
    from pipeline.registry_views import open_registry

    with open_registry(source, model) as registry:
        found = registry.resolve(version)
        warning = _promotion_warning(found)
        registry.promote(found.version, reason=f"by hand: {reason}")
        previous = registry.previous_champion()
    if warning:
        typer.echo(f"warning: version {found.version} {warning}", err=True)
    typer.echo(f"version {found.version} is champion" + _and_previous(previous))


@command(registry_app, "rollback")
def rollback(source: SourceArgument, reason: ReasonOption, model: ModelOption = None) -> None:
    """Make the previous champion champion again, in the registry alone.

    `deploy rollback` does the same in running servers too.

    Example: draftsmith registry rollback quickstart --reason "slow on code"
    """
    from pipeline.registry_views import open_registry

    with open_registry(source, model) as registry:
        bad = registry.champion()
        restored = registry.rollback(reason, version=None if bad is None else bad.version)
    assert bad is not None
    typer.echo(f"version {restored} is champion again, version {bad.version} was rolled back")


def _promotion_warning(found: RegisteredVersion) -> str:
    outcome = found.tags.get("gate_outcome")
    if outcome is None:
        return "was never judged by the gate"
    return f"was refused: {found.tags.get('gate_reason', 'no reason kept')}" if outcome == "refused" else ""


def _and_previous(previous: Any) -> str:
    return "" if previous is None else f", version {previous.version} previous champion"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _change(first: float | None, second: float | None) -> str:
    return "" if first is None or second is None else f"{second - first:+.3f}"


def _short_commit(commit: str | None) -> str:
    digest, _, dirty = (commit or "").partition("-")
    return digest[:8] + (f"-{dirty}" if dirty else "")


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for line in rows:
        table.add_row(*(Text(cell) for cell in line))
    _console().print(table)


def _console() -> Console:
    """The terminal; wider where there is none, so that a file or a pipe gets whole lines."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)

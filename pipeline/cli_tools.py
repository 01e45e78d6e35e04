"""The commands beside the loop: `config schema|show|validate` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drafters.errors import UserError
from pipeline.invocation import ConfigArgument, OutputOption, SetOption, command, read_config

config_app = typer.Typer(no_args_is_help=True, help="Print, resolve and check configurations.")


@command(config_app, "schema")
def schema(
    markdown: Annotated[
        bool,
        typer.Option(
            "--markdown", show_default=False, help="Print a table of all keys in place of JSON schema."
        ),
    ] = False,
) -> None:
    """Print every key with its type and default.

    JSON schema, with which editors complete and check YAML files; or a Markdown page with one line for each key.

    Example: draftsmith config schema > draftsmith.schema.json
    """
    from pipeline.config_docs import json_schema, markdown_reference

    typer.echo(markdown_reference() if markdown else json_schema())


@command(config_app, "show")
def show(config: ConfigArgument, assignments: SetOption = None, output: OutputOption = None) -> None:
    """Print a configuration as a run would use it.

    Defaults are filled in and overrides applied. What is printed is a valid configuration file.

    Example: draftsmith config show quickstart --set train.steps=500 > mine.yaml
    """
    import yaml

    settings = read_config(config, assignments, output)
    typer.echo(yaml.safe_dump(settings.dump(), sort_keys=False, allow_unicode=True), nl=False)


@command(config_app, "validate")
def validate(
    configs: Annotated[
        list[Path],
        typer.Argument(metavar="CONFIG", show_default=False, help="YAML files or names of presets."),
    ],
    assignments: SetOption = None,
) -> None:
    """Check configurations against the schema.

    Keys, types, bounds, and rules between keys. Whether the prompts and the model exist is for the `--dry-run` of a
    stage to say. All files are checked; exits with 2 if one is wrong.

    Example: draftsmith config validate configs/*.yaml
    """
    failures = []
    for path in configs:
        try:
            read_config(path, assignments)
        except UserError as error:
            failures.append(str(error))
        else:
            typer.echo(f"ok  {path}")
    if failures:
        raise UserError("; ".join(failures))


def doctor(
    output: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Where runs would write: its free space and file locks are tried."),
    ] = Path("outputs"),
    sglang: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="Examine a running SGLang server in place of this machine.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", show_default=False, help="Print JSON.")] = False,
) -> None:
    """Say what this machine, or a running SGLang server, has and lacks.

    Each line says what follows for a run. Exits with 1 if something must be repaired before anything runs; what is only
    missing has a substitute, named in the last column. Of a server it says whether the plugin is there and whole, what
    it logs, and how it verifies.

    Example: draftsmith doctor --output /data/runs

    Example: draftsmith doctor --sglang http://127.0.0.1:30000
    """
    from pipeline import doctor as diagnosis

    if sglang:
        from pipeline.doctor_sglang import examine_server

        checks = [check for url in sglang for check in examine_server(url)]
    else:
        checks = diagnosis.examine(output)
    if as_json:
        import json

        typer.echo(json.dumps(diagnosis.as_json(checks), indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        Console().print(diagnosis.as_table(checks))
    if not diagnosis.is_ready(checks):
        raise typer.Exit(1)

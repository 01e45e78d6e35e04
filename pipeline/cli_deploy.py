"""`draftsmith deploy`: a drafter into the registry, into running servers, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from drafters.errors import UserError
from pipeline.invocation import (
    ConfigArgument,
    DrafterOption,
    DryRunOption,
    Invocation,
    OutputOption,
    ServersOption,
    SetOption,
    command,
    read_config,
)

REGISTER = "register"


class RegisterByDefault(TyperGroup):
    """`deploy CONFIG` means `deploy register CONFIG`; with --to it means `swap`, with --launch `launch`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with the command's name in front where none is given."""
        return super().parse_args(ctx, self.with_command(args))

    def with_command(self, args: list[str]) -> list[str]:
        """The words with the name of the command that they mean."""
        if not args or args[0] in self.commands or args[0] in {"--help", "-h"}:
            return args
        if "--launch" in args:
            return ["launch", *(word for word in args if word != "--launch")]
        if any(word == "--to" or word.startswith("--to=") for word in args):
            return ["swap", *args]
        return [REGISTER, *args]


deploy_app = typer.Typer(
    cls=RegisterByDefault,
    no_args_is_help=True,
    help="Register a drafter, hot-swap it into running servers, take it back.",
    rich_markup_mode="rich",
)

NamedDrafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="DIR|models:/NAME@ALIAS",
        show_default=False,
        help="Drafter to serve: a directory or a registered version. The champion by default.",
    ),
]


@command(deploy_app, REGISTER)
def register(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    drafter: DrafterOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Register a drafter and promote it if it beats the champion. What `deploy CONFIG` does.

    It enters the registry as challenger. One that the gate refuses stays there with the reason, and the champion goes on
    serving.

    Reads the latest drafter: of OUTPUT/length_head, else of OUTPUT/distill, else of OUTPUT/train. Writes OUTPUT/deploy and
    the registry that tracking.uri names.

    Example: draftsmith deploy register quickstart --drafter outputs/quickstart/distill/drafter
    """
    call = Invocation(config, assignments, output, dry_run)
    start = call.drafter_for("deploy", drafter)

    def stage() -> Path:
        from pipeline.stages.deploy import deploy_drafter

        return deploy_drafter(call.config, drafter=start)

    call.execute("deploy", stage, then=None, drafter=start)


@command(deploy_app, "swap")
def swap(
    config: ConfigArgument,
    to: ServersOption = None,
    drafter: NamedDrafter = None,
    assignments: SetOption = None,
    output: OutputOption = None,
) -> None:
    """Hot-swap the champion into running SGLang servers, all of them or none.

    Requests go on where they are; the target is not touched, and its checksum is compared before and after. A server that
    refuses keeps its drafter, and those already swapped get theirs back.

    Example: draftsmith deploy swap quickstart --to http://127.0.0.1:30000

    Example: draftsmith deploy swap quickstart --to http://127.0.0.1:30000 --drafter models:/dflash-qwen3@previous-champion
    """
    from pipeline.stages.servers import deploy_to

    typer.echo(str(deploy_to(read_config(config, assignments, output), to or [], drafter)))


@command(deploy_app, "launch")
def launch(
    config: ConfigArgument,
    print_only: Annotated[
        bool,
        typer.Option(
            "--print", show_default=False, help="Print the command, and that of the container, and stop."
        ),
    ] = False,
    drafter: NamedDrafter = None,
    assignments: SetOption = None,
    output: OutputOption = None,
) -> None:
    """Start an SGLang server with the champion and the plugin.

    sglang.launch says how: which interpreter has SGLang, the cuda or cpu preset, port and capacity. The server takes this
    command's place and runs until it is stopped.

    Example: draftsmith deploy launch quickstart --set sglang.launch.python=/opt/sglang/bin/python --print
    """
    import os

    from pipeline.stages.servers import prepare_launch

    launch = prepare_launch(read_config(config, assignments, output), drafter)
    if print_only:
        typer.echo(launch.shown())
        if launch.preset == "cuda":
            typer.echo(f"\n# or in SGLang's image:\n{launch.image_line()}")
        return
    words = launch.arguments()
    try:
        os.execvpe(words[0], words, launch.environment())
    except OSError as error:
        raise UserError(f"sglang.launch.python: {words[0]} cannot be run ({error})") from None


@command(deploy_app, "status")
def status(
    config: ConfigArgument,
    to: ServersOption = None,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", show_default=False, help="Show it again every so often, until Ctrl-C."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", show_default=False, help="Print JSON.")] = False,
    assignments: SetOption = None,
    output: OutputOption = None,
) -> None:
    """Say what is champion, what each server runs, and how the online rounds went.

    Exits with 1 if a server is down, serves without the plugin, or is not on the champion.

    Example: draftsmith deploy status quickstart --to http://127.0.0.1:30000 --watch 5
    """
    import json
    import time

    from pipeline.stages.servers import show_status
    from pipeline.stages.servers import status as read_status

    settings = read_config(config, assignments, output)
    while True:
        found = read_status(settings, to or [])
        if as_json:
            typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        else:
            show_status(found)
        if watch is None:
            break
        time.sleep(watch)
    if any(server["problem"] or not server["in_step"] for server in found["servers"]):
        raise typer.Exit(1)


@command(deploy_app, "rollback")
def rollback(
    config: ConfigArgument,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", show_default=False, help="Why; kept in the registry.")
    ],
    to: ServersOption = None,
    assignments: SetOption = None,
    output: OutputOption = None,
) -> None:
    """Make the previous champion champion again, in the servers and in the registry.

    Example: draftsmith deploy rollback quickstart --to http://127.0.0.1:30000 --reason "slow on code"
    """
    from pipeline.stages.servers import roll_back

    typer.echo(str(roll_back(read_config(config, assignments, output), to or [], reason)))

"""The command line: one command for each stage of the loop, `run` for all of it, and tools.

Only light modules are imported here; a command imports its stage when it runs, so that help answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from drafters.errors import UserError
from pipeline.cli_deploy import deploy_app
from pipeline.cli_evaluate import compare, evaluate
from pipeline.cli_plan import plan
from pipeline.cli_registry import registry_app
from pipeline.cli_retrain import retrain_app
from pipeline.cli_simulate import simulate
from pipeline.cli_tools import config_app, doctor
from pipeline.invocation import (
    ConfigArgument,
    DrafterOption,
    DryRunOption,
    Invocation,
    OutputOption,
    ResumeOption,
    ServeOption,
    SetOption,
    SpoolOption,
    command,
    read_config,
)
from pipeline.stage_plan import check_drafter

STAGES = "Stages, in the order of the loop"
WHOLE = "The whole loop"
TOOLS = "Tools"
ORDER = (
    "data", "train", "prune", "distill", "fit-length-head", "evaluate", "deploy", "retrain", "run", "compare", "plan",
    "tune-policy", "simulate", "registry", "config", "doctor",
)  # fmt: skip
EPILOG = """\
The loop: [bold]data regenerate → train → (prune) → distill → fit-length-head → evaluate → deploy[/bold], then \
[bold]distill --online[/bold] for as long as there is traffic.

Each stage finds in the output directory what earlier stages left there, and leaves a result.json with its own output.

Start with [bold]draftsmith run smoke[/bold], the whole loop on a tiny model; [bold]COMMAND --help[/bold] tells more, \
[bold]COMMAND --dry-run[/bold] what would happen."""


class LoopOrder(TyperGroup):
    """Lists the commands in the order of use; groups would come last otherwise."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        return [name for name in ORDER if name in self.commands]


app = typer.Typer(
    name="draftsmith",
    cls=LoopOrder,
    help="Train, distil, serve and keep fresh the diffusion drafters that make LLM inference faster.",
    epilog=EPILOG,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
data_app = typer.Typer(
    no_args_is_help=True, help="Prepare training data: answers of the target, records of servers."
)
app.add_typer(data_app, name="data", rich_help_panel=STAGES)
app.add_typer(deploy_app, name="deploy", rich_help_panel=STAGES)
app.add_typer(retrain_app, name="retrain", rich_help_panel=STAGES)
app.add_typer(registry_app, name="registry", rich_help_panel=TOOLS)
app.add_typer(config_app, name="config", rich_help_panel=TOOLS)
command(app, "evaluate", STAGES)(evaluate)
command(app, "compare", TOOLS)(compare)
command(app, "plan", TOOLS)(plan)
command(app, "simulate", TOOLS)(simulate)
command(app, "doctor", TOOLS)(doctor)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 2 bad input (one line says what), 130 interrupted."""
    try:
        app(arguments, prog_name="draftsmith")
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"draftsmith {version('draftsmith')}")
        raise typer.Exit


@app.callback(no_args_is_help=True)
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            show_default=False,
            help="Print the version and stop.",
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


@command(data_app, "regenerate")
def regenerate(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Let the target answer the prompts.

    A drafter has to learn what the target really says, not what a data set says. Answers are greedy unless
    regenerate.temperature is set. A run that was cut off continues where it stopped.

    Reads the prompts of data.train and data.heldout. Writes OUTPUT/responses.

    Example: draftsmith data regenerate quickstart --set regenerate.batch_size=4
    """
    call = Invocation(config, assignments, output, dry_run)

    def stage() -> Path:
        from pipeline.stages.regenerate import regenerate_responses

        return regenerate_responses(call.config)

    call.execute("data regenerate", stage, then="train")


@command(data_app, "collect")
def collect(
    config: ConfigArgument,
    upstream: Annotated[
        str, typer.Option("--from", metavar="URL", show_default=False, help="The server that answers.")
    ],
    port: Annotated[
        int, typer.Option(metavar="PORT", help="Port on the loopback that clients talk to.")
    ] = 30001,
    assignments: SetOption = None,
    output: OutputOption = None,
    spool: SpoolOption = None,
) -> None:
    """Collect records from a server without the plugin.

    Clients talk to this proxy, which passes everything on and notes what it can: calls of /generate with token ids. Such
    records have no rounds: training on them works, canary and length head learn nothing from them. Ctrl-C ends it.

    Writes the spool, OUTPUT/spool unless --spool or sglang.log names another.

    Example: draftsmith data collect quickstart --from http://127.0.0.1:30000 --port 30001
    """
    from pipeline.stages.collect import collect_records

    counts = collect_records(read_config(config, assignments, output), upstream, port, spool)
    typer.echo(", ".join(f"{number} {what}" for what, number in sorted(counts.items())) or "no calls")


@command(app, "train", STAGES)
def train(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    warm_start: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Begin with the weights of this drafter."),
    ] = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train a drafter from scratch on the target's answers.

    From the target's hidden states before an anchor token, the drafter learns to fill the block of masked tokens after it
    in one pass.

    Reads OUTPUT/responses. Writes OUTPUT/train/drafter, a directory that serving engines load as it is.

    Example: draftsmith train quickstart --set train.steps=500
    """
    call = Invocation(config, assignments, output, dry_run)
    if warm_start is not None:
        check_drafter(warm_start, "--warm-start")

    def stage() -> Path:
        from pipeline.stages.train import train_drafter

        return train_drafter(call.config, resume=resume, warm_start=warm_start)

    call.execute("train", stage, then="distill", warm_start=warm_start)


@command(app, "prune", STAGES)
def prune(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    drafter: DrafterOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Remove the layers that acceptance misses least.

    Every layer's removal is measured by replay, the least missed one goes, and the drafter recovers by learning from the
    unpruned one; then again, down to prune.layers or until acceptance would fall below prune.retention of what it was.

    Reads OUTPUT/responses and OUTPUT/train/drafter. Writes OUTPUT/prune/drafter, and every kept depth beside it.

    Example: draftsmith prune d3d --set prune.layers=27
    """
    call = Invocation(config, assignments, output, dry_run)
    start = call.drafter_for("prune", drafter)

    def stage() -> Path:
        from pipeline.stages.prune import prune_drafter

        return prune_drafter(call.config, drafter=start, resume=resume)

    call.execute("prune", stage, then="distill", drafter=start)


@command(app, "distill", STAGES)
def distill(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    drafter: DrafterOption = None,
    online: Annotated[
        bool,
        typer.Option("--online", show_default=False, help="Learn from live traffic, round after round."),
    ] = False,
    spool: SpoolOption = None,
    serve: ServeOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Distil the drafter on-policy, offline or from live traffic.

    On the text that the target wrote, the drafter learns from the target's whole distribution, in the places where
    serving begins its rounds.

    Reads OUTPUT/responses and OUTPUT/prune/drafter, or OUTPUT/train/drafter if nothing was pruned. Writes
    OUTPUT/distill/drafter.

    With --online it reads verification records instead. Each batch of fresh records trains a challenger, and one that
    beats the champion on held-out traffic takes its place: in the registry, and in each server given by --serve, where a
    canary watches it. It starts from the champion unless --drafter names another, and writes OUTPUT/online. SIGTERM
    ends it after the round; --resume goes on after anything, a power cut included.

    Example: draftsmith distill quickstart

    Example: draftsmith distill mine.yaml --online --spool /var/spool/draftsmith --serve http://127.0.0.1:30000
    """
    call = Invocation(config, assignments, output, dry_run)
    if online:
        _distill_online(call, spool, drafter, serve or [], resume)
        return
    if spool is not None:
        raise UserError("--spool: only online distillation reads a spool; add --online or leave --spool out")
    if serve:
        raise UserError(
            "--serve: only online distillation keeps servers fresh; add --online or leave --serve out"
        )
    start = call.drafter_for("distill", drafter)

    def stage() -> Path:
        from pipeline.stages.distill import distill_offline

        return distill_offline(call.config, drafter=start, resume=resume)

    call.execute("distill", stage, then="fit-length-head", drafter=start)


def _distill_online(
    call: Invocation, spool: str | None, drafter: Path | None, serve: list[str], resume: bool
) -> None:
    log = spool or call.config.sglang.log
    if log is None:
        raise UserError(
            "--online: needs --spool DIR or redis://…, where serving leaves its verification records, or sglang.log"
        )
    if drafter is not None:
        check_drafter(drafter, "--drafter")

    def stage() -> Path:
        from pipeline.fleet import connect
        from pipeline.stages.online import distill_online

        servers = connect(call.config, serve)
        return distill_online(
            call.config, log=log, drafter=drafter, resume=resume, servers=lambda stage: servers
        )

    call.execute("distill --online", stage, then=None, spool=log, drafter=drafter)


@command(app, "fit-length-head", STAGES)
def fit_length_head(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    drafter: DrafterOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Fit the heads that say how many drafted tokens to verify.

    They predict how much of a block the target will accept, so that serving verifies no more than pays: the length head of a
    whole block, the acceptance head slot by slot. The drafter's own weights stay as they are.

    Reads OUTPUT/responses and OUTPUT/distill/drafter, or OUTPUT/train/drafter before distillation. Writes
    OUTPUT/length_head/drafter, the drafter with its heads.

    Example: draftsmith fit-length-head quickstart --set length_head.steps=400
    """
    call = Invocation(config, assignments, output, dry_run)
    start = call.drafter_for("fit-length-head", drafter)

    def stage() -> Path:
        from pipeline.stages.length_head import fit_length_head as fit

        return fit(call.config, drafter=start, resume=resume)

    call.execute("fit-length-head", stage, then="evaluate", drafter=start)


@command(app, "tune-policy", TOOLS)
def tune_policy(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    drafter: DrafterOption = None,
    records: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|redis://…",
            show_default=False,
            help="Served text to tune on: a log of verification records. The held-out prompts by default.",
        ),
    ] = None,
    load: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Requests running together; may be repeated. 1, 4 and 16 by default.",
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="A costs.json of an earlier run in place of measuring this machine.",
        ),
    ] = None,
) -> None:
    """Compare length policies and their settings, by load.

    What every length would have committed is known of text that has been served, so all settings are walked over the same
    text, with the seconds that rounds take on this machine. Prints tokens per second with bootstrap bounds, the best first.

    Reads the latest drafter: of OUTPUT/length_head, else of OUTPUT/distill, else of OUTPUT/train. Writes
    OUTPUT/tune_policy/result.json and costs.json.

    Example: draftsmith tune-policy quickstart --records outputs/quickstart/spool --load 1 --load 8
    """
    call = Invocation(config, assignments, output, False)
    start = call.drafter_for("tune-policy", drafter)

    def stage() -> Path:
        from pipeline.stages.tune_policy import tune_policy as tune

        return tune(call.config, drafter=start, records=records, loads=load or (1, 4, 16), costs=costs)

    call.execute("tune-policy", stage, then=None)


@command(app, "run", WHOLE)
def run(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run the whole loop on this machine.

    All stages in order; then the embedded engine serves the traffic prompts, and the drafter is distilled online from that
    traffic and swapped while requests run. A d3d preset is trained, pruned and measured, drafting ahead included.

    Reads the prompts of data.train, data.heldout and traffic.sources. Writes one directory for each stage below OUTPUT,
    and OUTPUT/result.json for the whole.

    Example: draftsmith run quickstart
    """
    call = Invocation(config, assignments, output, dry_run)

    def stage() -> Path:
        if call.config.drafter.family == "d3d":
            from pipeline.stages.rerun import StageRunner
            from pipeline.stages.whole_d3d import run_d3d

            return run_d3d(call.config, StageRunner(call.config))
        if call.config.serve.engine == "sglang":
            from pipeline.stages.live import run_live

            return run_live(call.config)
        from pipeline.stages.whole import run_whole

        return run_whole(call.config)

    call.execute("run", stage, then=None)

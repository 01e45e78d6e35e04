"""The command `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drafters.errors import UserError
from pipeline.invocation import ConfigArgument, DrafterOption, Invocation, OutputOption, SetOption


def simulate(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    drafter: DrafterOption = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Traces of an earlier run, in place of making them."
        ),
    ] = None,
    records: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|redis://…",
            show_default=False,
            help="Served text to trace: a log of verification records. The held-out prompts by default.",
        ),
    ] = None,
    as_logged: Annotated[
        bool,
        typer.Option(
            "--as-logged",
            show_default=False,
            help="Take the rounds of --records as they are and run no model: lengths of `fixed` only, estimated.",
        ),
    ] = False,
    concurrency: Annotated[
        str, typer.Option(metavar="N,…", help="Requests running together; a simulation for each.")
    ] = "1,8,32,128,512",
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:VALUE],…",
            show_default=False,
            help="fixed (lengths 2, 3, 4, 6, 8, 12, 16 and the whole block), adaflash, survival, throughput with all their "
            "settings, or one as in adaflash:1.5, or config for the configured one. All that the traces allow by default; plain "
            "decoding is always there.",
        ),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="A costs.json of tune-policy: measured seconds of rounds.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Without --costs: seconds by the data sheet of h200, h100 (default) or a100, or of this machine's cpu.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Without --costs: the target whose sizes cost; target.model by default.",
        ),
    ] = None,
    overhead_ms: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            min=0,
            show_default=False,
            help="Without --costs: added to each of a round's passes.",
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R",
            show_default=False,
            help="Requests per second, at random times. By default clients ask again as soon as they are answered. "
            "Latencies count then; there is no speedup.",
        ),
    ] = None,
    prompts: Annotated[
        bool,
        typer.Option("--prompts", show_default=False, help="Let rounds read new prompts, too."),
    ] = False,
) -> None:
    """Simulate serving under load with each length policy.

    Traces say what every length would have committed at every token of served texts; the policies that serving uses choose
    lengths from them, round by round, and each round takes the seconds that a measured table or a roofline says. Prints speedup
    over plain batched decoding. docs/simulator.md says what is exact and what is not.

    Reads --traces, or the latest drafter: of OUTPUT/length_head, else of OUTPUT/distill, else of OUTPUT/train. Writes
    OUTPUT/simulate with result.json, table.md, speedup.png, and traces.safetensors if it made them.

    Example: draftsmith simulate quickstart --model Qwen/Qwen3-8B --device h200 --concurrency 1,32,128

    Example: draftsmith simulate quickstart --traces outputs/quickstart/simulate/traces.safetensors --policies adaflash
    """
    call = Invocation(config, assignments, output, False)
    loads = _loads(concurrency)
    _check(traces, records, as_logged, drafter, costs, (device, model, overhead_ms))
    if rate is not None and not 0 < rate < float("inf"):
        raise UserError(f"--rate: {rate} must be above 0")
    start = None if traces is not None or as_logged else call.drafter_for("simulate", drafter)

    def stage() -> Path:
        from pipeline.simulation.traffic import Traffic
        from pipeline.stages.simulate import CostSource, TraceSource
        from pipeline.stages.simulate import simulate as run

        return run(
            call.config,
            source=TraceSource(traces, start, records, as_logged),
            costs=CostSource(costs, device or "h100", model, overhead_ms or 0.0),
            traffic=Traffic(1, rate, prompts, call.config.seed),
            concurrency=loads,
            policies=policies,
        )

    call.execute("simulate", stage, then=None)


def _loads(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= 4096 for word in words):
        raise UserError(f"--concurrency: {text!r} is no list of numbers in 1..4096 such as 1,8,32")
    return sorted({int(word) for word in words})


def _check(
    traces: Path | None,
    records: str | None,
    as_logged: bool,
    drafter: Path | None,
    costs: Path | None,
    roofline: tuple[object, ...],
) -> None:
    """Refuse options that would go unheard."""
    if traces is not None and (records is not None or drafter is not None):
        raise UserError("--traces: holds what --records and --drafter would make; give one or the other")
    if as_logged and (records is None or drafter is not None):
        raise UserError("--as-logged: takes the rounds of --records, and no --drafter")
    if costs is not None and any(option is not None for option in roofline):
        raise UserError("--costs: is a measured table; --device, --model and --overhead-ms go without it")

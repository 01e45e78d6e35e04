"""The commands `evaluate` and `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from drafters.errors import UserError
from pipeline.config import BenchmarkConfig, Config
from pipeline.invocation import (
    ConfigArgument,
    DryRunOption,
    Invocation,
    OutputOption,
    SetOption,
    read_config,
)


def _print_benchmarks(asked: bool) -> None:
    if asked:
        from pipeline.benchmark.catalogue import read_catalogue

        for name, spec in read_catalogue().items():
            typer.echo(f"{name:<18}{spec.source}")
        raise typer.Exit


def evaluate(
    config: ConfigArgument,
    assignments: SetOption = None,
    output: OutputOption = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR|VERSION|ALIAS",
            show_default=False,
            help="Drafter to take, also as LABEL=PLACE; may be repeated with benchmarks. The latest stage's by default.",
        ),
    ] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=PATH]",
            show_default=False,
            help="What to report on: a name that --list prints, a JSONL file, OWNER/NAME of the hub, heldout; may be repeated.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,…",
            show_default=False,
            help="ar, fixed, fixed:N, adaflash, survival, throughput, d3d-sync, d3d-async.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="local, or sglang: running servers."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="A running SGLang server; one for each method, plain decoding included.",
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", show_default=False, help="Sampling temperature; 0 is greedy.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(metavar="N", show_default=False, help="Longest answer to a turn.")
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option(
            "--thinking/--no-thinking",
            show_default=False,
            help="The chat template's enable_thinking; the template decides by default.",
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N,…", show_default=False, help="Conversations under way at a time."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(metavar="N", show_default=False, help="Most conversations of each benchmark."),
    ] = None,
    dry_run: DryRunOption = False,
    listing: Annotated[
        bool,
        typer.Option(
            "--list",
            callback=_print_benchmarks,
            is_eager=True,
            show_default=False,
            help="Print the benchmarks known by name and stop.",
        ),
    ] = False,
) -> None:
    """Measure a drafter on held-out prompts, or drafters and methods on benchmarks.

    Without benchmarks: acceptance length by domain, tokens per second, and whether the output is exactly the target's own
    under every length policy. Reads the latest drafter: of OUTPUT/length_head, else of OUTPUT/distill, else of
    OUTPUT/train. Writes OUTPUT/evaluate/result.json.

    With --benchmark, or any other option of benchmarks, or benchmark.names in the configuration: every method with
    every drafter on every benchmark at every concurrency, reported with intervals, by domain, language and
    context length, as tables, plots and one HTML page in OUTPUT/benchmark/report. What was finished before is not
    measured again.

    Example: draftsmith evaluate quickstart --set evaluate.lossless_prompts=4

    Example: draftsmith evaluate quickstart --benchmark gsm8k --benchmark mine=chat.jsonl --method ar,fixed:4,adaflash

    Example: draftsmith evaluate quickstart --benchmark mt-bench --backend sglang --url http://127.0.0.1:30000
    """
    call = Invocation(config, assignments, output, dry_run)
    given: dict[str, Any] = {
        "names": benchmark,
        "methods": None if method is None else _words(method),
        "backend": backend,
        "urls": url,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "thinking": thinking,
        "concurrency": None if concurrency is None else _words([concurrency]),
        "limit": limit,
    }
    given = {name: value for name, value in given.items() if value is not None}
    drafters = drafter or []
    if not (given or call.config.benchmark.names or len(drafters) > 1):
        _evaluate_heldout(call, drafters)
        return
    if drafters:
        given["drafters"] = drafters
    settings = with_benchmark(call.config, given)
    if dry_run:
        from pipeline.benchmark.plan import make_plan

        typer.echo("\n".join(make_plan(settings).lines()))
        return

    def stage() -> Path:
        from pipeline.stages.benchmark import run_benchmarks

        return run_benchmarks(settings)

    call.execute("evaluate", stage, then=None)


def _evaluate_heldout(call: Invocation, drafters: list[str]) -> None:
    start = call.drafter_for("evaluate", Path(drafters[0]) if drafters else None)

    def stage() -> Path:
        from pipeline.stages.evaluate import evaluate_drafter

        return evaluate_drafter(call.config, drafter=start)

    call.execute("evaluate", stage, then="deploy", drafter=start)


def with_benchmark(config: Config, given: dict[str, Any]) -> Config:
    """The configuration with what the command line says of benchmarks.

    Raises:
        UserError: naming the key that does not fit.
    """
    from pydantic import ValidationError

    from pipeline.config import describe_errors

    try:
        section = BenchmarkConfig.model_validate(config.benchmark.model_dump() | given)
    except ValidationError as error:
        raise UserError(f"benchmark.{describe_errors(error)}") from None
    return config.model_copy(update={"benchmark": section})


def _words(texts: list[str]) -> list[str]:
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            show_default=False,
            help="A report: the directory that evaluate wrote, also as DIR:LABEL; or a registry version or alias, with --config.",
        ),
    ],
    second: Annotated[
        str, typer.Argument(metavar="B", show_default=False, help="The other; differences are B's minus A's.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            show_default=False,
            help="For registry versions: the configuration whose output has the report.",
        ),
    ] = None,
    assignments: SetOption = None,
    output: OutputOption = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", show_default=False, help="Write the comparison there too."),
    ] = None,
) -> None:
    """Say whether one evaluation is better than another, conversation by conversation.

    Differences in acceptance length, overall and by domain, with intervals over conversations that both answered; and
    the ratio of speeds, if both were measured on one machine. Reports over other prompts or with other settings are
    refused, since their figures cannot be compared.

    Example: draftsmith compare outputs/old/benchmark outputs/new/benchmark

    Example: draftsmith compare previous-champion champion --config quickstart
    """
    from pipeline.benchmark.compare import compare_evaluations, open_side, show

    settings = None if config is None else read_config(config, assignments, output)
    found = compare_evaluations(open_side(first, settings), open_side(second, settings))
    show(found)
    if json_path is not None:
        from pipeline.result import write_json

        try:
            write_json(json_path, found)
        except OSError as error:
            raise UserError(f"--json: {json_path} cannot be written ({error.strerror})") from None

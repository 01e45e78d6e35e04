"""`draftsmith simulate`: what length policies would bring in serving, at concurrencies and on devices that are not at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.simulation.costs import DraftWork, RoundCosts, TableCosts, VerifyWork
from pipeline.simulation.methods import available, read_methods, read_words
from pipeline.simulation.record_traces import trace_of_record
from pipeline.simulation.report import ALL, console_rows, markdown, plain_wins, plot, recommended, tuned
from pipeline.simulation.requests import Requests
from pipeline.simulation.runs import Row, run_methods
from pipeline.simulation.trace_file import TraceSet, load_traces, save_traces
from pipeline.simulation.traffic import Traffic
from pipeline.stages.context import Stage, open_stage
from pipeline.stages.served_texts import greedy_records, replayed, sample, texts_and_drafter
from pipeline.stages.tune_policy import read_costs
from serving_bridge.records import VerificationRecord
from serving_bridge.transports import LogPlace

CONCURRENCY = (1, 8, 32, 128, 512)


@dataclass(frozen=True)
class TraceSource:
    """Where traces come from: a file, or texts replayed through a drafter, or the rounds of a log as they are.

    Attributes:
        file: made by an earlier run; nothing else is needed then.
        drafter: checkpoint that is replayed.
        records: a log of served text; None: the held-out documents.
        as_logged: take the log's rounds, and run no model.
        max_documents: of more texts so many are taken; see `texts_and_drafter`.
    """

    file: Path | None = None
    drafter: Path | None = None
    records: LogPlace | None = None
    as_logged: bool = False
    max_documents: int = 256


@dataclass(frozen=True)
class CostSource:
    """Where the seconds of a round come from.

    Attributes:
        table: a `costs.json` that `tune-policy` measured; else a roofline:
        device: of the data sheets, or `cpu`.
        model: target whose sizes count, in bfloat16; None: `target.model` in its own format. Its drafter is as `drafter` in the
            configuration says.
        overhead_ms: of each pass, beside the roofline.
    """

    table: Path | None = None
    device: str = "h100"
    model: str | None = None
    overhead_ms: float = 0.0


def simulate(
    config: Config,
    *,
    source: TraceSource,
    costs: CostSource,
    traffic: Traffic,
    concurrency: Sequence[int] = CONCURRENCY,
    policies: str | None = None,
) -> Path:
    """Writes `<output>/simulate/result.json`, `table.md`, `speedup.png`, and `traces.safetensors` if it made them.

    Args:
        config: the run.
        source: of the traces.
        costs: of the rounds.
        traffic: who asks; its concurrency is not used.
        concurrency: requests that run together at most, one run each.
        policies: see `read_methods`; None: all that the traces allow.

    Raises:
        UserError: naming the option that cannot be used.
    """
    if policies is not None:
        # before anything that takes time
        read_words(policies)
    with open_stage(config, "simulate") as stage:
        costs_of = _costs(config, costs)
        found = _traces(stage, source)
        traces = [trace for trace in found.traces if trace.spans]
        requests = Requests.of(traces, found.block_size)
        methods = read_methods(policies or available(requests), requests, config.policy)
        round_costs = costs_of(found.block_size)
        domains = sorted({trace.domain for trace in traces})
        groups = {ALL: requests}
        if len(domains) > 1:
            groups |= {
                name: Requests.of([t for t in traces if t.domain == name], found.block_size)
                for name in domains
            }
        say(f"{requests.count} responses, {requests.end_Q[-1]} blocks, {len(methods)} methods")
        rows: list[Row] = []
        with stage.result.section("simulate"):
            for name, group in groups.items():
                for row in run_methods(group, methods, round_costs, traffic, concurrency):
                    rows.append({"domain": name} | row)
        remarks = _remarks(found, costs, traffic)
        mixed = [] if traffic.rate is not None else [row for row in rows if row["domain"] == ALL]
        stage.result.metrics |= {
            "traces": {"source": found.source, "target_id": found.target_id, "responses": requests.count},
            "costs": asdict(costs) | {"table": None if costs.table is None else str(costs.table)},
            "traffic": asdict(traffic) | {"concurrency": list(concurrency)},
            "rounds": [_round_seconds(round_costs, load, requests, found.block_size) for load in concurrency],
            "tuned": tuned(mixed),
            "plain_wins": plain_wins(mixed),
            "rows": rows,
        }
        title = f"{config.name}: simulated serving"
        (stage.output / "table.md").write_text(markdown(title, rows, remarks))
        plot(stage.output / "speedup.png", title, rows)
        for name in ("table.md", "speedup.png"):
            stage.result.add_output(stage.output / name)
        show_table(
            title,
            ["method", "C", "setting", "speedup", "tokens/s", "tau", "verify_len", "latency p50, s"],
            list(console_rows(rows)),
        )
        for line in recommended(mixed):
            say(line)
        for remark in remarks:
            say(remark)
        for note in sorted({f"{r['concurrency']} requests: {text}" for r in rows for text in r["notes"]}):
            say(f"note: {note}")
        return stage.output


def _traces(stage: Stage, source: TraceSource) -> TraceSet:
    if source.file is not None:
        found = load_traces(source.file)
        stage.result.add_input(source.file)
        return found
    found = _logged(source, stage.config.seed) if source.as_logged else _replayed(stage, source)
    path = stage.output / "traces.safetensors"
    save_traces(path, found)
    stage.result.add_output(path)
    return found


def _logged(source: TraceSource, seed: int) -> TraceSet:
    """Greedy records of the log that have rounds, of one target and block size."""
    assert source.records is not None
    kinds: set[tuple[str, int]] = set()

    def with_rounds(log: LogPlace) -> Iterator[VerificationRecord]:
        for record in greedy_records(log):
            # a server without a drafter, or one that decoded plainly all along, logs texts too
            if record.rounds:
                kinds.add((record.target_id, record.block_size))
                yield record

    chosen = sample(with_rounds(source.records), source.max_documents, seed)
    if len(kinds) != 1:
        what = (
            "no greedy record with rounds" if not kinds else f"records of {len(kinds)} targets or block sizes"
        )
        raise UserError(f"--records {source.records}: {what}; --as-logged needs those of one")
    ((target_id, block_size),) = kinds
    versions = sorted({this.drafter_version for record in chosen for this in record.rounds})
    traces = [trace_of_record(record) for record in chosen]
    tokens = sum(len(record.output_ids) - 1 for record in chosen)
    left_out = tokens - sum(len(trace.row_of) for trace in traces)
    outside = f"; {left_out} of {tokens} tokens, outside any round, left out" if left_out else ""
    return TraceSet(
        traces,
        block_size,
        target_id,
        ", ".join(versions),
        f"logged rounds; blocks that serving did not draft are estimated{outside}",
    )


def _replayed(stage: Stage, source: TraceSource) -> TraceSet:
    assert source.drafter is not None
    stage.result.add_input(source.drafter)
    target = stage.bundle.target
    documents, loaded = texts_and_drafter(stage, source.drafter, source.records, source.max_documents)
    return TraceSet(
        replayed(stage, loaded, documents),
        loaded.drafter.block_size,
        target.identity.target_id,
        loaded.drafter_version,
        "texts replayed through the drafter",
    )


def _costs(config: Config, source: CostSource) -> Callable[[int], RoundCosts]:
    """Costs by block size; what is wrong with the source is said before traces are made."""
    if source.table is not None:
        table = TableCosts(read_costs(source.table))
        return lambda block_size: table
    from pipeline.plan.devices import find_device
    from pipeline.plan.models import models_of
    from pipeline.plan.planner import target_bytes
    from pipeline.simulation.roofline import RooflineCosts

    if source.model is not None:
        # the configured number format is that of another model
        target = config.target.model_copy(update={"model": source.model, "dtype": "auto"})
        config = config.model_copy(update={"target": target})
    models, device = models_of(config), find_device(source.device)
    element_bytes, overhead_s = target_bytes(config, source.device), source.overhead_ms / 1000
    return lambda block_size: RooflineCosts(models, device, block_size, element_bytes, overhead_s)


def _remarks(found: TraceSet, costs: CostSource, traffic: Traffic) -> list[str]:
    """What the figures are made of."""
    lines = [f"traces: {found.source}; target {found.target_id}, drafter {found.drafter_version}"]
    if costs.table is not None:
        lines.append(f"costs: measured table {costs.table}")
    else:
        model = costs.model or "the configured target"
        lines.append(
            f"costs: roofline of {model} on {costs.device}, {costs.overhead_ms:g} ms a pass added; computed, not measured"
        )
    asked = "clients that ask again at once" if traffic.rate is None else f"{traffic.rate:g} requests/s"
    prompts = "read in the rounds" if traffic.prompts else "not counted"
    lines.append(f"traffic: {asked}; prompts {prompts}")
    if traffic.rate is not None:
        lines.append(
            "requests come at their own rate, so tokens/s say what was asked and when the last was over: "
            "compare latencies; no speedup is given, and no setting is called best"
        )
    return lines


def _round_seconds(costs: RoundCosts, load: int, requests: Requests, block_size: int) -> dict[str, Any]:
    """A plain round, drafting, and verification of whole blocks, in the middle of texts of mean length."""
    middle = int((requests.prompt_Q + (requests.end_Q - requests.first_Q) / 2).mean())

    def verify(length: int) -> float:
        pairs = load * (length * middle + length * (length + 1) // 2)
        return costs.verify_s(VerifyWork(load, load * length, load * length, load * middle, pairs))

    return {
        "concurrency": load,
        "context": middle,
        "plain_s": verify(1),
        "draft_s": costs.draft_s(DraftWork(load, load, load * middle)),
        "verify_whole_s": verify(block_size),
    }

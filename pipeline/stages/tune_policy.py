"""`draftsmith tune-policy`: which length policy, and with what setting, commits most tokens per second at each load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from drafters.step_cost import StepCosts
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.measure_costs import measure_costs
from pipeline.policy_walk import WalkResult, walk
from pipeline.simulation.costs import TableCosts
from pipeline.simulation.methods import every_method
from pipeline.simulation.report import plain_wins, recommended, tuned
from pipeline.simulation.requests import Requests
from pipeline.simulation.runs import Row
from pipeline.stages.context import open_stage
from pipeline.stages.served_texts import replayed, texts_and_drafter
from serving_bridge.transports import LogPlace

MEASURED_ROUNDS = 60


def tune_policy(
    config: Config,
    *,
    drafter: Path,
    records: LogPlace | None = None,
    loads: Sequence[int] = (1, 4, 16),
    costs: Path | None = None,
    max_documents: int = 256,
) -> Path:
    """Writes `<output>/tune_policy/result.json` and `costs.json`.

    Args:
        config: the run.
        drafter: checkpoint whose blocks and heads are walked.
        records: a log of served text; None takes the held-out documents. Greedy records of this target only: a sampled text does
            not tell what sampling would have accepted.
        loads: numbers of requests running together.
        costs: a `costs.json` in place of measuring on this machine.
        max_documents: of more texts so many are taken; see `texts_and_drafter`.

    Raises:
        UserError: without texts, or when the costs cannot be read.
    """
    with open_stage(config, "tune_policy") as stage:
        stage.result.add_input(drafter)
        documents, loaded = texts_and_drafter(stage, drafter, records, max_documents)
        if costs is None:
            with stage.result.section("measure_costs"):
                table = measure_costs(
                    stage.bundle,
                    loaded.drafter,
                    documents,
                    loads,
                    rounds=MEASURED_ROUNDS,
                    max_new_tokens=config.evaluate.max_new_tokens,
                    seed=config.seed,
                )
        else:
            table = read_costs(costs)
        saved = stage.output / "costs.json"
        saved.write_text(json.dumps(table.to_json()) + "\n")
        stage.result.add_output(saved)
        traces = replayed(stage, loaded, documents)
        say(f"{len(traces)} texts, {sum(len(t.row_of) for t in traces)} blocks")
        requests, known = Requests.of(traces, loaded.drafter.block_size), TableCosts(table)
        tried = every_method(
            requests.block_size,
            length_head=loaded.length_head is not None,
            acceptance_head=loaded.acceptance_head is not None,
            probe_every=config.policy.probe_every,
        )
        rows: list[Row] = []
        for load in loads:
            results = [walk(method, requests, known, load, table) for method in tried]
            reported = report(load, results)
            stage.result.metrics[f"load_{load}"] = reported
            rows += [{"concurrency": load} | row for row in reported["candidates"]]
        stage.result.metrics |= {"tuned": tuned(rows), "plain_wins": plain_wins(rows)}
        for line in recommended(rows):
            say(line)
        return stage.output


def read_costs(path: Path) -> StepCosts:
    """A table written by an earlier run.

    Raises:
        UserError: when the file is none.
    """
    try:
        return StepCosts.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--costs {path}: not a cost table ({error})") from None


def report(load: int, results: Sequence[WalkResult]) -> dict[str, Any]:
    """Print one load's table, best first; returns it for the result file."""
    ordered = sorted(results, key=lambda result: -result.tokens_per_s.point)
    rows = [
        {
            "policy": result.method.name,
            "setting": result.method.setting,
            "verify_len": result.verify_len,
            "acceptance_length": result.acceptance_length,
            "tokens_per_s": result.tokens_per_s.point,
            "tokens_per_s_low": result.tokens_per_s.low,
            "tokens_per_s_high": result.tokens_per_s.high,
        }
        for result in ordered
    ]
    best = ordered[0]
    show_table(
        f"{load} requests: {best.method.name} {best.method.setting}".rstrip(),
        ["policy", "setting", "mean verify_len", "tau", "tokens/s", "low", "high"],
        [
            [
                r.method.name,
                r.method.setting,
                f"{r.verify_len:.2f}",
                f"{r.acceptance_length:.3f}",
                f"{r.tokens_per_s.point:.1f}",
                f"{r.tokens_per_s.low:.1f}",
                f"{r.tokens_per_s.high:.1f}",
            ]
            for r in ordered
        ],
    )
    return {"best": rows[0], "candidates": rows}

"""`draftsmith evaluate`: held-out τ, losslessness, speed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from drafters.branches import Budget
from drafters.decoding import ServingDrafter
from drafters.errors import UserError
from drafters.packing import Document
from drafters.policies import FixedPolicy
from drafters.replay import replay
from drafters.target import Target
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.corpus import load_documents, responses_directory
from pipeline.lookahead import Comparison, SlowedTarget, compare_lookahead, lookahead_worker
from pipeline.lossless import LosslessReport, check_lossless
from pipeline.measure import acceptance_summary, decoding_speed
from pipeline.models import load_drafter_for, load_target
from pipeline.policies import make_policy
from pipeline.stages.context import Stage, open_stage

Item = TypeVar("Item")


def evaluate_drafter(config: Config, *, drafter: Path, lossless: bool = True) -> Path:
    """Evaluate on the held-out prompts; writes `<output>/evaluate/result.json` and `heldout.jsonl`.

    τ is replayed on the target's own greedy responses. The lossless check (unless switched off: the whole run makes a
    larger one) runs in float32 against the same responses.
    """
    with open_stage(config, "evaluate") as stage:
        stage.result.add_input(drafter)
        stage.result.add_input(responses_directory(config, "heldout"))
        documents = heldout_documents(stage)
        loaded = load_drafter_for(drafter, stage.bundle, dtype=stage.bundle.target.dtype)
        with stage.result.section("replay"), torch.no_grad():
            results = replay(loaded.drafter, stage.bundle.target, documents)
        stage.result.metrics |= acceptance_summary(results, loaded.drafter.block_size)
        say(f"acceptance length {stage.result.metrics['acceptance_length']:.3f} on {len(documents)} prompts")
        serving = ServingDrafter(loaded.drafter, make_policy(config.policy, loaded), loaded.drafter_version)
        budget = None
        if config.lookahead.mode != "off":
            with stage.result.section("lookahead"):
                budget, stage.result.metrics["lookahead"] = measure_lookahead(stage, serving, documents)
        if config.evaluate.speed_prompts:
            with stage.result.section("speed"):
                stage.result.metrics["speed"] = decoding_speed(
                    stage.bundle,
                    serving,
                    spread(documents, config.evaluate.speed_prompts),
                    max_new_tokens=config.evaluate.max_new_tokens,
                    ahead=None if budget is None else lambda: lookahead_worker(config.lookahead, budget),
                )
        if lossless and config.evaluate.lossless_prompts:
            with stage.result.section("lossless"):
                report = lossless_in_float32(config, [drafter], documents)
            stage.result.metrics |= {
                "lossless": report.lossless,
                "lossless_prompts": report.compared,
                "prepared_rounds": report.prepared_rounds,
            }
            say(f"lossless: {report.lossless} ({', '.join(f'{k} {n}' for k, n in report.compared.items())})")
            if not report.lossless:
                say(f"differing: {report.differing}")
        heldout_file = stage.output / "heldout.jsonl"
        write_heldout(heldout_file, documents)
        stage.result.add_output(heldout_file)
        return stage.output


def measure_lookahead(
    stage: Stage, serving: ServingDrafter, documents: Sequence[Document]
) -> tuple[Budget, dict[str, Any]]:
    """The budget as configured, or as measured fastest, and what drafting ahead brings with it, whole blocks verified.

    Where `auto` finds that none is worth it, the best of all budgets is returned all the same, so that it is measured; the
    report says whether it pays.
    """
    serving = replace(serving, policy=FixedPolicy())
    config, target = stage.config.lookahead, stage.bundle.target
    chosen = spread(documents, config.measure_documents)

    def compare(slowed: Target) -> Comparison:
        return compare_lookahead(
            config, slowed, serving, chosen, max_new_tokens=stage.config.evaluate.max_new_tokens
        )

    plain = compare(target)
    report: dict[str, Any] = {"as_is": plain.report(), "slowed": []}
    for factor in config.slowdowns:
        slowed = compare(SlowedTarget(target, factor * plain.draft_s))
        report["slowed"].append({"slowdown": factor, **slowed.report()})
    show_table(
        "drafting ahead",
        ["target", "C", "F", "hit rate", "tokens/s without", "with", "gain", "foretold"],
        [
            [
                name,
                str(row["coverage"]),
                str(row["fan_out"]),
                f"{row['ahead']['hit_rate']:.2f}",
                f"{row['sync']['tokens_per_s']:.1f}",
                f"{row['ahead']['tokens_per_s']:.1f}",
                f"{row['gain']:.3f}",
                f"{row['gain_foretold']:.3f}",
            ]
            for name, row in [
                ("as it is", report["as_is"]),
                *((f"{row['slowdown']:g} x drafter", row) for row in report["slowed"]),
            ]
        ],
    )
    return plain.budget, report


def heldout_documents(stage: Stage) -> list[Document]:
    """The held-out documents of this run.

    Raises:
        UserError: when the config names none.
    """
    if not stage.config.data.heldout:
        raise UserError("data.heldout: no held-out prompts to evaluate on")
    return load_documents(stage.config, "heldout", stage.bundle.target.identity)


def lossless_in_float32(
    config: Config, directories: Sequence[Path], documents: Sequence[Document]
) -> LosslessReport:
    """The lossless check on a float32 copy of the target."""
    bundle = load_target(config, dtype="float32")
    chosen = spread(documents, config.evaluate.lossless_prompts)
    return check_lossless(config, bundle, directories, chosen, LosslessReport())


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """`count` items, documents mostly, taken evenly over the sequence, hence over its domains."""
    if count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def write_heldout(path: Path, documents: Sequence[Document]) -> None:
    """Prompt and output ids, one JSON object a line, so that figures can be recomputed with other software."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w") as handle:
        for document in documents:
            prompt, output = document.prompt_and_output()
            row = {
                "id": document.document_id,
                "domain": document.domain,
                "prompt_ids": prompt,
                "output_ids": output,
            }
            handle.write(json.dumps(row) + "\n")
    os.chmod(name, 0o644)
    os.replace(name, path)

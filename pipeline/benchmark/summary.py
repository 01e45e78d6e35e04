"""The content of a report: figures of all cells, and everything needed to judge and to repeat them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.benchmark.cells import Cell
from pipeline.benchmark.divergence import chosen_answers, divergence_of
from pipeline.benchmark.documents import Resampling
from pipeline.benchmark.figures import cell_figures
from pipeline.benchmark.measuring import Evaluation, machine
from pipeline.result import git_state

FORMAT = 1
NOTES = [
    "Speedup is tokens/s over plain decoding by the same engine at the same concurrency. τ counts the target's own token of a "
    "round and not the prefill's. Acceptance rate is (τ-1)/(B-1).",
    "Languages are what the data say, else guessed from the scripts of the prompt's letters. Context length is the number of "
    "tokens before a round's anchor.",
]


def make_report(evaluation: Evaluation, cells: Sequence[Cell]) -> dict[str, Any]:
    """Content of `report.json`."""
    section = evaluation.config.benchmark
    how = Resampling.of(section, evaluation.config.seed)
    figures = []
    for cell in cells:
        alike = [
            c
            for c in cells
            if (c.key.benchmark, c.key.concurrency) == (cell.key.benchmark, cell.key.concurrency)
        ]
        plain = next((c for c in alike if c.block_size == 1), None)
        reference = next((c for c in alike if c.block_size > 1), None)
        figures.append(cell_figures(cell, plain, reference if cell.block_size > 1 else None, section, how))
    commit, dirty = git_state()
    return {
        "format": FORMAT,
        "name": evaluation.config.name,
        "settings": evaluation.settings(),
        "confidence": section.confidence,
        "bootstrap": {"samples": section.bootstrap_samples, "seed": evaluation.config.seed},
        "benchmarks": {
            spec.name: {
                "title": spec.title,
                "group": spec.group,
                "source": spec.source if spec.path or spec.dataset or spec.blend else "data.heldout",
                "conversations": len(evaluation.asked[spec.name]),
                "skipped": evaluation.skipped[spec.name],
                "prompts": evaluation.digests[spec.name],
            }
            for spec in evaluation.plan.benchmarks
        },
        "drafters": {
            d.label: {
                "version": d.drafter_version,
                "family": d.family,
                "block_size": d.block_size,
                "digest": d.digest,
            }
            for d in evaluation.plan.drafters
        },
        "machine": machine(),
        "git_commit": commit,
        "git_dirty": dirty,
        "ended_at": max(cell.facts["ended_at"] for cell in cells),
        "cells": figures,
        "divergence": _divergence(evaluation, cells),
        "notes": NOTES,
    }


def _divergence(evaluation: Evaluation, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Needs both models, so the embedded engine's alone."""
    count = evaluation.config.benchmark.divergence_documents
    if not count or evaluation.config.benchmark.backend != "local":
        return []
    first = {cell.key.benchmark: cell.answers for cell in reversed(cells)}
    chosen = chosen_answers([first[spec.name] for spec in evaluation.plan.benchmarks], count)
    used = {way.drafter.label for way in evaluation.plan.ways if way.drafter is not None and way.label}
    found = [
        divergence_of(d, evaluation.stage.bundle, chosen) for d in evaluation.plan.drafters if d.label in used
    ]
    return [one for one in found if one is not None]


def main_figures(report: dict[str, Any]) -> dict[str, Any]:
    """The main figures of each cell, under names that say which."""
    found: dict[str, Any] = {}
    for cell in report["cells"]:
        words = [cell["benchmark"], cell["drafter"], cell["method"], f"c{cell['concurrency']}"]
        tau, speedup = cell["acceptance_length"], cell["speedup"]
        found["/".join(word for word in words if word)] = {
            "acceptance_length": None if tau is None else tau["point"],
            "acceptance_rate": cell["acceptance_rate"],
            "tokens_per_s": cell["tokens_per_s"]["point"],
            "speedup": None if speedup is None else speedup["point"],
            "verify_len": cell["verify_len"],
            "latency_s": cell["latency_s"],
        }
    return found

"""`draftsmith evaluate --benchmark …`: drafters and methods on benchmarks, cell by cell, and the report."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from datamodules.benchmarks import BenchmarkSpec
from datamodules.prompts import Conversation
from drafters.errors import UserError
from pipeline.benchmark.catalogue import conversations_of
from pipeline.benchmark.cells import Cell, CellKey, prompts_digest
from pipeline.benchmark.divergence import chosen_answers, divergence_of
from pipeline.benchmark.documents import Resampling
from pipeline.benchmark.figures import cell_figures
from pipeline.benchmark.local_backend import LocalBackend
from pipeline.benchmark.methods import ASYNC
from pipeline.benchmark.plan import FOLDER, EvaluationPlan, Way, make_plan
from pipeline.benchmark.progress import CellProgress
from pipeline.benchmark.report import write_report
from pipeline.benchmark.sglang_backend import SGLangBackend
from pipeline.benchmark.tables import speedup_table
from pipeline.benchmark.traffic import Asker, Completer
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.hardware import resolve_dtype
from pipeline.models import TargetFacts, read_tokenizer
from pipeline.result import git_state
from pipeline.stages.context import Stage, open_stage

FORMAT = 1


def run_benchmarks(config: Config) -> Path:
    """Measure every cell that is not finished, and report on all; writes `<output>/benchmark/report` and `result.json`.

    Raises:
        UserError: for what is not there or does not fit, before anything is decoded; or when decoding fails.
    """
    plan = make_plan(config)
    facts = read_tokenizer(config)
    for way in plan.ways:
        if way.server is not None and way.server.target_id not in (None, facts.identity.target_id):
            raise UserError(
                f"--url {way.server.url}: serves {way.server.target_id}, the configuration's target is "
                f"{facts.identity.target_id}; prompts would mean other text"
            )
    with open_stage(config, FOLDER) as stage:
        for drafter in plan.drafters:
            stage.result.add_input(drafter.directory)
        asked = {spec.name: conversations_of(spec, config) for spec in plan.benchmarks}
        evaluation = Evaluation(stage, plan, facts, asked)
        with stage.result.section("measure"):
            cells = evaluation.measure()
        with stage.result.section("report"):
            report = evaluation.report(cells)
            directory = write_report(stage.output / "report", report, cells)
        stage.result.add_output(directory)
        stage.result.metrics |= {"target_id": facts.identity.target_id, "cells": _metrics(report)}
        stage.tracked.log_artifact(directory)
        table = speedup_table(report)
        show_table(table.caption, table.flat_columns(), table.rows)
        say(f"report: {directory / 'report.html'}")
        return stage.output


class Evaluation:
    """A run under way."""

    def __init__(
        self, stage: Stage, plan: EvaluationPlan, facts: TargetFacts, asked: dict[str, list[Conversation]]
    ) -> None:
        self.stage = stage
        self.plan = plan
        self.facts = facts
        self.config = stage.config
        positions = [facts.positions, *(w.server.context_length for w in plan.ways if w.server is not None)]
        known = [p for p in positions if p is not None]
        self.asker = Asker(
            facts.tokenizer, self.config.benchmark, self.config.seed, min(known) if known else None
        )
        self.asked: dict[str, list[Conversation]] = {}
        self.skipped: dict[str, int] = {}
        for name, conversations in asked.items():
            self.asked[name], self.skipped[name] = self.asker.fitting(conversations)
            if not self.asked[name]:
                raise UserError(
                    f"--benchmark {name}: all {len(conversations)} prompts are longer than {self.asker.longest_prompt} "
                    "tokens; lower benchmark.max_new_tokens"
                )
        self.digests = {name: prompts_digest(conversations) for name, conversations in self.asked.items()}

    def settings(self) -> dict[str, Any]:
        """What must be equal for two reports to be compared."""
        section = self.config.benchmark
        names = ("backend", "temperature", "top_p", "top_k", "max_new_tokens", "thinking")
        return {
            "target_id": self.facts.identity.target_id,
            **{name: getattr(section, name) for name in names},
            "dtype": resolve_dtype(self.config.target.dtype) if section.backend == "local" else None,
            # greedy text does not depend on it
            "seed": self.config.seed if section.temperature > 0 else None,
        }

    def made_of(self, way: Way, key: CellKey) -> dict[str, Any]:
        """Everything that a cell's content depends on, the machine aside."""
        config, section = self.config, self.config.benchmark
        local = way.server is None
        return {
            **self.settings(),
            "prompts": self.digests[key.benchmark],
            "method": way.method.label,
            "concurrency": key.concurrency,
            "drafter": way.drafter.digest if way.drafter is not None and not way.method.plain else None,
            "server": None if way.server is None else way.server.identity,
            "policy": way.method.policy(config.policy).model_dump(mode="json")
            if local and not way.method.plain
            else None,
            "lookahead": config.lookahead.model_dump(mode="json") if way.method.name == ASYNC else None,
            "threads": config.threads if local else None,
            "warmup_tokens": section.warmup_tokens,
            "longest_prompt": self.asker.longest_prompt,
        }

    def measure(self) -> list[Cell]:
        """All cells, in the plan's order; those finished before are read."""
        store = self.plan.store
        store.clear_unfinished()
        todo = {
            key: self.made_of(way, key)
            for way in self.plan.ways
            for _, key in self.plan.cells_of(way)
            if not store.finished(key, self.made_of(way, key))
        }
        total = sum(1 for way in self.plan.ways for _ in self.plan.cells_of(way))
        if len(todo) < total:
            say(f"{total - len(todo)} of {total} cells were finished before")
        with CellProgress(len(todo)) as progress:
            for way in self.plan.ways:
                cells = [(spec, key) for spec, key in self.plan.cells_of(way) if key in todo]
                if not cells:
                    continue
                with self._serving(way) as completer:
                    for spec, key in cells:
                        cell = self._cell(completer, way, spec, key, progress)
                        store.save(cell, todo[key])
                        progress.finished(cell)
        return [store.load(key) for way in self.plan.ways for _, key in self.plan.cells_of(way)]

    def _serving(self, way: Way) -> AbstractContextManager[Completer]:
        if way.server is not None:
            if self.config.benchmark.temperature > 0 and not way.server.samples:
                raise UserError(
                    f"--temperature: {way.server.url} decodes sampled requests greedily (its build lacks the kernel)"
                )
            return SGLangBackend(self.config, self.facts.eos_ids).serving(way.server)
        assert way.drafter is not None
        return LocalBackend(self.config, self.stage.bundle).serving(way.drafter, way.method)

    def _cell(
        self, completer: Completer, way: Way, spec: BenchmarkSpec, key: CellKey, progress: CellProgress
    ) -> Cell:
        conversations = self.asked[spec.name]
        progress.begin(key, len(conversations))
        self.asker.warm_up(completer, conversations[0])
        completer.prepare(key.concurrency)
        played = self.asker.play(completer, conversations, key.concurrency, progress.advance)
        block_size = 1
        if not way.method.plain:
            block_size = way.server.block_size if way.server is not None else _block_size(way)
        return Cell(
            key,
            played.answers,
            played.wall_seconds,
            block_size,
            skipped=self.skipped[spec.name],
            short=played.short,
            verified_share=completer.verified_share(),
            facts={"machine": machine(), "ended_at": datetime.now(UTC).isoformat()},
        )

    def report(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Content of `report.json`."""
        section = self.config.benchmark
        how = Resampling.of(section, self.config.seed)
        figures = []
        for cell in cells:
            alike = [
                c
                for c in cells
                if (c.key.benchmark, c.key.concurrency) == (cell.key.benchmark, cell.key.concurrency)
            ]
            plain = next((c for c in alike if c.block_size == 1), None)
            reference = next((c for c in alike if c.block_size > 1), None)
            figures.append(
                cell_figures(cell, plain, reference if cell.block_size > 1 else None, section, how)
            )
        commit, dirty = git_state()
        return {
            "format": FORMAT,
            "name": self.config.name,
            "settings": self.settings(),
            "confidence": section.confidence,
            "bootstrap": {"samples": section.bootstrap_samples, "seed": self.config.seed},
            "benchmarks": {
                spec.name: {
                    "title": spec.title,
                    "group": spec.group,
                    "source": spec.source if spec.path or spec.dataset or spec.blend else "data.heldout",
                    "conversations": len(self.asked[spec.name]),
                    "skipped": self.skipped[spec.name],
                    "prompts": self.digests[spec.name],
                }
                for spec in self.plan.benchmarks
            },
            "drafters": {
                d.label: {
                    "version": d.drafter_version,
                    "family": d.family,
                    "block_size": d.block_size,
                    "digest": d.digest,
                }
                for d in self.plan.drafters
            },
            "machine": machine(),
            "git_commit": commit,
            "git_dirty": dirty,
            "ended_at": max(cell.facts["ended_at"] for cell in cells),
            "cells": figures,
            "divergence": self._divergence(cells),
            "notes": NOTES,
        }

    def _divergence(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Needs both models, so the embedded engine's alone."""
        count = self.config.benchmark.divergence_documents
        if not count or self.config.benchmark.backend != "local":
            return []
        first = {cell.key.benchmark: cell.answers for cell in reversed(cells)}
        chosen = chosen_answers([first[spec.name] for spec in self.plan.benchmarks], count)
        used = {way.drafter.label for way in self.plan.ways if way.drafter is not None and way.label}
        found = [divergence_of(d, self.stage.bundle, chosen) for d in self.plan.drafters if d.label in used]
        return [one for one in found if one is not None]


NOTES = [
    "Speedup is tokens/s over plain decoding by the same engine at the same concurrency. τ counts the target's own token of a "
    "round and not the prefill's. Acceptance rate is (τ-1)/(B-1).",
    "Languages are what the data say, else guessed from the scripts of the prompt's letters. Context length is the number of "
    "tokens before a round's anchor.",
]


def machine() -> dict[str, Any]:
    """Where speeds were measured."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "node": platform.node(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _block_size(way: Way) -> int:
    assert way.drafter is not None
    return way.drafter.block_size


def _metrics(report: dict[str, Any]) -> dict[str, Any]:
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

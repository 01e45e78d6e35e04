"""Measuring the cells of a plan: what each is made of, who serves it, and what is there already."""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import torch

from datamodules.benchmarks import BenchmarkSpec
from datamodules.prompts import Conversation
from drafters.errors import UserError
from pipeline.benchmark.cells import Cell, CellKey, prompts_digest
from pipeline.benchmark.local_backend import LocalBackend
from pipeline.benchmark.methods import ASYNC
from pipeline.benchmark.plan import EvaluationPlan, Way
from pipeline.benchmark.progress import CellProgress
from pipeline.benchmark.sglang_backend import SGLangBackend
from pipeline.benchmark.traffic import Asker, Completer
from pipeline.console import say
from pipeline.hardware import resolve_dtype
from pipeline.models import TargetFacts
from pipeline.result import git_state
from pipeline.stages.context import Stage


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
        """Everything that a cell's content depends on."""
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
            # a speedup over a cell of another machine, or of other code, would mean nothing
            "machine": machine(),
            "commit": git_state()[0],
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
        if key.concurrency > len(conversations):
            say(f"{key.label}: only {len(conversations)} conversations, so no more are under way")
        progress.begin(key, len(conversations))
        completer.prepare(key.concurrency)
        self.asker.warm_up(completer, conversations[0])
        # again: what the warm-up counted is not the cell's
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

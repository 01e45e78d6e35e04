"""What an evaluation will do, from the configuration: benchmarks, drafters, methods, and the cells they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datamodules.benchmarks import BenchmarkSpec
from drafters.errors import UserError
from pipeline.benchmark.catalogue import HELDOUT, choose_benchmarks
from pipeline.benchmark.cells import CellKey, CellStore
from pipeline.benchmark.methods import DrafterChoice, Method, default_methods, pair_up, parse_methods
from pipeline.benchmark.places import resolve_drafters
from pipeline.benchmark.sglang_backend import (
    RunningServer,
    choose_servers,
    find_servers,
    require_served,
)
from pipeline.config import Config

FOLDER = "benchmark"


@dataclass(frozen=True)
class Way:
    """One way of decoding: a method with a drafter, or what a server runs."""

    method: Method
    drafter: DrafterChoice | None = None
    server: RunningServer | None = None

    @property
    def label(self) -> str:
        """Of the drafter, empty for plain decoding."""
        if self.method.plain:
            return ""
        if self.drafter is not None:
            return self.drafter.label
        return self.server.drafter_version if self.server is not None else ""


@dataclass(frozen=True)
class EvaluationPlan:
    """Cells in the order they are measured: each way opens its engine once, plain decoding first."""

    config: Config
    benchmarks: list[BenchmarkSpec]
    ways: list[Way]
    drafters: list[DrafterChoice] = field(default_factory=list)

    @property
    def store(self) -> CellStore:
        return CellStore(self.config.output / FOLDER / "cells")

    def cells_of(self, way: Way) -> Iterator[tuple[BenchmarkSpec, CellKey]]:
        """What one way is measured on."""
        for spec in self.benchmarks:
            for concurrency in self.config.benchmark.concurrency:
                yield spec, CellKey(spec.name, way.label, way.method.label, concurrency)

    def lines(self) -> Iterator[str]:
        """For `--dry-run`."""
        settings = self.config.benchmark
        yield "evaluate would"
        yield f"  ask {settings.limit or 'all'} conversations of each"
        for spec in self.benchmarks:
            yield f"    {spec.name}  {'data.heldout' if spec.name == HELDOUT else spec.source}"
        thinking = "" if settings.thinking is None else f", thinking {'on' if settings.thinking else 'off'}"
        yield (
            f"  decode up to {settings.max_new_tokens} tokens a turn at temperature {settings.temperature:g}{thinking}, "
            f"backend {settings.backend}"
        )
        for drafter in self.drafters:
            yield f"    drafter {drafter.label}: {drafter.directory} (version {drafter.drafter_version})"
        yield "  measure"
        for way in self.ways:
            for _, key in self.cells_of(way):
                there = "  (there; kept if nothing changed)" if self.store.present(key) else ""
                yield f"    {key.label}{there}"
        yield "  write"
        yield f"    {self.config.output / FOLDER / 'report'}"


def make_plan(config: Config) -> EvaluationPlan:
    """Resolve what the section names.

    Raises:
        UserError: for anything that is not there or does not fit.
    """
    settings = config.benchmark
    benchmarks = choose_benchmarks(settings.names or [HELDOUT])
    methods = None if settings.methods is None else _methods_of(settings.methods, settings.backend)
    if any(spec.name == HELDOUT for spec in benchmarks):
        _require_heldout(config)
    if settings.backend == "sglang":
        servers = find_servers(config, settings.urls or config.sglang.urls)
        named = resolve_drafters(config) if settings.drafters else []
        chosen = choose_servers(servers, methods)
        require_served(chosen, named)
        return EvaluationPlan(config, benchmarks, [Way(s.method, server=s) for s in chosen], named)
    drafters = resolve_drafters(config)
    pairs = pair_up(drafters, methods or default_methods(drafters))
    return EvaluationPlan(config, benchmarks, [Way(m, drafter=d) for d, m in pairs], drafters)


def _methods_of(texts: Sequence[str], backend: str) -> list[Method]:
    if not texts:
        raise UserError("--method: names none; leave it out for the usual ones")
    if backend == "sglang":
        # a server may run an algorithm of another project
        return [Method(text.strip().lower()) for text in texts]
    return parse_methods(texts)


def _require_heldout(config: Config) -> None:
    if not config.data.heldout:
        raise UserError("data.heldout: no held-out prompts to evaluate on; name a --benchmark")
    for index, source in enumerate(config.data.heldout):
        if source.path is not None and not Path(source.path).is_file():
            raise UserError(f"data.heldout.{index}.path: {source.path}: no such file")

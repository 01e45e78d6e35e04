"""The benchmarks that `evaluate` knows by name, and those that a user names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from datamodules.benchmarks import BenchmarkSpec, load_benchmark
from datamodules.prompts import Conversation
from drafters.errors import UserError
from pipeline.config import Config

CATALOGUE = Path(__file__).resolve().parents[2] / "configs" / "benchmarks" / "catalogue.yaml"
HELDOUT = "heldout"


def read_catalogue() -> dict[str, BenchmarkSpec]:
    """Shipped benchmarks by name, in the file's order."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load(CATALOGUE.read_text())
    specs: dict[str, BenchmarkSpec] = {}
    for name, entry in entries.items():
        entry = dict(entry)
        if "blend" in entry:
            entry["blend"] = tuple(specs[part] for part in entry["blend"])
        if "data_files" in entry:
            entry["data_files"] = tuple(entry["data_files"])
        specs[name] = BenchmarkSpec(name=name, **entry)
    return specs


def choose_benchmarks(names: Sequence[str]) -> list[BenchmarkSpec]:
    """Benchmarks as written.

    A name of the catalogue, `heldout`, a JSONL file as `NAME=PATH` or `PATH`, or a data set of the hub as `OWNER/NAME:SPLIT`,
    whose rows have one of the shapes of prompt files.

    A known name given a path keeps its title and place in tables.

    Raises:
        UserError: unknown or repeated name, or missing file.
    """
    known = read_catalogue()
    chosen: dict[str, BenchmarkSpec] = {}
    for written in names:
        name, given, place = written.partition("=")
        if not given and Path(name).is_file():
            name, given, place = Path(name).stem, "=", name
        key = name.strip().lower()
        if not key or (given and not place):
            raise UserError(f"--benchmark {written}: write NAME, or NAME=PATH for a JSONL file")
        if given:
            path = Path(place).expanduser()
            if not path.is_file():
                raise UserError(f"--benchmark {written}: {path}: no such file")
            entry = known.get(key)
            title, group = (entry.title, entry.group) if entry is not None else (name.strip(), "")
            spec = BenchmarkSpec(key, title, group, path=path)
        elif key == HELDOUT:
            spec = BenchmarkSpec(HELDOUT, "held-out")
        elif key in known:
            spec = known[key]
        elif "/" in name:
            dataset, _, split = name.partition(":")
            spec = BenchmarkSpec(key, dataset, dataset=dataset, split=split or "test")
        else:
            raise UserError(
                f"--benchmark {written}: unknown; use one of {', '.join([*known, HELDOUT])}, NAME=PATH for a JSONL file, "
                "or a hub name, OWNER/NAME:SPLIT"
            )
        if key in chosen:
            raise UserError(f"--benchmark {written}: given twice")
        chosen[key] = spec
    return list(chosen.values())


def conversations_of(spec: BenchmarkSpec, config: Config) -> list[Conversation]:
    """What a benchmark asks, at most `benchmark.limit` conversations of it.

    Raises:
        UserError: when it cannot be read.
    """
    limit = config.benchmark.limit
    if spec.name != HELDOUT:
        return load_benchmark(spec, limit)
    from pipeline.corpus import conversations

    found = conversations(config, "heldout")
    if not found:
        raise UserError("data.heldout: no held-out prompts to evaluate on; name a --benchmark")
    if limit is None or limit >= len(found):
        return found
    return [found[i * len(found) // limit] for i in range(limit)]

"""`draftsmith compare`: two evaluations, paired by conversation."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from pipeline.benchmark.documents import DocumentSums, Resampling, paired
from pipeline.benchmark.figures import speed_quotient, tau_difference
from pipeline.benchmark.plan import FOLDER
from pipeline.benchmark.report import DOCUMENTS_FILE, REPORT_FILE
from pipeline.benchmark.tables import NOTHING, interval_text
from pipeline.config import Config
from pipeline.console import say, show_table

CellName = tuple[str, str, int]
"""Benchmark, method, concurrency."""


@dataclass(frozen=True)
class SideDocument:
    """A conversation's sums, and its share of the cell's wall time."""

    sums: DocumentSums
    shared_seconds: float


@dataclass(frozen=True)
class Side:
    """One evaluation: a report, and the drafter in it that is meant."""

    written: str
    report: dict[str, Any]
    label: str
    documents: dict[CellName, list[SideDocument]]


def open_side(written: str, config: Config | None) -> Side:
    """`DIR`, `DIR:LABEL`, or with a configuration a registry version or alias.

    Raises:
        UserError: no report there, or it is not clear which drafter is meant.
    """
    directory, label = _find_report(written)
    if directory is not None:
        report = _read_report(directory)
        return _side(written, directory, report, label or _only_label(written, report))
    if config is None:
        raise UserError(
            f"{written}: no report there ({REPORT_FILE} is missing); run `draftsmith evaluate --benchmark`, or give --config "
            "for registry versions"
        )
    from pipeline.benchmark.places import open_registry, version_number

    directory = config.output / FOLDER / "report"
    if not (directory / REPORT_FILE).is_file():
        raise UserError(
            f"{directory / REPORT_FILE}: no such file; run `draftsmith evaluate` on both versions"
        )
    registry = open_registry(config)
    number = version_number(registry, written)
    digest = registry.get(number).tags.get("drafter_digest")
    report = _read_report(directory)
    for name, drafter in report["drafters"].items():
        if drafter["digest"] == digest:
            return _side(written, directory, report, name)
    raise UserError(
        f"{written}: version {number} of {registry.model_name} is not in {directory}; evaluate both versions together: "
        "draftsmith evaluate CONFIG --drafter A --drafter B --benchmark …"
    )


def compare_evaluations(a: Side, b: Side) -> dict[str, Any]:
    """Differences B - A by method, benchmark and concurrency, in JSON types.

    Raises:
        UserError: other prompts or settings, or no method in common.
    """
    _require_comparable(a, b)
    names = [name for name in a.documents if name in b.documents]
    if not names:
        raise UserError(
            f"{a.written} and {b.written}: no method, benchmark and concurrency in common ({_listed(a)}; {_listed(b)})"
        )
    how = Resampling(a.report["bootstrap"]["samples"], a.report["confidence"], a.report["bootstrap"]["seed"])
    same_machine = a.report["machine"] == b.report["machine"]
    return {
        "a": {"written": a.written, "drafter": a.label, **a.report["drafters"].get(a.label, {})},
        "b": {"written": b.written, "drafter": b.label, **b.report["drafters"].get(b.label, {})},
        "confidence": a.report["confidence"],
        "same_machine": same_machine,
        "cells": [_compare_cell(name, a, b, how, same_machine) for name in names],
    }


FEWEST = 10
"""Conversations below which resampling them says nothing: of one, every resample is the same."""


def verdict(difference: dict[str, float] | None, conversations: int) -> str:
    """What an interval over so many conversations says."""
    if difference is None:
        return "nothing to compare"
    if conversations < FEWEST:
        return "too few to say"
    if difference["low"] > 0:
        return "B is better"
    if difference["high"] < 0:
        return "A is better"
    return "no difference shown"


def show(found: dict[str, Any]) -> None:
    """Print a comparison."""
    rows = []
    for cell in found["cells"]:
        groups = [("all", cell), *((f"domain {name}", group) for name, group in cell["by_domain"].items())]
        for name, group in groups:
            rows.append(
                [
                    f"{cell['benchmark']}, {cell['method']}, concurrency {cell['concurrency']}",
                    name,
                    str(group["conversations"]),
                    interval_text(group["acceptance_length_difference"], "{:+.3f}"),
                    interval_text(cell["speed_ratio"], "{:.3f}") if name == "all" else NOTHING,
                    group["verdict"],
                ]
            )
    columns = ["cell", "conversations of", "n", "τ, B - A", "speed, B ÷ A", "by τ"]
    show_table(f"B {found['b']['drafter']} against A {found['a']['drafter']}", columns, rows)
    if not found["same_machine"]:
        say("speeds are not compared: the two were measured on different machines")
    for cell in found["cells"]:
        say(f"{cell['benchmark']}, {cell['method']}, concurrency {cell['concurrency']}: {cell['summary']}")


def _compare_cell(name: CellName, a: Side, b: Side, how: Resampling, same_machine: bool) -> dict[str, Any]:
    ours, theirs = a.documents[name], b.documents[name]
    pairs = paired([d.sums for d in ours], [d.sums for d in theirs])
    difference = tau_difference(pairs, how)
    speed = None
    if same_machine:
        speed = speed_quotient(_speeds(ours), _speeds(theirs), how)
    by_domain = {}
    for domain in sorted({d.domain for d, _ in pairs}):
        chosen = [pair for pair in pairs if pair[0].domain == domain]
        found = tau_difference(chosen, how)
        by_domain[domain] = {
            "conversations": len(chosen),
            "acceptance_length_difference": found,
            "verdict": verdict(found, len(chosen)),
        }
    worse = [domain for domain, group in by_domain.items() if group["verdict"] == "A is better"]
    overall = verdict(difference, len(pairs))
    summary = f"{overall} (τ {interval_text(difference, '{:+.3f}')})"
    if worse and overall != "A is better":
        summary += f", but A is better on {', '.join(worse)}"
    return {
        "benchmark": name[0],
        "method": name[1],
        "concurrency": name[2],
        "conversations": len(pairs),
        "acceptance_length_difference": difference,
        "verdict": overall,
        "speed_ratio": speed,
        "by_domain": by_domain,
        "summary": summary,
    }


def _speeds(documents: Sequence[SideDocument]) -> dict[str, tuple[float, float]]:
    return {d.sums.document_id: (d.sums.tokens, d.shared_seconds) for d in documents}


def _require_comparable(a: Side, b: Side) -> None:
    ours, theirs = a.report["settings"], b.report["settings"]
    differing = [
        f"{name} ({ours.get(name)} and {theirs.get(name)})"
        for name in [*ours, *(n for n in theirs if n not in ours)]
        if ours.get(name) != theirs.get(name)
    ]
    if differing:
        raise UserError(f"{a.written} and {b.written} were measured with different {', '.join(differing)}")
    for name, entry in a.report["benchmarks"].items():
        other = b.report["benchmarks"].get(name)
        if other is not None and other["prompts"] != entry["prompts"]:
            raise UserError(
                f"{a.written} and {b.written} asked different prompts of {name} ({entry['conversations']} and "
                f"{other['conversations']} conversations); evaluate both on the same"
            )


def _find_report(written: str) -> tuple[Path | None, str | None]:
    head, _, tail = written.rpartition(":")
    for place, label in ((written, None), (head, tail)):
        if place:
            path = Path(place)
            for directory in (
                path.parent if path.name == REPORT_FILE else path,
                path / "report",
                path / FOLDER / "report",
            ):
                if (directory / REPORT_FILE).is_file():
                    return directory, label
    return None, None


def _read_report(directory: Path) -> dict[str, Any]:
    path = directory / REPORT_FILE
    try:
        report = json.loads(path.read_text())
        if report["format"] != 1:
            raise UserError(f"{path}: written by a newer version (format {report['format']})")
        return dict(report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a report ({error})") from None


def _only_label(written: str, report: dict[str, Any]) -> str:
    labels = list(dict.fromkeys(cell["drafter"] for cell in report["cells"] if cell["drafter"]))
    if len(labels) != 1:
        known = ", ".join(labels) or "none"
        raise UserError(f"{written}: holds several drafters ({known}); write {written}:LABEL")
    return labels[0]


def _side(written: str, directory: Path, report: dict[str, Any], label: str) -> Side:
    documents: dict[CellName, list[SideDocument]] = {}
    path = directory / DOCUMENTS_FILE
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["drafter"] != label:
                    continue
                name = (row["benchmark"], row["method"], int(row["concurrency"]))
                sums = DocumentSums(
                    row["document_id"],
                    row["domain"],
                    row["language"],
                    committed=int(row["committed"]),
                    rounds=int(row["rounds"]),
                    tokens=int(row["tokens"]),
                    seconds=float(row["seconds"]),
                )
                documents.setdefault(name, []).append(SideDocument(sums, float(row["shared_seconds"])))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}: damaged ({error}); evaluate again") from None
    if not documents:
        labels = ", ".join(dict.fromkeys(cell["drafter"] for cell in report["cells"] if cell["drafter"]))
        raise UserError(f"{written}: has no drafter {label!r}, but {labels}")
    return Side(written, report, label, documents)


def _listed(side: Side) -> str:
    cells = ", ".join(f"{method} on {benchmark} at {c}" for benchmark, method, c in side.documents)
    return f"{side.label} has {cells}"

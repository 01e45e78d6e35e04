"""The files of a report: JSON, CSV, Markdown, LaTeX, PNG, and one HTML page that needs nothing else."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.benchmark.cells import Cell
from pipeline.benchmark.documents import document_sums
from pipeline.benchmark.figures import shared_seconds
from pipeline.benchmark.plots import Plot, all_plots
from pipeline.benchmark.tables import TABLES, Table, csv_text
from pipeline.page import STYLE, html_table, inline_image
from pipeline.result import write_json

REPORT_FILE = "report.json"
DOCUMENTS_FILE = "documents.csv"
DOCUMENT_COLUMNS = (
    "benchmark", "drafter", "method", "concurrency", "document_id", "domain", "language",
    "committed", "rounds", "tokens", "seconds", "shared_seconds",
)  # fmt: skip
_TOKEN_STYLE = (
    "code.tokens{display:block;white-space:pre-wrap;line-height:1.9;background:none}"
    "code.tokens span{padding:.15rem 0;border-right:1px solid #fff}"
)


def write_report(directory: Path, report: dict[str, Any], cells: Sequence[Cell]) -> Path:
    """Write all files of a report into a directory, which is replaced as a whole.

    Args:
        directory: place of the report.
        report: figures, settings and divergences, in JSON types.
        cells: what the figures were made of, in the same order as `report["cells"]`.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".report.", dir=directory.parent))
    try:
        _write_files(staging, report, cells)
        staging.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(staging, directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return directory


def _write_files(staging: Path, report: dict[str, Any], cells: Sequence[Cell]) -> None:
    tables = {name: make(report) for name, make in TABLES.items()}
    plots = all_plots(report, cells)
    write_json(staging / REPORT_FILE, report)
    (staging / DOCUMENTS_FILE).write_text(documents_csv(cells))
    (staging / "positions.csv").write_text(_positions_csv(report))
    for name, table in tables.items():
        (staging / f"{name}.csv").write_text(table.csv())
    (staging / "tables.md").write_text("\n".join(table.markdown() for table in tables.values()))
    (staging / "tables.tex").write_text("\n".join(table.latex() for table in tables.values()))
    for name, _, png in plots:
        (staging / f"{name}.png").write_bytes(png)
    (staging / "report.html").write_text(_page(report, tables, plots), encoding="utf-8")


def documents_csv(cells: Sequence[Cell]) -> str:
    """Sums of every conversation of every cell: what intervals and comparisons are made from."""
    rows: list[list[Any]] = []
    for cell in cells:
        documents = document_sums(cell.answers)
        key = cell.key
        for d, shared in zip(documents, shared_seconds(cell, documents), strict=True):
            rows.append(
                [
                    *(key.benchmark, key.drafter, key.method, key.concurrency),
                    *(d.document_id, d.domain, d.language),
                    *(d.committed, d.rounds, d.tokens, repr(d.seconds), repr(shared)),
                ]
            )
    return csv_text(DOCUMENT_COLUMNS, rows)


def _positions_csv(report: dict[str, Any]) -> str:
    rows = [
        [cell["benchmark"], cell["drafter"], cell["method"], cell["concurrency"], slot + 1]
        + [cell["positions"][name][slot] for name in ("reached", "accepted", "conditional", "overall")]
        for cell in report["cells"]
        if cell["positions"]
        for slot in range(len(cell["positions"]["reached"]))
    ]
    columns = ["benchmark", "drafter", "method", "concurrency", "slot"]
    return csv_text([*columns, "reached", "accepted", "conditional", "overall"], rows)


def _page(report: dict[str, Any], tables: dict[str, Table], plots: Sequence[Plot]) -> str:
    settings = [[name.replace("_", " "), _text(value)] for name, value in report["settings"].items()]
    machine = [[name, _text(value)] for name, value in report["machine"].items()]
    drafters = [[label, *(_text(v) for v in facts.values())] for label, facts in report["drafters"].items()]
    benchmarks = [
        [entry["title"], entry["source"], str(entry["conversations"]), str(entry["skipped"])]
        for entry in report["benchmarks"].values()
    ]
    heads = ["label", *next(iter(report["drafters"].values()), {})]
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(report['name'])}</title>",
        f"<style>{STYLE}{_TOKEN_STYLE}</style><h1>{html.escape(report['name'])}: benchmarks</h1>",
        f"<p>Finished {html.escape(report['ended_at'])}, commit <code>{html.escape(str(report['git_commit']))}</code></p>",
        *(_table(table) for table in tables.values()),
        *(inline_image(title, png) for _, title, png in plots),
        *(_tokens(divergence) for divergence in report["divergence"]),
        "<h2>Settings</h2>",
        html_table([], settings),
        "<h2>Benchmarks</h2>",
        html_table(["name", "source", "conversations", "too long"], benchmarks),
        "<h2>Drafters</h2>" + html_table(heads, drafters) if drafters else "",
        "<h2>Machine</h2>",
        html_table([], machine),
        "".join(f"<p>{html.escape(note)}</p>" for note in report["notes"]),
        "</html>",
    ]
    return "\n".join(parts)


def _table(table: Table) -> str:
    return f"<h2>{html.escape(table.caption)}</h2>" + html_table(table.flat_columns(), table.rows)


def _tokens(divergence: dict[str, Any]) -> str:
    """AdaFlash's Fig. 3 with its words: each token shaded by its divergence."""
    shown = divergence["heat_map"]
    highest = max((t["divergence"] for t in shown["tokens"] if t["divergence"] is not None), default=0.0)
    spans = []
    for token in shown["tokens"]:
        value = token["divergence"]
        share = 0.0 if value is None or highest <= 0 else value / highest
        title = "not drafted" if value is None else f"slot {token['slot']}: {value:.3f}"
        spans.append(
            f"<span style='background:rgba(214,39,40,{share:.3f})' title='{title}'>{html.escape(token['text'])}</span>"
        )
    label = html.escape(divergence["drafter"])
    return f"<h2>Divergence token by token, drafter {label}</h2><code class='tokens'>{''.join(spans)}</code>"


def _text(value: Any) -> str:
    return "" if value is None else str(value)

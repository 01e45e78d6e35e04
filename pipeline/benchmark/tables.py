"""Tables of a report in the shape of the papers': as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

Row = dict[str, Any]
"""A cell of the report."""

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Texts in rows under columns. `bold` holds (row, column) of the best; `spans` are lines of headings over
    neighbouring columns, as (heading, columns), the outermost line first; `lead` is the number of columns that name a row."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    lead: int = 1
    spans: list[list[tuple[str, int]]] = field(default_factory=list)
    bold: set[tuple[int, int]] = field(default_factory=set)

    def markdown(self) -> str:
        """With the heading of a span before the name of each of its columns."""
        names = self.flat_columns()
        lines = [f"**{self.caption}**", "", _bar(names)]
        lines.append(_bar(["---" if i < self.lead else "---:" for i in range(len(names))]))
        for r, row in enumerate(self.rows):
            lines.append(_bar([f"**{t}**" if (r, c) in self.bold else t for c, t in enumerate(row)]))
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """For booktabs."""
        layout = "l" * self.lead + "r" * (len(self.columns) - self.lead)
        lines = [
            r"\begin{table}",
            rf"\caption{{{_tex(self.caption)}}}",
            rf"\begin{{tabular}}{{{layout}}}",
            r"\toprule",
        ]
        for line in self.spans:
            heads = [""] * self.lead + [rf"\multicolumn{{{n}}}{{c}}{{{_tex(text)}}}" for text, n in line]
            lines.append(" & ".join(heads) + r" \\")
        lines.append(" & ".join(_tex(name) for name in self.columns) + r" \\")
        lines.append(r"\midrule")
        for r, row in enumerate(self.rows):
            texts = [rf"\textbf{{{_tex(t)}}}" if (r, c) in self.bold else _tex(t) for c, t in enumerate(row)]
            lines.append(" & ".join(texts) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"

    def csv(self) -> str:
        """As shown, without the best marked."""
        return csv_text(self.flat_columns(), self.rows)

    def flat_columns(self) -> list[str]:
        """Names of the columns, each with the heading over it."""
        headings = [""] * self.lead
        headings += [text for text, n in self.spans[-1] for _ in range(n)] if self.spans else []
        headings += [""] * (len(self.columns) - len(headings))
        return [f"{h} {name}".strip() for h, name in zip(headings, self.columns, strict=True)]


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Comma-separated, with a header."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return buffer.getvalue()


def name_of(report: Row, cell: Row) -> str:
    """Method of a cell, and its drafter if the report has several."""
    if not cell["drafter"]:
        return "AR"
    several = len({c["drafter"] for c in report["cells"] if c["drafter"]}) > 1
    return f"{cell['method']} ({cell['drafter']})" if several else str(cell["method"])


def speedup_table(report: Row) -> Table:
    """Speedup and τ by benchmark, method and concurrency: AdaFlash's Table 1, and D3D's, which gives the block size."""
    benchmarks = report["benchmarks"]
    shown = [cell for cell in report["cells"] if cell["method"] != "ar"] or report["cells"]
    several = len(benchmarks) > 1
    rows: list[list[str]] = []
    values: list[list[float | None]] = []
    keys = list(dict.fromkeys((name_of(report, c), c["block_size"], c["concurrency"]) for c in shown))
    for name, block_size, concurrency in keys:
        of_row = {
            c["benchmark"]: c for c in shown if (name_of(report, c), c["concurrency"]) == (name, concurrency)
        }
        numbers: list[float | None] = []
        for benchmark in benchmarks:
            cell = of_row.get(benchmark)
            numbers += [_point(cell, "speedup"), _point(cell, "acceptance_length")]
        if several:
            numbers += [_mean(numbers[0::2]), _mean(numbers[1::2])]
        values.append(numbers)
        texts = [_number(v, "{:.2f}×" if i % 2 == 0 else "{:.2f}") for i, v in enumerate(numbers)]
        rows.append([name if block_size == 1 else f"{name} [{block_size}]", str(concurrency), *texts])
    titles = [(entry["title"], 2) for entry in benchmarks.values()] + [("Avg.", 2)] * several
    groups = groupby([entry["group"] for entry in benchmarks.values()])
    over = [(group, 2 * len(list(members))) for group, members in groups] + [("", 2)] * several
    columns = ["Method [block size]", "Conc.", *["Speedup", "τ"] * len(titles)]
    bold = {
        (r, 2 + c)
        for c in range(2 * len(titles))
        for concurrency in {key[2] for key in keys}
        if (r := _best(values, c, [i for i, key in enumerate(keys) if key[2] == concurrency])) is not None
    }
    caption = f"Speedup over plain decoding and average acceptance length τ, target {report['settings']['target_id']}"
    spans = [over, titles] if any(group for group, _ in over) else [titles]
    return Table(caption, columns, rows, 2, spans, bold)


def throughput_table(report: Row) -> Table:
    """Tokens per second, and the speedup in parentheses, by requests under way: D3D's Table 2."""
    benchmarks = report["benchmarks"]
    keys = list(dict.fromkeys((name_of(report, c), c["concurrency"]) for c in report["cells"]))
    rows = []
    for name, concurrency in keys:
        of_row = {
            c["benchmark"]: c
            for c in report["cells"]
            if (name_of(report, c), c["concurrency"]) == (name, concurrency)
        }
        texts = [name, str(concurrency)]
        for benchmark in benchmarks:
            cell = of_row.get(benchmark)
            speedup = _point(cell, "speedup")
            text = _number(_point(cell, "tokens_per_s"), "{:.1f}")
            texts.append(text if speedup is None else f"{text} ({speedup:.2f}×)")
        rows.append(texts)
    titles = [entry["title"] for entry in benchmarks.values()]
    return Table("Throughput in tokens/s (speedup)", ["Method", "Requests", *titles], rows, 2)


def detail_table(report: Row) -> Table:
    """A line for each cell with intervals, as AdaFlash's Tables 2 and 3 have columns for."""
    columns = (
        ["Benchmark", "Method", "Conc.", "τ", "Acc. rate", "TPS", "Speedup", "Verify len", "p50 s", "p90 s", "p99 s"]
    )  # fmt: skip
    rows = [
        [
            report["benchmarks"][cell["benchmark"]]["title"],
            name_of(report, cell),
            str(cell["concurrency"]),
            interval_text(cell["acceptance_length"], "{:.3f}"),
            _number(cell["acceptance_rate"], "{:.3f}"),
            interval_text(cell["tokens_per_s"], "{:.1f}"),
            interval_text(cell["speedup"], "{:.3f}"),
            _number(cell["verify_len"], "{:.2f}"),
            *(_number(cell["latency_s"][f"p{p}"], "{:.3f}") for p in (50, 90, 99)),
        ]
        for cell in report["cells"]
    ]
    percent = f"{100 * report['confidence']:g} %"
    return Table(f"All figures, with {percent} bootstrap intervals over conversations", columns, rows, 2)


def short_table(report: Row) -> Table:
    """What fits a terminal: a line for each cell."""
    whole = detail_table(report)
    kept = ["Benchmark", "Method", "Conc.", "τ", "Speedup", "TPS"]
    places = [whole.columns.index(name) for name in kept]
    rows = [
        [row[place].partition(" [")[0] if place > 3 else row[place] for place in places] for row in whole.rows
    ]
    return Table(whole.caption, kept, rows, 2)


def group_table(report: Row) -> Table:
    """τ by domain, language and length of context."""
    rows = []
    for cell in report["cells"]:
        if cell["method"] == "ar":
            continue
        for kind, name, group in groups_of(cell):
            rows.append(
                [
                    report["benchmarks"][cell["benchmark"]]["title"],
                    name_of(report, cell),
                    str(cell["concurrency"]),
                    kind,
                    name,
                    str(group["conversations"]),
                    interval_text(group["acceptance_length"], "{:.3f}"),
                ]
            )
    columns = ["Benchmark", "Method", "Conc.", "By", "Group", "Conversations", "τ"]
    return Table("Acceptance length by domain, language and context length", columns, rows, 2)


def groups_of(cell: Row) -> list[tuple[str, str, Row]]:
    """(kind, name, figures) of every group of a cell."""
    found = [("domain", name, group) for name, group in cell["by_domain"].items()]
    found += [("language", name, group) for name, group in cell["by_language"].items()]
    for group in cell["by_context"]:
        end = "on" if group["below"] is None else f"to {group['below'] - 1}"
        found.append(("context", f"{group['from']} {end}", group))
    return found


def interval_text(interval: Row | None, form: str) -> str:
    """`1.60 [1.55, 1.66]`."""
    if interval is None:
        return NOTHING
    point, low, high = (form.format(interval[key]) for key in ("point", "low", "high"))
    return f"{point} [{low}, {high}]"


TABLES: dict[str, Callable[[Row], Table]] = {
    "speedup": speedup_table,
    "throughput": throughput_table,
    "details": detail_table,
    "groups": group_table,
}


def _point(cell: Row | None, key: str) -> float | None:
    return cell[key]["point"] if cell is not None and cell[key] is not None else None


def _mean(values: Sequence[float | None]) -> float | None:
    """Of all benchmarks or of none: a mean over other benchmarks would be compared with this one."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _best(values: list[list[float | None]], column: int, rows: list[int]) -> int | None:
    known = [(value, -r) for r in rows if (value := values[r][column]) is not None]
    return -max(known)[1] if len(known) > 1 else None


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _bar(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", r"\|") for text in texts) + " |"


def _tex(text: str) -> str:
    escaped = {c: f"\\{c}" for c in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    escaped |= {"\\": r"\textbackslash{}", "×": r"$\times$", "τ": r"$\tau$", "–": "--"}
    return "".join(escaped.get(character, character) for character in text)

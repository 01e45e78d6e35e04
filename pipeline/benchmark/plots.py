"""The papers' plots of a report, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.benchmark.cells import Cell
from pipeline.benchmark.documents import document_sums
from pipeline.benchmark.tables import name_of
from pipeline.page import new_figure, new_panels, png_bytes

Report = dict[str, Any]
HEAT_COLUMNS = 32
Plot = tuple[str, str, bytes]
"""File name without ending, title, PNG."""


def all_plots(report: Report, cells: Sequence[Cell]) -> list[Plot]:
    """Every plot for which there is something to show."""
    lowest = min(cell.key.concurrency for cell in cells)
    drafted = [
        (figures, cell)
        for figures, cell in zip(report["cells"], cells, strict=True)
        if cell.block_size > 1 and cell.key.concurrency == lowest
    ]
    plots = []
    if drafted:
        plots.append(_domains(report, drafted))
        plots.append(_benchmarks(report, drafted))
        if any(figures["positions"] for figures, _ in drafted):
            plots.append(_positions(report, [figures for figures, _ in drafted]))
    plots.append(_speed(report))
    for divergence in report["divergence"]:
        plots.append(_by_slot(divergence))
        plots.append(_heat_map(divergence))
    return plots


def _rates(cell: Cell) -> list[tuple[str, float]]:
    drafts = cell.block_size - 1
    return [(d.domain, (d.acceptance_length - 1) / drafts) for d in document_sums(cell.answers) if d.rounds]


def _domains(report: Report, drafted: Sequence[tuple[Report, Cell]]) -> Plot:
    by_name: dict[str, dict[str, list[float]]] = {}
    for figures, cell in drafted:
        for domain, rate in _rates(cell):
            by_name.setdefault(name_of(report, figures), {}).setdefault(domain, []).append(rate)
    # one empty panel where no conversation had a round
    figure, panels = new_panels(max(1, len(by_name)))
    top = max((max(r) for rates in by_name.values() for r in rates.values()), default=0.0)
    bins = np.linspace(0, max(top, 0.05), 21).tolist()
    for axes, (name, rates) in zip(panels, by_name.items(), strict=bool(by_name)):
        for domain, values in sorted(rates.items()):
            axes.hist(values, bins=bins, density=True, histtype="step", linewidth=1.5, label=domain)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("acceptance rate of a conversation")
        axes.legend(fontsize=8)
    panels[0].set_ylabel("density")
    return "domains", "Domain-level variance: acceptance rate by domain", png_bytes(figure)


def _benchmarks(report: Report, drafted: Sequence[tuple[Report, Cell]]) -> Plot:
    names = list(dict.fromkeys(name_of(report, figures) for figures, _ in drafted))
    figure, axes = new_figure(width=max(7, 1.2 * len(drafted)))
    labels, positions, colours = [], [], {}
    for place, benchmark in enumerate(report["benchmarks"]):
        labels.append(report["benchmarks"][benchmark]["title"])
        positions.append(place * (len(names) + 1) + (len(names) - 1) / 2)
        for figures, cell in drafted:
            if cell.key.benchmark != benchmark:
                continue
            index = names.index(name_of(report, figures))
            values = [d.acceptance_length for d in document_sums(cell.answers) if d.rounds]
            drawn = axes.boxplot(
                [values], positions=[place * (len(names) + 1) + index], widths=0.8, patch_artist=True
            )
            drawn["boxes"][0].set_facecolor(f"C{index}")
            colours[names[index]] = drawn["boxes"][0]
    axes.set_xticks(positions, labels)
    axes.set_ylabel("acceptance length of a conversation")
    axes.legend(list(colours.values()), list(colours), fontsize=8)
    return "benchmarks", "Acceptance length over benchmarks", png_bytes(figure)


def _positions(report: Report, drafted: Sequence[Report]) -> Plot:
    benchmarks = [
        b for b in report["benchmarks"] if any(f["benchmark"] == b and f["positions"] for f in drafted)
    ]
    figure, panels = new_panels(len(benchmarks))
    for axes, benchmark in zip(panels, benchmarks, strict=True):
        for figures in drafted:
            if figures["benchmark"] == benchmark and figures["positions"]:
                values = [np.nan if v is None else v for v in figures["positions"]["overall"]]
                axes.plot(
                    range(1, len(values) + 1),
                    values,
                    marker="o",
                    markersize=3,
                    label=name_of(report, figures),
                )
        axes.set_title(report["benchmarks"][benchmark]["title"], fontsize=10)
        axes.set_xlabel("slot")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(0, 1)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("accepted, of all rounds")
    return "positions", "Token-level variance: acceptance by slot", png_bytes(figure)


def _speed(report: Report) -> Plot:
    benchmarks = list(report["benchmarks"])
    figure, panels = new_panels(len(benchmarks))
    for axes, benchmark in zip(panels, benchmarks, strict=True):
        by_name: dict[str, list[Report]] = {}
        for figures in report["cells"]:
            if figures["benchmark"] == benchmark:
                by_name.setdefault(name_of(report, figures), []).append(figures)
        for name, found in by_name.items():
            speeds = [figures["tokens_per_s"] for figures in found]
            points = [speed["point"] for speed in speeds]
            # the interval need not hold the point, if one conversation is most of the time
            errors = [
                [max(0.0, speed["point"] - speed["low"]) for speed in speeds],
                [max(0.0, speed["high"] - speed["point"]) for speed in speeds],
            ]
            axes.errorbar(
                [f["concurrency"] for f in found], points, yerr=errors, marker="o", capsize=3, label=name
            )
        axes.set_title(report["benchmarks"][benchmark]["title"], fontsize=10)
        axes.set_xlabel("conversations under way")
        axes.set_xticks(sorted({figures["concurrency"] for figures in report["cells"]}))
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    panels[0].set_ylabel("tokens/s")
    return "speed", "Throughput", png_bytes(figure)


def _by_slot(divergence: Report) -> Plot:
    rows = divergence["by_slot"]
    figure, axes = new_figure()
    slots = [row["slot"] for row in rows]
    axes.fill_between(slots, [row["p25"] for row in rows], [row["p75"] for row in rows], alpha=0.3)
    axes.plot(slots, [row["p50"] for row in rows], marker="o", label="median and quartiles")
    axes.plot(slots, [row["mean"] for row in rows], linestyle="--", label="mean")
    axes.set_xlabel("slot")
    axes.set_xticks(slots)
    axes.set_ylabel("KL(draft ‖ target), nats")
    axes.legend()
    label = divergence["drafter"]
    return (
        f"divergence-by-slot-{file_label(label)}",
        f"Divergence by slot, drafter {label}",
        png_bytes(figure),
    )


def _heat_map(divergence: Report) -> Plot:
    values = [token["divergence"] for token in divergence["heat_map"]["tokens"]]
    rows = -(-len(values) // HEAT_COLUMNS)
    grid = np.full(rows * HEAT_COLUMNS, np.nan)
    grid[: len(values)] = [np.nan if value is None else value for value in values]
    figure, axes = new_figure(height=max(2.4, 1.2 + 0.22 * rows))
    image = axes.imshow(grid.reshape(rows, HEAT_COLUMNS), cmap="Reds", vmin=0, aspect="auto")
    axes.set_xlabel("token, left to right and down; blank: not drafted")
    axes.set_yticks(range(rows), [str(row * HEAT_COLUMNS) for row in range(rows)], fontsize=7)
    figure.colorbar(image, ax=axes, label="KL(draft ‖ target), nats")
    label = divergence["drafter"]
    return (
        f"divergence-{file_label(label)}",
        f"Divergence over one answer ({divergence['heat_map']['document_id']}), drafter {label}",
        png_bytes(figure),
    )


def file_label(label: str) -> str:
    """A label as part of a file name."""
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in label)

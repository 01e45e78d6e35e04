"""From measured cases to `result.json`, a table and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TARGETS = {"cpu": 0.6, "memory": 0.5}


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of ours ÷ theirs, round by round."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "median": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "runs": len(ratios),
    }


DEFAULTS = {"specforge": "specforge-sdpa", "speculators": "speculators-sdpa"}
"""Each peer as its users run it, as far as a CPU can."""


def best_option(case: dict[str, Any], peer: str, measure: str) -> str:
    """The peer's option that does best in this case and measure."""
    options = [side for side in case[measure] if side.startswith(peer)]
    return min(options, key=lambda side: statistics.median(case[measure][side]))


def worst(ratios: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The least favourable case stands for all."""
    return max(ratios, key=lambda ratio: ratio["median"])


def summarise(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The keys of `train_step`.

    A ratio at the top is the least favourable one of the cases in which all sides keep freed memory, as our runs do; each case
    has its own beside it.
    """
    contests = [case for case in cases if case["kind"] == "peers"]
    variants = [case for case in cases if case["kind"] == "variants"]
    summary: dict[str, Any] = {}
    for measure in ("cpu", "wall", "memory"):
        for key, choose in (
            ("ratio", lambda _, peer, __: DEFAULTS[peer]),
            ("ratio_best_option", best_option),
        ):
            by_peer: dict[str, Any] = {}
            for peer in DEFAULTS:
                found = [_contest(case, choose(case, peer, measure), measure) for case in contests]
                for case, ratio in zip(contests, found, strict=True):
                    case.setdefault(key, {}).setdefault(measure, {})[peer] = ratio
                if found:
                    by_peer[peer] = worst([f for f in found if f["case"].endswith("kept")] or found)
            summary[f"{measure}_{key}"] = by_peer
    for side, key in (
        ("ours-opd", "opd_over_ce"),
        ("ours-osd", "osd_over_ce"),
        ("ours-opd+length", "opd_with_length_head_over_ce"),
        ("ours-length", "length_head_over_ce"),
        ("ours-d3d", "d3d_over_ce"),
    ):
        found = [
            {**paired_ratio(case["cpu"][side], case["cpu"]["ours-ce"]), "case": case["case"]}
            for case in variants
            if side in case["cpu"]
        ]
        if found:
            summary[key] = {**worst(found), "cases": found}
    summary["slots_times_vocabulary"] = [case for case in cases if case["kind"] == "series"]
    summary["cases"] = contests + variants
    return summary


def _contest(case: dict[str, Any], rival: str, measure: str) -> dict[str, Any]:
    ratio = paired_ratio(case[measure]["ours-ce"], case[measure][rival])
    return {**ratio, "case": case["case"], "rival": rival}


def table(summary: dict[str, Any]) -> str:
    """Markdown: each side's figures by case, then our variants, then memory against slots."""
    lines = [
        "| case | side | CPU-s/step | wall s | peak MiB | floor CPU-s | floor/CPU |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for case in summary["cases"]:
        for side in case["cpu"]:
            cpu = statistics.median(case["cpu"][side])
            floor = case.get("floor", {}).get("opd" if side == "ours-opd" else "ce")
            known = side in ("ours-ce", "ours-opd") or not side.startswith("ours")
            floors = f"{floor:.3f} | {floor / cpu:.2f}" if floor and known else "– | –"
            lines.append(
                f"| {case['case']} | {side} | {cpu:.3f} | {statistics.median(case['wall'][side]):.3f} | "
                f"{statistics.median(case['memory'][side]):.0f} | {floors} |"
            )
    lines += [
        "",
        "| ratio | least favourable case | median | low | high | runs |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for key, ratio in _headlines(summary):
        lines.append(
            f"| {key} | {ratio['case']} {ratio.get('rival', '')} | {ratio['median']:.3f} | {ratio['low']:.3f} | "
            f"{ratio['high']:.3f} | {ratio['runs']} |"
        )
    for series in summary["slots_times_vocabulary"]:
        lines += ["", f"| peak MiB, {series['case']} | slots ×1 | ×2 | ×4 |", "|---|--:|--:|--:|"]
        for side, peaks in series["series"].items():
            lines.append(f"| {side} | {' | '.join(f'{peak:.0f}' for peak in peaks)} |")
    return "\n".join(lines) + "\n"


def _headlines(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for key, value in summary.items():
        if "_ratio" in key:
            rows += [(f"{key}.{peer}", ratio) for peer, ratio in value.items()]
        elif key.endswith("_over_ce"):
            rows.append((key, value))
    return rows


def plot(summary: dict[str, Any], path: Path) -> None:
    """Ratios to both peers by case, with the targets as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    contests = [case for case in summary["cases"] if "ratio" in case]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    titles = {"cpu": "CPU-seconds", "memory": "peak memory"}
    for axis, (measure, title) in zip(axes, titles.items(), strict=True):
        for shift, peer in ((-0.2, "specforge"), (0.2, "speculators")):
            ratios = [case["ratio"][measure][peer] for case in contests]
            places = [i + shift for i in range(len(ratios))]
            medians = [ratio["median"] for ratio in ratios]
            spread = [
                [m - ratio["low"] for m, ratio in zip(medians, ratios, strict=True)],
                [ratio["high"] - m for m, ratio in zip(medians, ratios, strict=True)],
            ]
            axis.bar(places, medians, 0.38, yerr=spread, capsize=2, label=peer)
        axis.axhline(TARGETS[measure], color="black", linestyle="--", linewidth=1, label="target")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_xticks(
            range(len(contests)), [case["case"].replace("-", "\n") for case in contests], fontsize=7
        )
        axis.set_title(f"{title} of a step, ours ÷ theirs")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)


def write(summary: dict[str, Any], facts: dict[str, Any], out: Path) -> None:
    """`result.json`, `table.md`, `ratios.png` in `out`."""
    import os

    text = json.dumps({"train_step": summary, **facts}, indent=2)
    partial = out / "result.json.partial"
    partial.write_text(text + "\n")
    os.replace(partial, out / "result.json")
    (out / "table.md").write_text(table(summary))
    if any("ratio" in case for case in summary["cases"]):
        plot(summary, out / "ratios.png")

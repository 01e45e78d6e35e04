"""One self-contained HTML page about a whole run, with its plots inside."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.page import STYLE, html_table, inline_image, new_figure, png_bytes


def write_report(config: Config) -> Path:
    """Read the run's results and write `<output>/report.html`; prints the closing table."""
    result = _read(config.output / "result.json")
    online = _read(config.output / "online" / "state.json")
    metrics = result["metrics"]
    rows = closing_rows(metrics, online, config.budget_minutes, result["wall_seconds"])
    show_table(f"{config.name}: closing table", ["figure", "value"], rows)
    plots = [
        ("Acceptance length on held-out prompts, before and after going online", _domains(metrics)),
        ("Acceptance of each slot, given that it was reached", _positions(metrics)),
        ("Acceptance length over online rounds, on the gate's held-out traffic", _rounds(online)),
    ]
    path = config.output / "report.html"
    path.write_text(_page(config, result, rows, plots, online))
    say(f"report: {path}")
    return path


def closing_rows(
    metrics: dict[str, Any], online: dict[str, Any], budget: dict[str, float], concluding_seconds: float
) -> list[list[str]]:
    """The figures that the run is about."""
    before, after = (
        metrics["online"]["acceptance_length_before"],
        metrics["online"]["acceptance_length_after"],
    )
    speed = metrics.get("speed") or {}
    rows = [
        ["lossless (float32, every policy, under swaps)", str(metrics["lossless"])],
        [
            f"offline, held-out {' and '.join(metrics['offline']['domains'])}",
            f"{metrics['offline']['acceptance_length']:.3f}",
        ],
        [f"before going online, {metrics['online']['domain']}", f"{before:.3f}"],
        [f"after going online, {metrics['online']['domain']}", f"{after:.3f}"],
        [
            "ratio, and 95 % lower bound of the difference",
            f"{after / before:.3f}, {metrics['online']['difference_low']:+.3f}",
        ],
        ["champion version", str(metrics["registry"]["champion_version"])],
        ["challengers refused by the gate", str(len(metrics["gate"]["refused"]))],
        ["online rounds", ", ".join(o["outcome"] for o in online["outcomes"]) or "none"],
    ]
    rows += [[name.replace("_", " "), f"{value:.2f}"] for name, value in sorted(speed.items())]
    seconds = {**metrics["stage_seconds"], "conclusion": concluding_seconds}
    for stage, taken in seconds.items():
        planned = f" of {60 * budget[stage]:.0f}" if stage in budget else ""
        rows.append([f"time, {stage.replace('_', ' ')}", f"{taken:.0f}{planned} s"])
    rows.append(["time in all", f"{sum(seconds.values()) / 60:.1f} min"])
    return rows


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _domains(metrics: dict[str, Any]) -> bytes:
    figure, axes = new_figure()
    before, after = metrics["offline"]["by_domain"], metrics["online"]["by_domain"]
    places = range(len(before))
    axes.bar([p - 0.2 for p in places], list(before.values()), 0.4, label="offline drafter")
    axes.bar([p + 0.2 for p in places], [after[d] for d in before], 0.4, label="online drafter")
    axes.set_xticks(list(places), list(before))
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_ylabel("acceptance length")
    axes.legend()
    return png_bytes(figure)


def _positions(metrics: dict[str, Any]) -> bytes:
    figure, axes = new_figure()
    for label, key in (("offline drafter", "offline"), ("online drafter", "online")):
        values = metrics[key]["by_position"]
        axes.plot(range(1, len(values) + 1), values, marker="o", label=label)
    axes.set_xlabel("slot")
    axes.set_ylabel("P(accepted | reached)")
    axes.set_ylim(0, 1)
    axes.legend()
    return png_bytes(figure)


def _rounds(online: dict[str, Any]) -> bytes:
    figure, axes = new_figure()
    judged = [o for o in online["outcomes"] if o["gate"].get("champion") is not None]
    numbers = [o["round_index"] + 1 for o in judged]
    axes.plot(numbers, [o["gate"]["champion"] for o in judged], marker="s", label="champion at the time")
    axes.plot(numbers, [o["gate"]["challenger"] for o in judged], marker="o", label="challenger")
    axes.set_xticks(numbers)
    axes.set_xlabel("online round")
    axes.set_ylabel("acceptance length")
    axes.legend()
    return png_bytes(figure)


def _page(
    config: Config,
    result: dict[str, Any],
    rows: list[list[str]],
    plots: list[tuple[str, bytes]],
    online: dict[str, Any],
) -> str:
    images = "".join(inline_image(title, png) for title, png in plots)
    verdicts = "".join(
        f"<tr><td>round {o['round_index'] + 1}, version {o['version']}</td><td>{o['outcome']}</td>"
        f"<td>{html.escape(o['reason'])}</td></tr>"
        for o in online["outcomes"]
    )
    refused = "".join(
        f"<tr><td>version {r['version']} ({html.escape(str(r['drafter_version']))})</td><td>refused</td>"
        f"<td>{html.escape(str(r['reason']))}</td></tr>"
        for r in result["metrics"]["gate"]["refused"]
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(config.name)}</title>"
        f"<style>{STYLE}</style><h1>{html.escape(config.name)}</h1>"
        f"<p>{html.escape(result['metrics']['target']['target_id'])}, finished {result['ended_at']}, commit "
        f"<code>{result['git_commit']}</code></p>{html_table([], rows)}{images}"
        f"<h2>What the gate and the canary said</h2><table>{verdicts}{refused}</table></html>"
    )

"""The rows of a simulation as a page in the shape of AdaFlash's Table 1, and as a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.simulation.runs import Row

ALL = "all domains"
"""Name of the mix of all domains."""

Choice = Callable[[Sequence[Row]], Row | None]


def _best(rows: Sequence[Row]) -> Row | None:
    if any(row["speedup"] is None for row in rows):
        return rows[0] if len(rows) == 1 else None
    return max(rows, key=lambda row: row["speedup"], default=None)


def _whole(rows: Sequence[Row]) -> Row | None:
    return max(rows, key=lambda row: row["verify_len"], default=None)


def _with(setting: str) -> Choice:
    return lambda rows: next((row for row in rows if row["setting"] == setting), None)


SUMMARY: tuple[tuple[str, str, Choice], ...] = (
    ("plain", "plain decoding", _best),
    ("fixed", "fixed, longest", _whole),
    ("fixed", "fixed, best", _best),
    ("adaflash", "adaflash, γ = 1", _with("gamma 1")),
    ("adaflash", "adaflash, best γ", _best),
    ("survival", "survival, best threshold", _best),
    ("throughput", "throughput", _best),
)
"""Policy, wording, and which of its settings is shown at each concurrency."""


def summary(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Wording → one row for each concurrency, chosen on the mix of all domains; without what was not simulated.

    Without speedups nothing is best: only what has one setting, or a named one, is there.
    """
    loads = sorted({row["concurrency"] for row in rows})
    mixed = [row for row in rows if row["domain"] == ALL]
    found: dict[str, list[Row]] = {}
    for policy, wording, choose in SUMMARY:
        chosen = [
            choose([r for r in mixed if (r["policy"], r["concurrency"]) == (policy, load)]) for load in loads
        ]
        if all(chosen):
            found[wording] = [row for row in chosen if row is not None]
    return found


def tuned(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """The best setting of each concurrency, as `policy.gamma_by_load` and `policy.threshold_by_load` take it."""
    found: dict[str, dict[int, float]] = {}
    for policy, word in (("adaflash", "gamma"), ("survival", "threshold")):
        tried = [r for r in rows if r["policy"] == policy and r["setting"].startswith(f"{word} ")]
        best = {
            load: max((r for r in tried if r["concurrency"] == load), key=lambda r: r["tokens_per_s"])
            for load in sorted({r["concurrency"] for r in tried})
        }
        if best:
            found[f"{word}_by_load"] = {
                load: float(row["setting"].removeprefix(f"{word} ")) for load, row in best.items()
            }
    return found


def recommended(rows: Sequence[Row]) -> Iterator[str]:
    """What `tuned` found, in words, and where no setting of that policy is as good as plain decoding."""
    policies = {"gamma_by_load": "adaflash", "threshold_by_load": "survival"}
    losing = plain_wins(rows)
    for key, values in tuned(rows).items():
        loads = ", ".join(str(load) for load in losing[policies[key]])
        but = f"; but plain decoding is faster at {loads} requests" if loads else ""
        yield f"best by load: policy.{key}={values}{but}"


def plain_wins(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Policy → the concurrencies at which all its settings are slower than plain decoding."""
    plain = {r["concurrency"]: r["tokens_per_s"] for r in rows if r["policy"] == "plain"}
    best: dict[str, dict[int, float]] = {}
    for row in rows:
        own, load = best.setdefault(row["policy"], {}), row["concurrency"]
        own[load] = max(own.get(load, 0.0), row["tokens_per_s"])
    return {
        policy: [load for load, rate in sorted(own.items()) if load in plain and rate < plain[load]]
        for policy, own in best.items()
        if policy != "plain"
    }


def markdown(title: str, rows: Sequence[Row], remarks: Sequence[str]) -> str:
    """Remarks, the table by method and concurrency with a pair of columns for each domain, and all settings."""
    domains = sorted({row["domain"] for row in rows} - {ALL})
    columns = [*(domains if len(domains) > 1 else []), ALL]
    by_key = {(r["domain"], r["concurrency"], r["policy"], r["setting"]): r for r in rows}
    ranked = all(row["speedup"] is not None for row in rows)
    head = [f"{name}: {'speedup' if ranked else 'latency p50, s'} | τ" for name in columns]
    lines = [f"# {title}", "", *(f"- {remark}" for remark in remarks), ""]
    lines += [f"| method | C | setting | {' | '.join(head)} |", _rule(3, 2 * len(columns))]
    for wording, chosen in summary(rows).items():
        for row in chosen:
            cells = []
            for name in columns:
                own = by_key[name, row["concurrency"], row["policy"], row["setting"]]
                shown = _times(own, 2) if ranked else f"{own['latency_s']['p50']:.3g}"
                cells += [shown, f"{own['acceptance_length']:.2f}"]
            lines.append(
                f"| {wording} | {row['concurrency']} | {row['setting'] or '–'} | {' | '.join(cells)} |"
            )
    lines += ["", "## All settings", ""]
    names = ("C", "policy", "setting", "speedup", "tokens/s", "τ", "verify_len", "rows a round", "drafted")
    lines += [f"| {' | '.join(names)} | latency p50, s | p99, s | |", _rule(3, 9)]
    lines += [_setting_line(row) for row in rows if row["domain"] == ALL]
    return "\n".join(lines) + "\n"


def _rule(left: int, right: int) -> str:
    return "|" + "---|" * left + "--:|" * right


def _times(row: Row, digits: int) -> str:
    return "–" if row["speedup"] is None else f"{row['speedup']:.{digits}f}×"


def _setting_line(row: Row) -> str:
    figures = [
        _times(row, 3),
        f"{row['tokens_per_s']:.1f}",
        f"{row['acceptance_length']:.3f}",
        f"{row['verify_len']:.3f}",
        f"{row['rows_per_round']:.1f}",
        f"{row['drafted_share']:.0%}",
        f"{row['latency_s']['p50']:.3g}",
        f"{row['latency_s']['p99']:.3g}",
        "; ".join(row["notes"]),
    ]
    return f"| {row['concurrency']} | {row['policy']} | {row['setting'] or '–'} | {' | '.join(figures)} |"


def console_rows(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The summary for a terminal: method, concurrency, setting, speedup, tokens/s, τ, verify_len, latency."""
    for wording, chosen in summary(rows).items():
        for row in chosen:
            yield [
                wording,
                str(row["concurrency"]),
                row["setting"] or "-",
                _times(row, 2),
                f"{row['tokens_per_s']:.1f}",
                f"{row['acceptance_length']:.2f}",
                f"{row['verify_len']:.2f}",
                f"{row['latency_s']['p50']:.3g}",
            ]


def plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Speedup, or latency if there is none, over concurrency, a line for each row of the summary, as PNG."""
    # the object interface: no global figure state, no display needed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    ranked = all(row["speedup"] is not None for row in rows)
    for wording, chosen in summary(rows).items():
        loads = [row["concurrency"] for row in chosen]
        values = [row["speedup"] if ranked else row["latency_s"]["p50"] for row in chosen]
        axes.plot(loads, values, marker="o", label=wording)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.set_xlabel("requests running together")
    axes.set_ylabel("speedup over plain decoding" if ranked else "median latency, s")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, format="png", dpi=110)

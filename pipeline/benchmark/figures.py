"""What a cell comes to: figures with bootstrap intervals over conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pipeline.benchmark.cells import Cell
from pipeline.benchmark.documents import DocumentSums, Resampling, document_sums, paired
from pipeline.benchmark.rounds import by_context, mean_verify_len, positions, prepared_rate, variance
from pipeline.bootstrap import (
    Interval,
    bootstrap_ratio,
    paired_bootstrap_quotient,
    paired_bootstrap_ratio,
)
from pipeline.config import BenchmarkConfig

PERCENTILES = (50, 90, 99)


def acceptance_length(documents: Sequence[DocumentSums], how: Resampling) -> dict[str, float] | None:
    """τ with its interval; None without a round."""
    counted = [d for d in documents if d.rounds]
    if not counted:
        return None
    return _plain(
        bootstrap_ratio([d.committed for d in counted], [d.rounds for d in counted], **how.options())
    )


def shared_seconds(cell: Cell, documents: Sequence[DocumentSums]) -> list[float]:
    """The wall time divided among conversations in proportion to their latencies, so that it adds up to the whole."""
    total = sum(d.seconds for d in documents)
    return [d.seconds * cell.wall_seconds / total for d in documents]


def cell_figures(
    cell: Cell, plain: Cell | None, reference: Cell | None, config: BenchmarkConfig, how: Resampling
) -> dict[str, Any]:
    """All figures of a cell.

    Args:
        cell: what was measured.
        plain: plain decoding of the same conversations at the same concurrency, for the speedup.
        reference: the first speculative cell there, from which the paired difference in τ is taken.
        config: buckets.
        how: intervals.
    """
    documents = document_sums(cell.answers)
    tau = acceptance_length(documents, how)
    speed = bootstrap_ratio([d.tokens for d in documents], shared_seconds(cell, documents), **how.options())
    drafts = cell.block_size - 1
    latencies = [answer.seconds for answer in cell.answers]
    return {
        **asdict(cell.key),
        "block_size": cell.block_size,
        "conversations": len(documents),
        "turns": len(cell.answers),
        "skipped": cell.skipped,
        "short": cell.short,
        "output_tokens": sum(d.tokens for d in documents),
        "wall_seconds": cell.wall_seconds,
        "acceptance_length": tau,
        "acceptance_rate": (tau["point"] - 1) / drafts if tau and drafts else None,
        "acceptance_length_difference": _difference(reference, cell, how),
        "tokens_per_s": _plain(speed),
        "speedup": _speedup(plain, cell, how),
        "latency_s": {f"p{p}": float(np.percentile(latencies, p)) for p in PERCENTILES},
        "verify_len": mean_verify_len(cell),
        "prepared_rate": prepared_rate(cell),
        "positions": positions(cell.answers, drafts),
        "by_domain": _groups(documents, lambda d: d.domain, drafts, how),
        "by_language": _groups(documents, lambda d: d.language, drafts, how),
        "by_context": by_context(cell, config.context_buckets, how),
        "variance": variance(documents, drafts, cell.answers),
    }


def _groups(
    documents: Sequence[DocumentSums], key: Callable[[DocumentSums], str], drafts: int, how: Resampling
) -> dict[str, Any]:
    result = {}
    for name in sorted({key(d) for d in documents}):
        chosen = [d for d in documents if key(d) == name]
        tau = acceptance_length(chosen, how)
        result[name] = {
            "conversations": len(chosen),
            "acceptance_length": tau,
            "acceptance_rate": (tau["point"] - 1) / drafts if tau and drafts else None,
            # of one conversation alone, so that it does not depend on what else was running
            "tokens_per_s_each": sum(d.tokens for d in chosen) / sum(d.seconds for d in chosen),
        }
    return result


def _difference(reference: Cell | None, cell: Cell, how: Resampling) -> dict[str, float] | None:
    if reference is None or reference.key == cell.key:
        return None
    pairs = paired(document_sums(reference.answers), document_sums(cell.answers))
    return tau_difference(pairs, how)


def tau_difference(
    pairs: Sequence[tuple[DocumentSums, DocumentSums]], how: Resampling
) -> dict[str, float] | None:
    """τ_b - τ_a over paired conversations; None without rounds on both sides."""
    counted = [(a, b) for a, b in pairs if a.rounds and b.rounds]
    if not counted:
        return None
    return _plain(
        paired_bootstrap_ratio(
            [a.committed for a, _ in counted],
            [a.rounds for a, _ in counted],
            [b.committed for _, b in counted],
            [b.rounds for _, b in counted],
            **how.options(),
        )
    )


def _speedup(plain: Cell | None, cell: Cell, how: Resampling) -> dict[str, float] | None:
    if plain is None:
        return None
    sides = []
    for one in (plain, cell):
        documents = document_sums(one.answers)
        seconds = shared_seconds(one, documents)
        sides.append({d.document_id: (d.tokens, s) for d, s in zip(documents, seconds, strict=True)})
    return speed_quotient(sides[0], sides[1], how)


def speed_quotient(
    a: Mapping[str, tuple[float, float]], b: Mapping[str, tuple[float, float]], how: Resampling
) -> dict[str, float] | None:
    """Tokens per second of b over a's, from (tokens, share of the wall time) by conversation."""
    common = [(a[name], b[name]) for name in a if name in b]
    if not common:
        return None
    columns = ([x[0] for x, _ in common], [x[1] for x, _ in common])
    others = ([y[0] for _, y in common], [y[1] for _, y in common])
    return _plain(paired_bootstrap_quotient(*columns, *others, **how.options()))


def _plain(interval: Interval) -> dict[str, float]:
    return asdict(interval)

"""Bootstrap intervals for ratios of sums over documents (pure numpy).

Acceptance length is Σ committed ÷ Σ rounds, a ratio of sums, so documents are resampled whole:
rounds of one document are not independent. Comparing two drafters on the same documents, both sides
of a resample use the same documents; what makes some texts easier to draft then cancels out.

Shapes: D documents, S bootstrap samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_CHUNK_ELEMENTS = 4_000_000  # bounds the S×D matrix of resampling weights to about 32 MB


@dataclass(frozen=True)
class Interval:
    """Point estimate with one-sided bounds.

    `low` is the (1-confidence) quantile of the bootstrap distribution: the true value lies above it
    with probability `confidence`. `high` is the `confidence` quantile, the bound on the other side.
    Read together they hold the value with probability 2·confidence-1.
    """

    point: float
    low: float
    high: float


def bootstrap_ratio(
    committed: Sequence[float] | Floats,
    rounds: Sequence[float] | Floats,
    *,
    samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Σ committed ÷ Σ rounds with percentile-bootstrap bounds.

    `committed` and `rounds` hold one entry per document [D]; any positive cost may stand for
    rounds.

    Raises:
        ValueError: no documents, unequal lengths, values that are not finite, rounds ≤ 0, or
            confidence outside (0.5, 1).
    """
    data_2D = _as_rows(committed, rounds)
    ratios_S = np.concatenate([_ratio(sums) for sums in _resampled_sums(data_2D, samples, confidence, seed)])
    return _interval(float(data_2D[0].sum() / data_2D[1].sum()), ratios_S, confidence)


def paired_bootstrap_ratio(
    committed_a: Sequence[float] | Floats,
    rounds_a: Sequence[float] | Floats,
    committed_b: Sequence[float] | Floats,
    rounds_b: Sequence[float] | Floats,
    *,
    samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """τ_b - τ_a of ratios of sums, with percentile-bootstrap bounds over paired documents.

    Entry i of all four sequences [D] belongs to the same document; any positive cost may stand for
    rounds. `low` > 0 says, at one-sided `confidence`, that b is better than a.

    Raises:
        ValueError: as `bootstrap_ratio`.
    """
    data_4D = _as_rows(committed_a, rounds_a, committed_b, rounds_b)
    totals_4 = data_4D.sum(axis=1)
    point = totals_4[2] / totals_4[3] - totals_4[0] / totals_4[1]
    differences_S = np.concatenate(
        [
            _ratio(sums[:, 2:]) - _ratio(sums[:, :2])
            for sums in _resampled_sums(data_4D, samples, confidence, seed)
        ]
    )
    return _interval(float(point), differences_S, confidence)


def paired_bootstrap_quotient(
    committed_a: Sequence[float] | Floats,
    rounds_a: Sequence[float] | Floats,
    committed_b: Sequence[float] | Floats,
    rounds_b: Sequence[float] | Floats,
    *,
    samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """(Σ committed_b ÷ Σ rounds_b) ÷ (Σ committed_a ÷ Σ rounds_a) over paired documents: a speedup, with seconds for rounds.

    Arguments as `paired_bootstrap_ratio`; the sums of `committed_a` must not be zero.

    Raises:
        ValueError: as `bootstrap_ratio`, or a document without anything committed by a.
    """
    data_4D = _as_rows(committed_a, rounds_a, committed_b, rounds_b)
    if (data_4D[0] <= 0).any():
        raise ValueError("a quotient needs something committed in every document")
    totals = data_4D.sum(axis=1)[None]
    quotients_S = np.concatenate(
        [
            _ratio(sums[:, 2:]) / _ratio(sums[:, :2])
            for sums in _resampled_sums(data_4D, samples, confidence, seed)
        ]
    )
    return _interval(float(_ratio(totals[:, 2:])[0] / _ratio(totals[:, :2])[0]), quotients_S, confidence)


def _as_rows(*columns: Sequence[float] | Floats) -> Floats:
    """Validated float64 matrix: rows alternate numerator, denominator."""
    rows = [np.asarray(column, dtype=np.float64) for column in columns]
    if any(row.ndim != 1 or row.shape != rows[0].shape for row in rows) or rows[0].size == 0:
        raise ValueError("bootstrap needs one entry per document, the same documents throughout")
    data = np.stack(rows)
    if not np.isfinite(data).all():
        raise ValueError("bootstrap needs finite values")
    if (data[1::2] <= 0).any():
        raise ValueError("bootstrap needs at least one round in every document")
    return data


def _resampled_sums(data: Floats, samples: int, confidence: float, seed: int) -> Iterator[Floats]:
    """Sums of each row over resampled documents, as chunks [≤S, rows].

    Drawing D documents with replacement is a multinomial over documents, so a resample is a vector
    of counts and its sums are one matrix product.
    """
    if samples < 1 or not 0.5 < confidence < 1:
        raise ValueError(f"bootstrap needs samples ≥ 1 and 0.5 < confidence < 1, got {confidence}")
    generator = np.random.default_rng(seed)
    documents = data.shape[1]
    chunk = max(1, _CHUNK_ELEMENTS // documents)
    for start in range(0, samples, chunk):
        size = min(chunk, samples - start)
        counts = generator.multinomial(documents, np.full(documents, 1 / documents), size=size)
        yield counts.astype(np.float64) @ data.T


def _ratio(sums: Floats) -> Floats:
    return np.asarray(sums[:, 0] / sums[:, 1])


def _interval(point: float, values: Floats, confidence: float) -> Interval:
    low, high = np.quantile(values, [1 - confidence, confidence])
    return Interval(point=point, low=float(low), high=float(high))

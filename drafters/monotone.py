"""Monotone regression: the closest non-decreasing sequence, and curves through it.

Shapes: K knots.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def non_decreasing(values_K: Floats, weights_K: Floats) -> Floats:
    """The non-decreasing sequence closest to `values` in weighted squares (pool adjacent violators)."""
    means: list[float] = []
    weights: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values_K.tolist(), weights_K.tolist(), strict=True):
        means.append(value)
        weights.append(weight)
        counts.append(1)
        while len(means) > 1 and means[-2] >= means[-1]:
            mean, weight, count = means.pop(), weights.pop(), counts.pop()
            total = weights[-1] + weight
            means[-1] += (mean - means[-1]) * weight / total
            weights[-1] = total
            counts[-1] += count
    return np.repeat(np.asarray(means), counts)


def interpolate(x: Floats, knots_K: Floats, values_K: Floats) -> Floats:
    """Piecewise linear through non-decreasing `values` at increasing `knots`.

    Beyond the last knot it goes on with the mean slope of all knots, which a single noisy last segment would not give; before
    the first it is level. So it never falls.
    """
    inside = np.interp(x, knots_K, values_K)
    if len(knots_K) < 2:
        return inside
    slope = (values_K[-1] - values_K[0]) / (knots_K[-1] - knots_K[0])
    return np.asarray(inside + np.maximum(x - knots_K[-1], 0.0) * slope)

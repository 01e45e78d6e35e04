"""What a round costs in seconds, learnt from the rounds themselves.

Verification: cost(rows, requests) = f(rows) + g(requests), both non-decreasing and piecewise linear. `rows` are those that the
target reads, Σ verify_len, and `requests` how many caches it reads them against. The sum lets what was measured at one
number of requests speak for another. Drafting: a non-decreasing function of the requests that draft.

Every cell (requests, rows) keeps a running mean that forgets, so that a machine that becomes slower, or contexts that become
longer, are followed: by its own rounds, and by the rounds of all since it was last seen. The curves are fitted to these means by
monotone regression, two at once by backfitting.

Shapes: C cells, K knots, X points asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from drafters.monotone import Floats, interpolate, non_decreasing
from drafters.policies import RoundTiming

MEMORY = 32
"""Rounds over which a cell's mean forgets."""

HALF_LIFE = 2048
"""Rounds after which a cell that was not seen again counts half beside others."""

VERIFY_STALE, DRAFT_STALE = 512, 128
"""Rounds after which what a cell had seen counts half beside what it sees now. Drafting that does not pay is rarely seen, and
must not be held for dear because it once was."""

OUTLIER = 3.0
"""A round longer than so many means counts as so long: a machine's hiccup says nothing about rows."""

_TRUSTED_COUNT = 4
_LEAST_DECAY = 1e-6
"""Of a knot whose cells are all that old: no weight at all would leave it without a mean."""
_REFIT_ROUNDS = 16
_SWEEPS = 30

Key = tuple[int, int]
Curve = tuple[Floats, Floats]
"""Knots [K], increasing, and values [K], non-decreasing."""


@dataclass
class _Cell:
    """`count` observations, the mean of as many as `weight`, last `seen` at a round."""

    mean: float
    count: int
    weight: float
    seen: int


@dataclass
class RunningMeans:
    """Mean seconds of each cell (requests, rows); `stale` rounds after which what a cell had seen counts half."""

    stale: int
    cells: dict[Key, _Cell] = field(default_factory=dict)
    rounds: int = 0

    def add(self, key: Key, seconds: float, now: int) -> None:
        """Note one observation of round number `now`."""
        self.rounds = max(self.rounds, now)
        cell = self.cells.setdefault(key, _Cell(seconds, 0, 0.0, self.rounds))
        trusted = cell.count >= _TRUSTED_COUNT
        cell.weight *= 0.5 ** (max(self.rounds - cell.seen - 1, 0) / self.stale)
        if cell.weight < _TRUSTED_COUNT and OUTLIER * seconds < cell.mean:
            # the first ones were the hiccup, as when kernels are compiled; or it was dear long ago
            cell.mean, cell.count, cell.weight = seconds, 0, 0.0
        bounded = min(seconds, OUTLIER * cell.mean) if trusted else seconds
        cell.count += 1
        cell.weight = min(cell.weight + 1, MEMORY)
        cell.seen = self.rounds
        cell.mean += (bounded - cell.mean) / cell.weight

    def columns(self) -> tuple[Floats, Floats, Floats, Floats]:
        """(requests, rows, means, weights), each [C]."""
        keys = np.asarray(list(self.cells), dtype=np.float64)
        means_C = np.asarray([cell.mean for cell in self.cells.values()])
        weights_C = np.asarray(
            [
                cell.weight * max(0.5 ** ((self.rounds - cell.seen) / HALF_LIFE), _LEAST_DECAY)
                for cell in self.cells.values()
            ]
        )
        return keys[:, 0], keys[:, 1], means_C, weights_C


class StepCosts:
    """The cost table of one engine. Its serving thread alone writes to it."""

    def __init__(self) -> None:
        self._verify, self._draft = RunningMeans(VERIFY_STALE), RunningMeans(DRAFT_STALE)
        self._verify_fit: tuple[Curve, Curve] | None = None
        self._draft_fit: Curve | None = None
        self._draft_fitted = 0

    def for_another_drafter(self) -> StepCosts:
        """A table that goes on with what verification costs; of drafting it knows nothing."""
        other = StepCosts()
        other._verify = self._verify
        return other

    @property
    def known(self) -> bool:
        """Whether there is enough to tell more rows from fewer, and drafting from not."""
        return len({rows for _, rows in self._verify.cells}) >= 2 and bool(self._draft.cells)

    @property
    def observed(self) -> int:
        """Verifications observed."""
        return self._verify.rounds

    @property
    def most_rows(self) -> int:
        """About the most rows that a round has had; 0 before the first."""
        return max((rows for _, rows in self._verify.cells), default=0)

    @property
    def most_requests(self) -> int:
        """The most requests that a round has had; 0 before the first."""
        return max((requests for requests, _ in self._verify.cells), default=0)

    def copy(self) -> StepCosts:
        """A table that goes its own way from here, as if just observed."""
        return StepCosts.from_json(self.to_json())

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a finished round."""
        self.observe_verify(timing.rows, timing.requests, timing.verify_s)
        if timing.draft_s is not None:
            self.observe_draft(timing.requests, timing.draft_s)

    def observe_verify(self, rows: int, requests: int, seconds: float) -> None:
        """The target read `rows` rows of `requests` requests, and what to commit was settled."""
        self._verify.add((requests, row_bucket(rows)), seconds, self._verify.rounds + 1)
        if _early(self._verify.rounds) or self._verify.rounds % _REFIT_ROUNDS == 0:
            self._verify_fit = None

    def observe_draft(self, requests: int, seconds: float) -> None:
        """So many requests drafted a block each."""
        self._draft.add((requests, 0), seconds, self._verify.rounds)
        if _early(self._draft.rounds) or self._draft.rounds - self._draft_fitted >= _REFIT_ROUNDS:
            self._draft_fit = None

    def verify_s(self, rows: Iterable[int], requests: int) -> Floats:
        """Seconds of verification for each number of rows, [X]; non-decreasing in rows and in requests.

        Raises:
            ValueError: before the first observation.
        """
        if self._verify_fit is None:
            if not self._verify.cells:
                raise ValueError("no round was observed yet")
            requests_C, rows_C, means_C, weights_C = self._verify.columns()
            self._verify_fit = fit_additive(rows_C, requests_C, means_C, weights_C)
        by_rows, by_requests = self._verify_fit
        points_X = np.asarray(list(rows), dtype=np.float64)
        return interpolate(points_X, *by_rows) + interpolate(np.asarray([float(requests)]), *by_requests)

    def draft_s(self, requests: int) -> float:
        """Seconds of drafting for so many requests; 0 before the first observation."""
        if not self._draft.cells:
            return 0.0
        if self._draft_fit is None:
            self._draft_fit = fit_curve(*(self._draft.columns()[i] for i in (0, 2, 3)))
            self._draft_fitted = self._draft.rounds
        return float(interpolate(np.asarray([float(requests)]), *self._draft_fit)[0])

    def to_json(self) -> dict[str, list[list[float]]]:
        """[requests, rows, mean seconds, count] of every cell."""
        return {
            name: [[*key, cell.mean, cell.count] for key, cell in means.cells.items()]
            for name, means in (("verify", self._verify), ("draft", self._draft))
        }

    @classmethod
    def from_json(cls, content: dict[str, list[list[float]]]) -> StepCosts:
        """What `to_json` gave; counts as just observed."""
        costs = cls()
        for name, means in (("verify", costs._verify), ("draft", costs._draft)):
            for requests, rows, mean, count in content[name]:
                weight = float(min(count, MEMORY))
                means.cells[int(requests), int(rows)] = _Cell(float(mean), int(count), weight, 0)
        now = sum(cell.count for cell in costs._verify.cells.values())
        for means in (costs._verify, costs._draft):
            means.rounds = now
            for cell in means.cells.values():
                cell.seen = now
        return costs


def row_bucket(rows: int) -> int:
    """`rows` itself up to 32, beyond rounded to about 1/16: cells stay few however many rows a round has."""
    if rows <= 32:
        return rows
    step = 2 ** (int(math.log2(rows)) - 4)
    return step * round(rows / step)


def fit_curve(x_C: Floats, y_C: Floats, weights_C: Floats) -> Curve:
    """The non-decreasing curve closest to the cells in weighted squares; one knot for each distinct x."""
    knots_K, index_C = np.unique(x_C, return_inverse=True)
    weights_K: Floats = np.bincount(index_C, weights_C).astype(np.float64)
    means_K: Floats = np.bincount(index_C, weights_C * y_C) / weights_K
    return knots_K, non_decreasing(means_K, weights_K)


def fit_additive(
    rows_C: Floats, requests_C: Floats, seconds_C: Floats, weights_C: Floats
) -> tuple[Curve, Curve]:
    """(f, g) with f(rows) + g(requests) close to seconds, both non-decreasing, g 0 at the fewest requests.

    Backfitting: each curve in turn is fitted to what the other leaves, until nothing changes.
    """
    by_rows = fit_curve(rows_C, seconds_C, weights_C)
    rest_C = np.zeros_like(seconds_C)
    for _ in range(_SWEEPS):
        knots, values = fit_curve(requests_C, seconds_C - interpolate(rows_C, *by_rows), weights_C)
        by_requests = knots, values - values[0]
        before_C, rest_C = rest_C, interpolate(requests_C, *by_requests)
        by_rows = fit_curve(rows_C, seconds_C - rest_C, weights_C)
        if np.abs(rest_C - before_C).max() < 1e-4 * np.abs(seconds_C).max():
            break
    return by_rows, by_requests


def _early(rounds: int) -> bool:
    """Whether fits are made anew after each observation: early ones change much, later ones little."""
    return rounds < 2 * _REFIT_ROUNDS

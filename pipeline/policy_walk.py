"""Policies walked over traced texts at a number of requests running together: tokens per second by a cost table.

Shapes: N requests of a round, D drafts of a block (B-1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from drafters.monotone import Floats
from drafters.step_cost import StepCosts
from drafters.throughput_policy import best_lengths
from pipeline.block_traces import BlockTrace
from pipeline.bootstrap import Interval, bootstrap_ratio

GAMMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round of N requests: `draft_s`, and `verify_s` of N, N+1, .., N·B rows."""

    requests: int
    draft_s: float
    verify_s: Floats

    @classmethod
    def of(cls, costs: StepCosts, requests: int, block_size: int) -> RoundCosts:
        """At this many requests."""
        rows = range(requests, requests * block_size + 1)
        return cls(requests, costs.draft_s(requests), costs.verify_s(rows, requests))


Choose = Callable[[Floats | None, Floats | None, RoundCosts], Sequence[int]]
"""Lengths [N] from â [N] and S [N, D], as far as there are heads."""


@dataclass(frozen=True)
class Candidate:
    """A policy with its setting, as the configuration writes it; `drafts` False is plain decoding."""

    name: str
    setting: str
    choose: Choose
    drafts: bool = True


@dataclass(frozen=True)
class WalkResult:
    """`tokens_per_s` of the whole engine with its bootstrap bounds over documents, τ, and mean verify_len."""

    candidate: Candidate
    tokens_per_s: Interval
    acceptance_length: float
    verify_len: float


def candidates(block_size: int, *, length_head: bool, acceptance_head: bool) -> list[Candidate]:
    """Everything that the drafter's heads allow."""

    def fixed(length: int) -> Choose:
        return lambda ratio, survival, costs: [length] * costs.requests

    def scaled(gamma: float) -> Choose:
        def choose(ratio_N: Floats | None, survival_ND: Floats | None, costs: RoundCosts) -> list[int]:
            assert ratio_N is not None
            return np.clip(np.floor(ratio_N * gamma * block_size + 1e-6), 1, block_size).astype(int).tolist()

        return choose

    def above(threshold: float) -> Choose:
        def choose(ratio_N: Floats | None, survival_ND: Floats | None, costs: RoundCosts) -> list[int]:
            assert survival_ND is not None
            return (1 + (survival_ND >= threshold).sum(axis=1)).tolist()

        return choose

    def joint(ratio_N: Floats | None, survival_ND: Floats | None, costs: RoundCosts) -> list[int]:
        assert survival_ND is not None
        return best_lengths(survival_ND, costs.verify_s, costs.draft_s).lengths

    found = [Candidate("plain", "", fixed(1), drafts=False)]
    found += [Candidate("fixed", f"length {n}", fixed(n)) for n in range(2, block_size + 1)]
    if length_head:
        found += [Candidate("adaflash", f"gamma {g:g}", scaled(g)) for g in GAMMAS]
    if acceptance_head:
        found += [Candidate("survival", f"threshold {t:g}", above(t)) for t in THRESHOLDS]
        found.append(Candidate("throughput", "", joint))
    return found


def walk(candidate: Candidate, traces: Sequence[BlockTrace], costs: RoundCosts) -> WalkResult:
    """Serve the texts, `costs.requests` at a time, until each was served once.

    A text that ends makes place for the next, from the first again when all have begun, so that rounds stay full to the end.
    Prompts cost nothing here. A round's seconds are divided evenly between its requests. `throughput` drafts in every round; in
    service it also falls back to plain decoding, which is a candidate of its own.
    """
    served = [trace for trace in traces if trace.spans]
    if not served:
        raise ValueError("no text has a round")
    drafting_s = costs.draft_s if candidate.drafts else 0.0
    totals = np.zeros((len(served), 3))  # committed, seconds, rounds
    rows = 0
    places = [_Place(i % len(served), served[i % len(served)]) for i in range(costs.requests)]
    begun, finished = costs.requests, 0
    while finished < max(len(served), costs.requests):
        ratios = [p.trace.ratio_A[p.row] for p in places if p.trace.ratio_A is not None]
        survivals = [p.trace.survival_AD[p.row] for p in places if p.trace.survival_AD is not None]
        ratio_N = np.asarray(ratios) if ratios else None
        survival_ND = np.stack(survivals) if survivals else None
        lengths = candidate.choose(ratio_N, survival_ND, costs)
        total = sum(lengths)
        seconds = (drafting_s + float(costs.verify_s[total - costs.requests])) / costs.requests
        rows += total
        for number, length in enumerate(lengths):
            place = places[number]
            totals[place.index] += place.advance(length), seconds, 1
            if place.over:
                finished += 1
                index = begun % len(served)
                begun += 1
                places[number] = _Place(index, served[index])
    sums = totals.sum(axis=0)
    ratio = bootstrap_ratio(totals[:, 0], totals[:, 1])
    return WalkResult(candidate, ratio, float(sums[0] / sums[2]), float(rows / sums[2]))


class _Place:
    """A request under way: where its next round begins."""

    def __init__(self, index: int, trace: BlockTrace) -> None:
        self.index, self.trace = index, trace
        self.span = 0
        self.position = trace.spans[0][0]

    @property
    def row(self) -> int:
        return self.trace.row_of[self.position]

    @property
    def over(self) -> bool:
        return self.span == len(self.trace.spans)

    def advance(self, length: int) -> int:
        """Verify so many slots; returns the tokens committed."""
        last = self.trace.spans[self.span][1]
        accepted = min(int(self.trace.accepted_A[self.row]), length - 1)
        committed = min(accepted + 1, last - self.position)
        self.position += committed
        if self.position == last:
            self.span += 1
            if not self.over:
                self.position = self.trace.spans[self.span][0]
        return committed

"""Drafting ahead in a run: the worker as configured, its measurement, and the choice of a budget."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from drafters.branches import Budget, BudgetEstimate, RoundCost, estimate_budgets
from drafters.d3d import D3DDrafter
from drafters.decoding import DecodingSession, ServingDrafter
from drafters.errors import UserError
from drafters.fill import Drafter
from drafters.lookahead import Lookahead, LookaheadStats
from drafters.packing import Document
from drafters.target import Target, TargetOutput
from drafters.verify import SamplingParams
from pipeline.config import LookaheadConfig


def configured_budget(config: LookaheadConfig, block_size: int, vocab_size: int) -> Budget:
    """C and F of `mode: fixed`, or the widest that `auto` considers.

    Raises:
        UserError: when no drafter of this block size and vocabulary can use them.
    """
    default = block_size if config.mode == "auto" else -(-3 * block_size // 4)
    coverage = config.coverage or default
    # without a position to reject at, tokens for one make no difference
    budget = Budget(coverage, config.fan_out if coverage > 1 else 1)
    budget.check(block_size, vocab_size)
    return budget


def budget_for(config: LookaheadConfig, drafter: Drafter) -> Budget:
    """`configured_budget` of a drafter.

    Raises:
        UserError: also when it cannot draft ahead.
    """
    if not isinstance(drafter, D3DDrafter):
        raise UserError("lookahead.mode: this is no D3D drafter, and only those draft ahead")
    return configured_budget(config, drafter.block_size, drafter.config.vocab_size)


@contextlib.contextmanager
def lookahead_worker(
    config: LookaheadConfig, budget: Budget | None, *, note_outcomes: bool = False
) -> Iterator[Lookahead]:
    """A worker on its part of the CPU threads; the calling thread has the others meanwhile.

    Thread pools that together exceed the cores slow each other down by far more than their share. Where the models are on
    another device the threads hardly matter.
    """
    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(config.cores or ())
    if missing := set(config.cores or ()) - available:
        raise UserError(f"lookahead.cores: there is no core {min(missing)} here")
    total = torch.get_num_threads()
    threads = config.threads or max(1, total // 2)
    torch.set_num_threads(max(1, total - threads))
    try:
        with Lookahead(budget, threads=threads, cores=config.cores, note_outcomes=note_outcomes) as lookahead:
            yield lookahead
    finally:
        torch.set_num_threads(total)


class SlowedTarget(Target):
    """A target whose passes take at least `at_least_s`: what a large one on a device of its own looks like from here.

    It waits without using the CPU, so that the drafter has all threads as it would have its own device; only for the target's
    real pass, at the start of the wait, do the two share them.
    """

    def __init__(self, target: Target, at_least_s: float) -> None:
        # the same model, hooks included: not wrapped anew
        self.__dict__.update(target.__dict__)
        self.at_least_s = at_least_s

    def forward_cached(self, *args: Any) -> list[TargetOutput]:
        started = time.perf_counter()
        outputs = super().forward_cached(*args)
        time.sleep(max(0.0, self.at_least_s - (time.perf_counter() - started)))
        return outputs


@dataclass
class DecodingRun:
    """Decoding of some documents, prompts not counted: tokens, rounds, seconds, and what the worker noted."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0
    stats: LookaheadStats = field(default_factory=LookaheadStats)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.rounds

    def add(self, other: DecodingRun) -> None:
        """Take another run's figures as well."""
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.seconds += other.seconds
        self.stats.add(other.stats)

    def report(self) -> dict[str, float]:
        """Figures for a result."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "acceptance_length": self.acceptance_length,
            "round_ms": 1000 * self.seconds / self.rounds,
            **self.stats.summary(),
        }


@dataclass(frozen=True)
class Decoder:
    """Answers documents' prompts greedily, one after another, with whole blocks."""

    config: LookaheadConfig
    target: Target
    serving: ServingDrafter
    max_new_tokens: int

    def run(self, budget: Budget | None, documents: Sequence[Document]) -> DecodingRun:
        """With a worker on its part of the threads, or without one on all."""
        run = DecodingRun()
        worker: contextlib.AbstractContextManager[Lookahead] = Lookahead(None, note_outcomes=True)
        if budget is not None and isinstance(self.target, SlowedTarget):
            # it hardly computes while the drafter does, and would not on a device of its own
            worker = Lookahead(budget, cores=self.config.cores, note_outcomes=True)
        elif budget is not None:
            worker = lookahead_worker(self.config, budget, note_outcomes=True)
        with worker as lookahead:
            for document in documents:
                prompt, output = document.prompt_and_output()
                session = DecodingSession(
                    self.target,
                    prompt,
                    sampling=SamplingParams(),
                    max_new_tokens=min(self.max_new_tokens, len(output)),
                )
                session.prefill()
                started = time.perf_counter()
                while not session.finished:
                    session.step(self.serving, lookahead=lookahead)
                run.seconds += time.perf_counter() - started
                run.tokens += sum(r.committed for r in session.rounds)
                run.rounds += len(session.rounds)
            run.stats = lookahead.stats
        return run


@dataclass(frozen=True)
class Comparison:
    """Decoding without preparation and with one budget, document by document in turn, and what was foretold.

    What was foretold, for every budget and fastest first, comes from runs before: how rounds end, and times at three budgets.
    """

    budget: Budget
    estimates: list[BudgetEstimate]
    sync: DecodingRun
    ahead: DecodingRun

    @property
    def draft_s(self) -> float:
        """Seconds of a drafting pass without preparation."""
        return self.sync.stats.draft_s / self.sync.stats.draft_passes

    @property
    def foretold(self) -> BudgetEstimate:
        """What was expected of the budget."""
        return next(estimate for estimate in self.estimates if estimate.budget == self.budget)

    @property
    def plain(self) -> BudgetEstimate:
        """What was expected without preparation."""
        return next(estimate for estimate in self.estimates if estimate.budget is None)

    @property
    def gain(self) -> float:
        """Tokens per second with preparation / without."""
        return self.ahead.tokens_per_s / self.sync.tokens_per_s

    @property
    def gain_foretold(self) -> float:
        """The same by the estimates, and with what a round takes beside its passes."""
        rest = max(0.0, self.sync.seconds / self.sync.rounds - self.plain.round_s)
        tokens = (self.foretold.round_s / self.foretold.token_s) / (self.plain.round_s / self.plain.token_s)
        return tokens * (self.plain.round_s + rest) / (self.foretold.round_s + rest)

    def report(self) -> dict[str, Any]:
        """Figures for a result: both runs, the gain, the five fastest budgets and none."""
        return {
            **asdict(self.budget),
            "pays": self.foretold.token_s < self.plain.token_s,
            "hit_rate_foretold": self.foretold.hit_rate,
            "gain": self.gain,
            "gain_foretold": self.gain_foretold,
            "sync": self.sync.report(),
            "ahead": self.ahead.report(),
            "estimates": [asdict(estimate) for estimate in [*self.estimates[:5], self.plain]],
        }


def compare_lookahead(
    config: LookaheadConfig,
    target: Target,
    serving: ServingDrafter,
    documents: Sequence[Document],
    *,
    max_new_tokens: int,
) -> Comparison:
    """Estimate all budgets from a few runs, and measure the configured one, or in `auto` the fastest.

    Where the ends of rounds and the times of passes are known, what a budget would bring can be counted; nothing is tried for
    every C and F. Where the fastest is none, the best of the others is measured.

    Raises:
        UserError: when the drafter cannot draft ahead, or answers are too short to tell.
    """
    widest = budget_for(config, serving.drafter)
    block_size = serving.drafter.block_size
    decoder = Decoder(config, target, serving, max_new_tokens)
    # what the first run does for the first time is not the look-ahead's
    decoder.run(None, documents[:1])
    plain = decoder.run(None, documents)
    if not plain.stats.outcomes or not plain.stats.draft_passes:
        raise UserError(
            "evaluate.max_new_tokens: no round followed another, so look-ahead cannot be measured"
        )
    narrow, middle = Budget(1, 1), Budget(max(1, widest.coverage // 2), 1)
    ahead = [decoder.run(budget, documents) for budget in dict.fromkeys((narrow, middle, widest))]
    stats = ahead[-1].stats
    estimates = estimate_budgets(
        list(plain.stats.outcomes),
        _cost(plain, plain),
        [_cost(run, plain) for run in ahead],
        full_hit_rate=stats.full_hits / stats.full if stats.full else 0.0,
        block_size=block_size,
        widest=widest,
    )
    best = widest
    if config.mode == "auto":
        best = next(estimate.budget for estimate in estimates if estimate.budget is not None)
    sync, prepared = DecodingRun(), DecodingRun()
    for document in documents:
        sync.add(decoder.run(None, [document]))
        prepared.add(decoder.run(best, [document]))
    return Comparison(best, estimates, sync, prepared)


def _cost(run: DecodingRun, plain: DecodingRun) -> RoundCost:
    stats = run.stats
    # a run may hit every time
    drafting = stats if stats.draft_passes else plain.stats
    return RoundCost(
        slots=round(stats.slots / stats.passes),
        verify_s=stats.verify_s / stats.passes,
        ahead_s=stats.ahead_s / stats.passes,
        draft_s=drafting.draft_s / drafting.draft_passes,
        tokens=run.acceptance_length,
    )

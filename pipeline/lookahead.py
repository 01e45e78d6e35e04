"""Drafting ahead in a run: the worker as configured, its measurement, and the choice of a budget."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
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


def configured_budget(config: LookaheadConfig, drafter: Drafter) -> Budget:
    """C and F of `mode: fixed`, or the widest that `auto` considers.

    Raises:
        UserError: when this drafter cannot use them.
    """
    if not isinstance(drafter, D3DDrafter):
        raise UserError("lookahead.mode: this is no D3D drafter, and only those draft ahead")
    block = drafter.block_size
    default = block if config.mode == "auto" else -(-3 * block // 4)
    budget = Budget(config.coverage or default, config.fan_out)
    budget.check(block, drafter.config.vocab_size)
    return budget


@contextlib.contextmanager
def lookahead_worker(config: LookaheadConfig, budget: Budget | None) -> Iterator[Lookahead]:
    """A worker on its part of the CPU threads; the calling thread has the others meanwhile.

    Thread pools that together exceed the cores slow each other down by far more than their share. Where the models are on
    another device the threads hardly matter.
    """
    total = torch.get_num_threads()
    threads = config.threads or max(1, total // 2)
    torch.set_num_threads(max(1, total - threads))
    try:
        with Lookahead(budget, threads=threads) as lookahead:
            yield lookahead
    finally:
        torch.set_num_threads(total)


class SlowedTarget(Target):
    """A target whose passes take at least `at_least_s`: what a large one on a device of its own looks like from here.

    It waits without using the CPU, so that a drafter has the cores as it would have its own device.
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


@dataclass(frozen=True)
class Run:
    """Decoding of some documents, prompts not counted: tokens, rounds, seconds, and what the worker noted."""

    tokens: int
    rounds: int
    seconds: float
    stats: LookaheadStats

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        return self.tokens / self.rounds

    def report(self) -> dict[str, float]:
        """Figures for a result."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "acceptance_length": self.acceptance_length,
            **self.stats.summary(),
        }


def decode_documents(
    target: Target,
    serving: ServingDrafter,
    documents: Sequence[Document],
    lookahead: Lookahead,
    *,
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
) -> Run:
    """Answer the documents' prompts one after another, greedily."""
    lookahead.stats = LookaheadStats()
    tokens = rounds = 0
    seconds = 0.0
    for document in documents:
        prompt, _ = document.prompt_and_output()
        session = DecodingSession(
            target, prompt, sampling=SamplingParams(), max_new_tokens=max_new_tokens, eos_ids=eos_ids
        )
        session.prefill()
        started = time.perf_counter()
        while not session.finished:
            session.step(serving, lookahead=lookahead)
        seconds += time.perf_counter() - started
        tokens += sum(r.committed for r in session.rounds)
        rounds += len(session.rounds)
    return Run(tokens, rounds, seconds, lookahead.stats)


@dataclass(frozen=True)
class Comparison:
    """Rounds without preparation and with the best budget, and what was foretold for every budget, fastest first.

    What was foretold comes from runs before: outcomes of rounds without preparation, and times with a middling and with the
    widest budget.
    """

    budget: Budget
    estimates: list[BudgetEstimate]
    sync: Run
    ahead: Run

    @property
    def draft_s(self) -> float:
        """Seconds of a drafting pass without preparation."""
        return self.sync.stats.draft_s / self.sync.stats.draft_passes

    @property
    def round_gain(self) -> float:
        """Seconds per round without preparation / with."""
        return (self.sync.seconds / self.sync.rounds) / (self.ahead.seconds / self.ahead.rounds)

    @property
    def round_gain_foretold(self) -> float:
        """The same by the estimates, with what a round takes beside its passes."""
        (plain,) = (estimate for estimate in self.estimates if estimate.budget is None)
        (best,) = (estimate for estimate in self.estimates if estimate.budget == self.budget)
        whole = self.sync.seconds / self.sync.rounds
        return whole / (whole - plain.round_s + best.round_s)

    def report(self) -> dict[str, Any]:
        """Figures for a result: both runs, the gain, the five fastest budgets and none."""
        plain = [estimate for estimate in self.estimates if estimate.budget is None]
        (mine,) = (estimate for estimate in self.estimates if estimate.budget == self.budget)
        return {
            **asdict(self.budget),
            "pays": self.estimates[0].budget is not None,
            "hit_rate_foretold": mine.hit_rate,
            "round_gain": self.round_gain,
            "round_gain_foretold": self.round_gain_foretold,
            "sync": self.sync.report(),
            "ahead": self.ahead.report(),
            "estimates": [asdict(estimate) for estimate in [*self.estimates[:5], *plain]],
        }


def compare_lookahead(
    config: LookaheadConfig,
    target: Target,
    serving: ServingDrafter,
    documents: Sequence[Document],
    *,
    max_new_tokens: int,
) -> Comparison:
    """Estimate all budgets from three runs, and measure the configured one, or in `auto` the fastest.

    Where outcomes of rounds and times of passes are known, what a budget would bring can be counted; nothing is tried for
    every C and F.
    """
    drafter = serving.drafter
    widest = configured_budget(config, drafter)

    def measure(lookahead: Lookahead) -> Run:
        return decode_documents(target, serving, documents, lookahead, max_new_tokens=max_new_tokens)

    with Lookahead(None) as plain:
        sync = measure(plain)
    with lookahead_worker(config, Budget(max(1, widest.coverage // 2), 1)) as worker:
        middle = measure(worker)
        worker.budget = widest
        wide = measure(worker)
        estimates = estimate_budgets(
            list(sync.stats.outcomes),
            [_cost(run.stats) for run in (sync, middle, wide)],
            full_hit_rate=wide.stats.full_hits / wide.stats.full if wide.stats.full else 0.0,
            block_size=drafter.block_size,
            widest=widest,
        )
        best = widest
        if config.mode == "auto":
            best = next(estimate.budget for estimate in estimates if estimate.budget is not None)
        worker.budget = best
        ahead = measure(worker)
    return Comparison(best, estimates, sync, ahead)


def _cost(stats: LookaheadStats) -> RoundCost:
    return RoundCost(
        slots=round(stats.slots / stats.passes),
        verify_s=stats.verify_s / stats.passes,
        ahead_s=stats.ahead_s / stats.passes,
        draft_s=stats.draft_s / stats.draft_passes,
    )

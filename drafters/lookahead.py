"""Drafting ahead: a worker that prepares the next blocks while the target verifies the current ones.

The worker is a thread; torch releases the interpreter in its operators, so the two run at once on different cores, or with
the drafter on a device or CUDA stream of its own. A prepared block serves if the verification ended as it assumed. It is then
the block that drafting would have given, but after full acceptance, where it has not seen the bonus token. Otherwise the
request drafts as ever. Output does not change either way: drafts of a prepared block are chosen from distributions that know
only the text they follow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch

from drafters.branches import Branch, BranchPlan, Budget, RoundOutcome, plan_branches
from drafters.d3d import AheadRows, D3DDrafter

KEPT_OUTCOMES = 10_000
"""Of an engine that serves for months the last ones say what a budget is worth now."""

_log = logging.getLogger(__name__)

Prepared = dict[Branch, torch.Tensor]
"""hidden [B, H] of prepared blocks, slot 0 the anchor; [B-1, H] after full acceptance."""


@dataclass
class LookaheadStats:
    """What preparing brought and took, over all rounds since the start.

    A request's round counts once it is known which block would have served it, so not the last of a request. Seconds:
    `verify_s` in the target over `passes` of it, `ahead_s` in the worker, `wait_s` of the target's side for the worker after
    verification, and `draft_s` of drafting passes for requests without a prepared block, `draft_passes` of them. `slots` are
    the worker's rows; `failures` are passes that ended in an error, after which requests draft without preparation.
    """

    rounds: int = 0
    hits: int = 0
    full: int = 0
    full_hits: int = 0
    passes: int = 0
    verify_s: float = 0.0
    ahead_s: float = 0.0
    wait_s: float = 0.0
    draft_s: float = 0.0
    draft_passes: int = 0
    slots: int = 0
    failures: int = 0
    outcomes: deque[RoundOutcome] = field(default_factory=lambda: deque(maxlen=KEPT_OUTCOMES))

    @property
    def hit_rate(self) -> float:
        return self.hits / self.rounds if self.rounds else float("nan")

    def summary(self) -> dict[str, float]:
        """Rates, and mean milliseconds and rows per pass."""
        passes, drafts = max(self.passes, 1), max(self.draft_passes, 1)
        return {
            "rounds": float(self.rounds),
            "hit_rate": self.hit_rate,
            "full_acceptance_rate": self.full / self.rounds if self.rounds else float("nan"),
            "full_hit_rate": self.full_hits / self.full if self.full else float("nan"),
            "verify_ms": 1000 * self.verify_s / passes,
            "ahead_ms": 1000 * self.ahead_s / passes,
            "wait_ms": 1000 * self.wait_s / passes,
            "draft_ms": 1000 * self.draft_s / drafts,
            "slots": self.slots / passes,
        }

    def add(self, other: LookaheadStats) -> None:
        """Take what another run noted as noted here too."""
        for name, value in vars(other).items():
            if name == "outcomes":
                self.outcomes.extend(other.outcomes)
            else:
                setattr(self, name, getattr(self, name) + value)


class Lookahead:
    """Owns the worker; one per engine. Close it, or use it as a context.

    Args:
        budget: branches to prepare; None prepares nothing and only measures. May be changed between rounds.
        threads: CPU threads of the worker; None leaves torch's default.
        cores: cores that the worker is pinned to, where the system can do that.
        note_outcomes: also note how every round ended, which `estimate_budgets` needs and serving does not.
    """

    def __init__(
        self,
        budget: Budget | None,
        *,
        threads: int | None = None,
        cores: Collection[int] | None = None,
        note_outcomes: bool = False,
    ) -> None:
        self.budget = budget
        self.stats = LookaheadStats()
        self.note_outcomes = note_outcomes
        self._threads = threads
        self._cores = cores
        self._stream: torch.cuda.Stream | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lookahead", initializer=self._settle)

    def __enter__(self) -> Lookahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish the pass under way and end the thread."""
        self._pool.shutdown()

    def start(
        self, drafter: D3DDrafter, requests: Sequence[tuple[AheadRows, BranchPlan]]
    ) -> Future[list[Prepared]]:
        """Begin a pass over all requests; until its result is taken their caches are the worker's."""
        self.stats.slots += sum(
            len(rows.block_ids) + len(rows.depths) * drafter.block_size for rows, _ in requests
        )
        ready = None
        if drafter.device.type == "cuda":
            # recorded here: what the target queues from now on is not waited for
            ready = torch.cuda.current_stream(drafter.device).record_event()
            self._stream = self._stream or torch.cuda.Stream(drafter.device)
        return self._pool.submit(self._prepare, drafter, requests, ready)

    def finish(self, pending: Future[list[Prepared]]) -> list[Prepared]:
        """Wait for a pass; one dictionary for each of its requests."""
        started = time.perf_counter()
        prepared = pending.result()
        self.stats.wait_s += time.perf_counter() - started
        return prepared

    def _settle(self) -> None:
        if self._cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._cores)
        if self._threads is not None:
            # torch keeps the count per calling thread
            torch.set_num_threads(self._threads)

    @torch.no_grad()
    def _prepare(
        self,
        drafter: D3DDrafter,
        requests: Sequence[tuple[AheadRows, BranchPlan]],
        ready: torch.cuda.Event | None,
    ) -> list[Prepared]:
        started = time.perf_counter()
        with self._on_own_stream(ready, [rows for rows, _ in requests]):
            hidden = drafter.draft_ahead([rows for rows, _ in requests])
            full = [parts[-1, 1] for parts, (_, plan) in zip(hidden, requests, strict=True) if plan.full]
            bonus: list[int] = []
            if full:
                logits = torch.nn.functional.linear(torch.stack(full).to(drafter.dtype), drafter.head_VH)
                bonus = logits.max(dim=-1).indices.tolist()
        prepared: list[Prepared] = []
        foreseen = iter(bonus)
        for parts, (rows, plan) in zip(hidden, requests, strict=True):
            blocks = dict(zip(plan.branches, parts, strict=False))
            if plan.full:
                blocks[Branch(len(rows.block_ids) - 1, next(foreseen))] = parts[-1, 1:]
            prepared.append(blocks)
        self.stats.ahead_s += time.perf_counter() - started
        return prepared

    @contextlib.contextmanager
    def _on_own_stream(self, ready: torch.cuda.Event | None, requests: Sequence[AheadRows]) -> Iterator[None]:
        """On CUDA, beside the target's kernels but after what wrote the caches, and done when left."""
        if ready is None or self._stream is None:
            yield
            return
        for request in requests:
            # the pass drops these; their memory must not go to the target's kernels before it has read them
            for layer in request.cache.layers:
                for held in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                    if held is not None:
                        held.record_stream(self._stream)
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class Requester(Protocol):
    """What preparing needs of a decoding session."""

    tokens: list[int]

    @property
    def finished(self) -> bool: ...

    def ahead_rows(self, block_ids: torch.Tensor, depths: list[int], anchors: list[int]) -> AheadRows:
        """What the drafter is to prepare, given the rows of the block that are being verified."""
        ...

    def keep_prepared(self, prepared: Prepared) -> bool:
        """After the round: keep the block that follows it, if it is among these; whether it is."""
        ...

    def forget_draft_context(self) -> None:
        """The drafter's cache is in no known state."""
        ...


Session = TypeVar("Session", bound=Requester)


@dataclass(frozen=True)
class BlockUnderVerification(Generic[Session]):
    """A session's block: its rows under verification (anchor first), all D drafts, and the drafter's logits for them."""

    session: Session
    ids: torch.Tensor
    drafts: list[int]
    logits_DV: torch.Tensor


@dataclass
class Preparation(Generic[Session]):
    """The preparing pass of one round, over the sessions that have a block under verification."""

    lookahead: Lookahead
    blocks: list[BlockUnderVerification[Session]]
    pending: Future[list[Prepared]] | None = None

    @classmethod
    def start(
        cls, lookahead: Lookahead, drafter: D3DDrafter, blocks: list[BlockUnderVerification[Session]]
    ) -> Preparation[Session]:
        """Begin; without a budget nothing is prepared, only measured."""
        if not blocks or lookahead.budget is None:
            return cls(lookahead, blocks)
        requests = []
        for block in blocks:
            plan = plan_branches(
                block.logits_DV, block.drafts, len(block.ids), drafter.block_size, lookahead.budget
            )
            depths = [branch.accepted + 1 for branch in plan.branches]
            anchors = [branch.token for branch in plan.branches]
            if plan.full:
                depths.append(len(block.ids) - 1)
                anchors.append(int(block.ids[-1]))
            requests.append((block.session.ahead_rows(block.ids, depths, anchors), plan))
        return cls(lookahead, blocks, lookahead.start(drafter, requests))

    def abandon(self) -> None:
        """Wait until the worker has let go of the caches, whatever came of it."""
        if self.pending is not None:
            self.pending.exception()

    def finish(self, verify_s: float, accepted: Mapping[Session, int]) -> None:
        """Wait, and give every session that goes on the block that follows its round.

        Args:
            verify_s: seconds that verification took.
            accepted: drafts accepted, of the sessions that go on.
        """
        if not self.blocks:
            return
        stats = self.lookahead.stats
        stats.passes += 1
        stats.verify_s += verify_s
        prepared: list[Prepared | None] = [None] * len(self.blocks)
        if self.pending is not None:
            try:
                prepared = [*self.lookahead.finish(self.pending)]
            except Exception:
                # the round is committed, and preparing was an extra; most likely it wanted more memory than there is
                _log.warning("preparing the next blocks failed; drafting without", exc_info=True)
                stats.failures += 1
                for block in self.blocks:
                    block.session.forget_draft_context()
        for block, branches in zip(self.blocks, prepared, strict=True):
            if block.session not in accepted:
                continue
            hit = branches is not None and block.session.keep_prepared(branches)
            count, token = accepted[block.session], block.session.tokens[-1]
            full = count == len(block.drafts)
            stats.rounds += 1
            stats.hits += hit
            stats.full += full
            stats.full_hits += hit and full
            if self.lookahead.note_outcomes and len(block.ids) == len(block.drafts) + 1:
                rank = None if full else rank_of(token, block.logits_DV[count], block.drafts[count])
                stats.outcomes.append(RoundOutcome(count, rank))


def rank_of(token: int, logits_V: torch.Tensor, drafted: int) -> int:
    """How many tokens the drafter held likelier than `token`, the one that it drafted left out."""
    above = int((logits_V > logits_V[token]).sum())
    return above - int(logits_V[drafted] > logits_V[token])

"""Serving, round by round: who runs, what the policy wants verified, what that commits, and how long it takes.

The policy is the object that serving uses, asked and told in the order of `drafters.decoding.decode_round`.

Shapes: Q requests there are, N running, R of them whose prompt has been read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from drafters.monotone import Floats
from drafters.policies import AdaptivePolicy, LengthPolicy, Load, RoundTiming
from pipeline.simulation.costs import DraftWork, RoundCosts, VerifyWork
from pipeline.simulation.requests import Ints, Requests
from pipeline.simulation.traffic import Arrivals, Traffic

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class SimulatedRound:
    """A round: when it began; lengths and committed tokens [R] of `requests_R`; seconds of its passes, None without a draft."""

    began_s: float
    requests_R: Ints
    lengths_R: Ints
    committed_R: Ints
    draft_s: float | None
    verify_s: float


@dataclass
class Outcome:
    """What was measured.

    `seconds` of the clock; `committed` tokens, verified `rows` and `blocks` (rounds of single requests) of all requests; `rounds`
    of the engine, `drafted` of them with drafts. `committed_Q` and `seconds_Q` divide tokens and the time of rounds among the
    requests. `latency_s` and `first_token_s` are of answered requests, from their arrival. `most_rows` and `most_keys` are the
    largest of a round.
    """

    committed_Q: Floats
    seconds_Q: Floats
    seconds: float = 0.0
    committed: int = 0
    rows: int = 0
    blocks: int = 0
    rounds: int = 0
    drafted: int = 0
    most_rows: int = 0
    most_keys: int = 0
    latency_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Of the engine, idle time included."""
        return self.committed / self.seconds

    @property
    def acceptance_length(self) -> float:
        """τ."""
        return self.committed / self.blocks

    @property
    def verify_len(self) -> float:
        """Mean over blocks."""
        return self.rows / self.blocks


def serve(
    requests: Requests,
    policy: LengthPolicy,
    costs: RoundCosts,
    traffic: Traffic,
    *,
    warm_up: int,
    finish: int,
    watch: Callable[[SimulatedRound], None] | None = None,
) -> Outcome:
    """Serve until `warm_up + finish` requests are answered, and measure from the end of the first `warm_up` on.

    Args:
        requests: what there is to ask; after the last one the first comes again.
        policy: chooses lengths. It is told of every round that an engine would tell it of: without new prompts.
        costs: seconds of the passes.
        traffic: who asks.
        warm_up: requests after whose answers measuring begins, so that a policy has learnt, and requests are in all stages.
        finish: requests answered while measuring.
        watch: sees every round.
    """
    adaptive = policy if isinstance(policy, AdaptivePolicy) else None
    arrivals = Arrivals(traffic, requests.count)
    running = _Running(requests)
    outcome = Outcome(np.zeros(requests.count), np.zeros(requests.count))
    now, answered, began = 0.0, 0, 0.0
    while True:
        if not running.count and arrivals.next_s > now:
            now = arrivals.next_s
        found = arrivals.take(now, traffic.concurrency - running.count)
        running.add(found, now, reads_prompt=traffic.prompts)
        done = _round(requests, running, policy, adaptive, costs, now)
        measuring = answered >= warm_up
        now += (done.draft_s or 0.0) + done.verify_s
        if watch is not None:
            watch(done)
        if measuring:
            _note(outcome, done, running)
        over_N = running.advance(done.committed_R, now)
        if measuring:
            outcome.latency_s += (now - running.arrived_N[over_N]).tolist()
            outcome.first_token_s += (running.spoke_N - running.arrived_N)[over_N].tolist()
            outcome.tokens += (1 + running.length_N[over_N]).tolist()
        answered += int(over_N.sum())
        if over_N.any():
            running.keep(~over_N)
        if not measuring:
            began = now
        if answered >= warm_up + finish:
            outcome.seconds = now - began
            return outcome


class _Running:
    """Requests under way, in order of admission, one entry each.

    `row` of the next anchor; `unread` tokens that the drafter has not seen; `prompt` tokens that the target has yet to read, 0
    once it has begun; whether it is `fresh`, its prompt not yet read by the drafter; when it `arrived`, and when it `spoke` its
    first token.
    """

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.request_N = self.row_N = self.unread_N = self.prompt_N = np.zeros(0, dtype=np.int64)
        self.fresh_N = np.zeros(0, dtype=np.bool_)
        self.arrived_N = self.spoke_N = np.zeros(0)

    @property
    def count(self) -> int:
        return len(self.request_N)

    @property
    def begun_N(self) -> Bools:
        return self.prompt_N == 0

    @property
    def keys_N(self) -> Ints:
        """Tokens before the anchor, or none yet."""
        position = self.requests.prompt_Q[self.request_N] + self.row_N - self.requests.first_Q[self.request_N]
        return np.where(self.begun_N, position, 0)

    @property
    def length_N(self) -> Ints:
        """Tokens that a request's rounds commit in all."""
        return self.requests.end_Q[self.request_N] - self.requests.first_Q[self.request_N]

    def add(self, found: list[tuple[int, float]], now: float, *, reads_prompt: bool) -> None:
        """Admit requests; without a prompt to read they speak at once."""
        if not found:
            return
        new = np.asarray([request for request, _ in found])
        arrived = np.asarray([time for _, time in found])
        prompt = self.requests.prompt_Q[new] * reads_prompt
        self.request_N = np.append(self.request_N, new)
        self.row_N = np.append(self.row_N, self.requests.first_Q[new])
        self.unread_N = np.append(self.unread_N, prompt)
        self.prompt_N = np.append(self.prompt_N, prompt)
        self.fresh_N = np.append(self.fresh_N, np.full(len(new), reads_prompt))
        self.arrived_N = np.append(self.arrived_N, arrived)
        self.spoke_N = np.append(self.spoke_N, np.full(len(new), now))

    def advance(self, committed_R: Ints, now: float) -> Bools:
        """Commit tokens of those that have begun, let the others begin; [N] bool: which are answered."""
        begun_N = self.begun_N
        self.row_N[begun_N] += committed_R
        self.unread_N[begun_N] += committed_R
        self.spoke_N[~begun_N] = now
        self.prompt_N[:] = 0
        return self.row_N == self.requests.end_Q[self.request_N]

    def keep(self, kept_N: Bools) -> None:
        for name in ("request_N", "row_N", "unread_N", "prompt_N", "fresh_N", "arrived_N", "spoke_N"):
            setattr(self, name, getattr(self, name)[kept_N])


def _round(
    requests: Requests,
    running: _Running,
    policy: LengthPolicy,
    adaptive: AdaptivePolicy | None,
    costs: RoundCosts,
    now: float,
) -> SimulatedRound:
    """Choose, verify, and count; `running` is left as it was, but for what the drafter has read."""
    begun_N = running.begun_N
    rows_R, keys_N = running.row_N[begun_N], running.keys_N
    keys_R, lengths_R = keys_N[begun_N], np.ones(len(rows_R), dtype=np.int64)
    draft_s, usual = None, False
    if len(rows_R):
        load = Load(running=running.count)
        if adaptive is None or adaptive.wants_draft(load):
            blocks_RB1 = requests.blocks(rows_R)
            lengths_R = policy.verify_len(blocks_RB1, blocks_RB1, load).numpy()
            unread_R = running.unread_N[begun_N]
            # as in decoding: a pass that also catches up with much text says nothing of what drafting mostly costs
            usual = bool((unread_R <= requests.block_size).all()) and not running.fresh_N[begun_N].any()
            draft_s = costs.draft_s(DraftWork(len(rows_R), int(unread_R.sum()), int(keys_R.sum())))
            running.unread_N[begun_N] = 0
            running.fresh_N[begun_N] = False
    new = running.count - len(rows_R)
    read_N = running.prompt_N.copy()
    read_N[begun_N] = lengths_R
    pairs = int((read_N * keys_N + read_N * (read_N + 1) // 2).sum())
    rows = int(read_N.sum())
    work = VerifyWork(running.count, rows, int(lengths_R.sum()) + new, int(keys_N.sum()), pairs)
    verify_s = costs.verify_s(work)
    committed_R = requests.committed(rows_R, requests.end_Q[running.request_N[begun_N]], lengths_R)
    if adaptive is not None and not new:
        told_s, committed = draft_s if usual else None, int(committed_R.sum())
        adaptive.observe(RoundTiming(running.count, rows, verify_s, told_s, committed))
    return SimulatedRound(now, running.request_N[begun_N], lengths_R, committed_R, draft_s, verify_s)


def _note(outcome: Outcome, done: SimulatedRound, running: _Running) -> None:
    """Count a round, before its requests go on."""
    rows = int(done.lengths_R.sum()) + int(running.prompt_N.sum())
    outcome.committed += int(done.committed_R.sum())
    outcome.rows += int(done.lengths_R.sum())
    outcome.blocks += len(done.lengths_R)
    outcome.rounds += 1
    outcome.drafted += done.draft_s is not None
    outcome.most_rows = max(outcome.most_rows, rows)
    outcome.most_keys = max(outcome.most_keys, rows + int(running.keys_N.sum()))
    share = ((done.draft_s or 0.0) + done.verify_s) / running.count
    # a text may run several times over at once
    np.add.at(outcome.seconds_Q, running.request_N, share)
    np.add.at(outcome.committed_Q, done.requests_R, done.committed_R)

"""The policy `throughput`: the lengths of all requests chosen together, for the most committed tokens per second.

A round that verifies lengths v_n is expected to commit Σ_n (1 + Σ_{j<v_n} S_nj) tokens, S_nj being the chance that the target
accepts slots 1..j of request n, and costs draft(N) + verify(Σ v_n, N) seconds. Rows are alike to the target, so of any number of
rows the best are those of highest S; along a request S never rises, so the best rows of a request are its first. Hence the best
prefix of all S in falling order is the best of all length vectors, whatever the cost curve.

Not drafting at all is one of the choices: N tokens for verify(N, N) seconds. It must be made before drafting is paid, so it
rests on what recent blocks were expected to survive, and on what earlier rounds committed of what they were expected to: the
best of many guesses is mostly one that was too high.

Lossless at T>0: lengths are a function of the hidden states and distributions q of all requests, and of how long earlier rounds
took; whether to draft, of earlier rounds alone. No drawn draft of this round enters either.

Shapes: N requests, D drafts of a block (B-1), B block size, H hidden size.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from drafters.acceptance_head import AcceptanceHead
from drafters.monotone import Floats
from drafters.policies import Load, RoundTiming
from drafters.step_cost import StepCosts

CALIBRATION_ROUNDS = 12
"""Rounds that try different lengths before the table is relied on."""

_MOST_CALIBRATION_ROUNDS = 4 * CALIBRATION_ROUNDS
"""Drafted rounds, observed or not, after which a table that can tell anything at all is relied on."""

_RECENT_BLOCKS = 128
_DECISION_ROUNDS = 8
_MOST_WINDOWS = 32
_PROBE_SHARE = 0.005
"""Of the time, that probes may lose, unless they become rarer than `_MOST_SPACING` times `probe_every` rounds."""
_MOST_SPACING = 16
_HONESTY_MEMORY = 512
"""Blocks, or rounds if those are more, after which half of what was hoped and gained is forgotten."""
_HONESTY_PRIOR = 32.0
"""Drafts, as if so many had been expected and accepted before the first round."""
_LEAST_KEPT = 0.125
_MOST_HONESTY = 2.0


@dataclass(frozen=True)
class Plan:
    """A choice of lengths: verify_len of each request [N], expected tokens, and seconds."""

    lengths: list[int]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def best_lengths(survival_ND: Floats, verify_s: Floats, draft_s: float, *, rate: float | None = None) -> Plan:
    """The lengths of highest expected tokens ÷ seconds.

    Args:
        survival_ND: S, non-increasing along each row.
        verify_s: seconds of verifying N, N+1, .., N+N·D rows.
        draft_s: seconds of drafting, already spent when lengths are chosen and yet part of what the tokens cost.
        rate: tokens per second that the time would bring elsewhere: then those of highest tokens - rate · seconds.
    """
    num_requests, drafts = survival_ND.shape
    # stable: of equal values the earlier slot comes first, so that every prefix is a choice of lengths
    order = np.argsort(-survival_ND, axis=None, kind="stable")
    gains = survival_ND.reshape(-1)[order]
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(gains)])
    seconds = draft_s + verify_s
    best = int(np.argmax(tokens / seconds if rate is None else tokens - rate * seconds))
    counts = np.bincount(order[:best] // drafts, minlength=num_requests)
    return Plan((1 + counts).tolist(), float(tokens[best]), float(seconds[best]))


class Honesty:
    """Drafts accepted in earlier rounds ÷ drafts that were expected to be, over the chosen rows; 1 before the first."""

    def __init__(self) -> None:
        self._gained = self._hoped = _HONESTY_PRIOR
        self._seen = 0

    @property
    def share(self) -> float:
        return min(self._gained / self._hoped, _MOST_HONESTY)

    def add(self, gained: float, hoped: float, blocks: int, now: int) -> None:
        """Note round number `now` of so many blocks; one that hoped for nothing tells nothing."""
        if hoped <= 0:
            return
        kept = 0.5 ** (max(blocks, now - self._seen) / _HONESTY_MEMORY)
        # a few blocks after a long time are not all that counts
        kept = max(kept, _LEAST_KEPT)
        self._gained = kept * self._gained + gained
        self._hoped = kept * self._hoped + hoped
        self._seen = now


class ThroughputPolicy:
    """Joint lengths by measured costs.

    Args:
        head: predicts acceptance.
        costs: the engine's table, learnt online. After a swap of drafters it is to be one `for_another_drafter`.
        probe_every: one round in so many, or in up to 16 times as many where that would cost more than 1/200 of the time, does
            what seems not to pay, so that the policy notices when it does: decodes plainly, or drafts, then twice running, as
            the first of the two catches up with the text and tells nothing of what drafting costs. And one drafted round in
            twice as many verifies whole blocks, so that the table keeps knowing what rows cost.
    """

    name = "throughput"

    def __init__(
        self, head: AcceptanceHead, costs: StepCosts | None = None, *, probe_every: int = 64
    ) -> None:
        if probe_every < 3:
            raise ValueError(f"probe_every {probe_every} must be at least 3")
        self.head = head
        self.costs = costs or StepCosts()
        self.probe_every = probe_every
        self._recent: deque[Floats] = deque(maxlen=_RECENT_BLOCKS)
        self._rounds = self._probed = self._drafted = self._tried = self._most_tried = 0
        self._drafting, self._after_plain = True, False
        self._decisions: dict[int, tuple[int, bool, int]] = {}
        self._honesty = Honesty()
        self._hoped: float | None = None

    @property
    def reads_confidence(self) -> bool:
        return self.head.reads_confidence

    def wants_draft(self, load: Load) -> bool:
        """Whether drafting is expected to pay in this round; now and then the contrary, as a probe."""
        self._rounds += 1
        self._hoped = None
        self._after_plain = not self._drafting
        self._drafting = self._wants(load.running)
        return self._drafting

    @torch.no_grad()
    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        num_requests, block_size = hidden_NBH.shape[:2]
        survival_ND = self.head.survival(hidden_NBH, load.confidence_ND).double().cpu().numpy()
        if not self._after_plain:
            # a plain round ends anywhere, mostly in what is hard to guess; drafted rounds begin where others ended.
            # of all requests alike, as those that have run longest come first
            self._recent.extend(survival_ND[:: math.ceil(num_requests / _RECENT_BLOCKS)])
        lengths = self._lengths(survival_ND, block_size)
        self._drafted += 1
        return torch.tensor(lengths, device=hidden_NBH.device)

    def plan(self, survival_ND: Floats) -> Plan:
        """The best lengths for these requests, their drafting included; needs one observed round.

        Where plain decoding would have been better, drafting is a loss that no choice of lengths brings back: then rows are
        verified that commit more than plain decoding would in their time.
        """
        num_requests, drafts = survival_ND.shape
        rows = range(num_requests, num_requests * (drafts + 1) + 1)
        verify_s = self.costs.verify_s(rows, num_requests)
        draft_s = self.costs.draft_s(num_requests)
        best = best_lengths(survival_ND, verify_s, draft_s)
        plain_rate = num_requests / float(verify_s[0])
        if best.rate < plain_rate:
            return best_lengths(survival_ND, verify_s, draft_s, rate=plain_rate)
        return best

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a finished round."""
        self.costs.observe(timing)
        if timing.committed is not None and self._hoped is not None:
            gained = timing.committed - timing.requests
            self._honesty.add(gained, self._hoped, timing.requests, self._rounds)
        self._hoped = None

    @property
    def _calibrating(self) -> bool:
        """Whether the table is too young; not for ever where hardly a round is without a new prompt."""
        patient = self._drafted < _MOST_CALIBRATION_ROUNDS or not self.costs.known
        return self.costs.observed < CALIBRATION_ROUNDS and patient

    def _wants(self, num_requests: int) -> bool:
        if not self._recent or not self.costs.known or self._calibrating:
            return True
        decided, pays, every = self._decisions.get(num_requests, (-_DECISION_ROUNDS, True, self.probe_every))
        if self._rounds - decided >= _DECISION_ROUNDS:
            pays, every = self._pays(num_requests)
            self._decisions[num_requests] = self._rounds, pays, every
        if self._rounds - self._probed >= every:
            self._probed = self._rounds
        return pays != (self._rounds - self._probed < (1 if pays else 2))

    def _lengths(self, survival_ND: Floats, block_size: int) -> list[int]:
        """Planned ones, or those that all requests try in this round for the table's sake."""
        num_requests = len(survival_ND)
        if self._calibrating:
            tried = (block_size, 1, (block_size + 1) // 2, max(1, block_size // 4))
            # by rounds drafted: those with a new prompt are not observed, and might be many
            return [tried[self._drafted % len(tried)]] * num_requests
        # more rows than the table can foretell: once per such load, observed or not
        rows = num_requests * block_size
        if rows > 1.5 * max(self.costs.most_rows, self._most_tried):
            self._most_tried = rows
            return [block_size] * num_requests
        plan = self.plan(survival_ND)
        if self._drafted - self._tried >= self._whole_blocks_every(survival_ND, plan):
            self._tried = self._drafted
            return [block_size] * num_requests
        self._hoped = plan.tokens - num_requests
        return plan.lengths

    def _whole_blocks_every(self, survival_ND: Floats, plan: Plan) -> int:
        num_requests, rows = len(survival_ND), survival_ND.size + len(survival_ND)
        verify_s = self.costs.verify_s([rows], num_requests)
        seconds = self.costs.draft_s(num_requests) + float(verify_s[0])
        lost = seconds - (num_requests + float(survival_ND.sum())) / plan.rate
        return self._spacing(lost / plan.seconds, 2 * self.probe_every)

    def _pays(self, num_requests: int) -> tuple[bool, int]:
        """Whether drafting rounds, planned for blocks like the recent ones, commit more per second than plain ones.

        And how many rounds there are to be between two that do the contrary.
        """
        blocks = np.stack(self._recent)
        windows = min(max(1, len(blocks) // num_requests), _MOST_WINDOWS)
        # the latest blocks; over again if there are fewer than requests
        latest = np.resize(blocks[::-1], (windows, num_requests, blocks.shape[1]))
        rows = range(num_requests, num_requests * (blocks.shape[1] + 1) + 1)
        verify_s, draft_s = self.costs.verify_s(rows, num_requests), self.costs.draft_s(num_requests)
        plans = [best_lengths(window, verify_s, draft_s) for window in latest]
        seconds = sum(plan.seconds for plan in plans) / windows
        hoped = sum(plan.tokens for plan in plans) / windows - num_requests
        tokens = num_requests + self._honesty.share * hoped
        plain = float(verify_s[0])
        worth = tokens * plain / num_requests
        if worth > seconds:
            return True, self._spacing((plain - num_requests * seconds / tokens) / seconds, self.probe_every)
        return False, self._spacing(2 * (seconds - worth) / plain, self.probe_every)

    def _spacing(self, lost: float, least: int) -> int:
        """Rounds between two probes, each of which loses the time of `lost` rounds."""
        return min(max(math.ceil(lost / _PROBE_SHARE), least), _MOST_SPACING * least)

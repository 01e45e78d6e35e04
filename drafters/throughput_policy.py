"""The policy `throughput`: the lengths of all requests chosen together, for the most committed tokens per second.

A round that verifies lengths v_n is expected to commit Σ_n (1 + Σ_{j<v_n} S_nj) tokens, S_nj being the chance that the target
accepts slots 1..j of request n, and costs draft(N) + verify(Σ v_n, N) seconds. Rows are alike to the target, so of any number of
rows the best are those of highest S; along a request S never rises, so the best rows of a request are its first. Hence the best
prefix of all S in falling order is the best of all length vectors, whatever the cost curve.

Not drafting at all is one of the choices: N tokens for verify(N, N) seconds. It must be made before drafting is paid, so it
rests on what recent blocks were expected to survive.

Lossless at T>0: lengths are a function of the hidden states and distributions q of all requests, and of how long earlier rounds
took; whether to draft, of earlier rounds alone. No drawn draft of this round enters either.

Shapes: N requests, D drafts of a block (B-1), B block size, H hidden size.
"""

from __future__ import annotations

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

_RECENT_BLOCKS = 128
_DECISION_ROUNDS = 8
_MOST_WINDOWS = 32


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


def best_lengths(survival_ND: Floats, verify_s: Floats, draft_s: float) -> Plan:
    """The lengths of highest expected tokens ÷ seconds.

    Args:
        survival_ND: S, non-increasing along each row.
        verify_s: seconds of verifying N, N+1, .., N+N·D rows.
        draft_s: seconds of drafting, already spent when lengths are chosen and yet part of what the tokens cost.
    """
    num_requests, drafts = survival_ND.shape
    # stable: of equal values the earlier slot comes first, so that every prefix is a choice of lengths
    order = np.argsort(-survival_ND, axis=None, kind="stable")
    gains = survival_ND.reshape(-1)[order]
    tokens = num_requests + np.concatenate([[0.0], np.cumsum(gains)])
    seconds = draft_s + verify_s
    best = int(np.argmax(tokens / seconds))
    counts = np.bincount(order[:best] // drafts, minlength=num_requests)
    return Plan((1 + counts).tolist(), float(tokens[best]), float(seconds[best]))


class ThroughputPolicy:
    """Joint lengths by measured costs.

    Args:
        head: predicts acceptance.
        costs: the engine's table, learnt online. After a swap of drafters it is to be one `for_another_drafter`.
        probe_every: one round in so many does what seems not to pay, so that the policy notices when it does: decodes plainly, or
            drafts, then twice running, as the first of the two catches up with the text and tells nothing of what drafting costs.
            And one drafted round in twice as many verifies whole blocks, so that the table keeps knowing what rows cost.
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
        self._rounds = self._drafted = self._most_tried = 0
        self._decisions: dict[int, tuple[int, bool]] = {}

    @property
    def reads_confidence(self) -> bool:
        return self.head.reads_confidence

    def wants_draft(self, load: Load) -> bool:
        """Whether drafting is expected to pay in this round; now and then the contrary, as a probe."""
        self._rounds += 1
        if not self._recent or not self.costs.known or self.costs.observed < CALIBRATION_ROUNDS:
            return True
        decided, pays = self._decisions.get(load.running, (-_DECISION_ROUNDS, True))
        if self._rounds - decided >= _DECISION_ROUNDS:
            pays = self._pays(load.running)
            self._decisions[load.running] = self._rounds, pays
        return pays != (self._rounds % self.probe_every < (1 if pays else 2))

    @torch.no_grad()
    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        num_requests, block_size = hidden_NBH.shape[:2]
        survival_ND = self.head.survival(hidden_NBH, load.confidence_ND).double().cpu().numpy()
        self._recent.extend(survival_ND)
        trial = self._trial(num_requests, block_size)
        self._drafted += 1
        lengths = [trial] * num_requests if trial else self.plan(survival_ND).lengths
        return torch.tensor(lengths, device=hidden_NBH.device)

    def plan(self, survival_ND: Floats) -> Plan:
        """The best lengths for these requests, their drafting included; needs one observed round."""
        num_requests, drafts = survival_ND.shape
        rows = range(num_requests, num_requests * (drafts + 1) + 1)
        verify_s = self.costs.verify_s(rows, num_requests)
        return best_lengths(survival_ND, verify_s, self.costs.draft_s(num_requests))

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a finished round."""
        self.costs.observe(timing)

    def _trial(self, num_requests: int, block_size: int) -> int:
        """The length that all requests try in this round for the table's sake; 0 to choose."""
        if self.costs.observed < CALIBRATION_ROUNDS:
            tried = (block_size, 1, (block_size + 1) // 2, max(1, block_size // 4))
            # by rounds drafted: those with a new prompt are not observed, and might be many
            return tried[self._drafted % len(tried)]
        # more rows than the table can foretell: once per such load, observed or not
        rows = num_requests * block_size
        beyond = rows > 1.5 * max(self.costs.most_rows, self._most_tried)
        if beyond:
            self._most_tried = rows
        return block_size if beyond or (self._drafted + 1) % (2 * self.probe_every) == 0 else 0

    def _pays(self, num_requests: int) -> bool:
        """Whether drafting rounds, planned for blocks like the recent ones, commit more per second than plain ones."""
        blocks = np.stack(self._recent)
        windows = min(max(1, len(blocks) // num_requests), _MOST_WINDOWS)
        # the latest blocks; over again if there are fewer than requests
        latest = np.resize(blocks[::-1], (windows, num_requests, blocks.shape[1]))
        rows = range(num_requests, num_requests * (blocks.shape[1] + 1) + 1)
        verify_s, draft_s = self.costs.verify_s(rows, num_requests), self.costs.draft_s(num_requests)
        plans = [best_lengths(window, verify_s, draft_s) for window in latest]
        drafted = sum(plan.tokens for plan in plans) / sum(plan.seconds for plan in plans)
        return drafted > num_requests / float(verify_s[0])

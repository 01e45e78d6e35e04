"""Which blocks to prepare while the target verifies, and how many are worth it (D3D, branch preparation).

After a block [anchor, d₁..d_{B-1}] the next one is anchored either on a token t ≠ d_i that the target put in place of d_i, or,
when all drafts were accepted, on the bonus token after them. A budget of C and F prepares the (C-1)·F likeliest of the first
kind, i = 1..C-1, and one block for the last. The bonus token is not known then, so that block is anchored on d_{B-1}: it serves
if its own first prediction is the bonus, and has one draft fewer. When the target verifies less than the block, what follows the
last verified draft is prepared instead, with F tokens of which the next draft may be one, and one position fewer for rejections.

Shapes: D drafts of a block (B-1, or B-2 after full acceptance), V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from drafters.errors import UserError


@dataclass(frozen=True)
class Budget:
    """Branches to prepare: `coverage` is the paper's C, `fan_out` its F."""

    coverage: int
    fan_out: int

    def slots(self, block_size: int) -> int:
        """Rows of one request's packed pass, B[(C-1)F+2]."""
        return block_size * ((self.coverage - 1) * self.fan_out + 2)

    def check(self, block_size: int, vocab_size: int) -> None:
        """Raises UserError naming the field that no block of this drafter can use."""
        if not 1 <= self.coverage <= block_size:
            raise UserError(
                f"lookahead.coverage: {self.coverage} is outside 1..{block_size} (the block size)"
            )
        if not 1 <= self.fan_out < vocab_size:
            raise UserError(
                f"lookahead.fan_out: {self.fan_out} is outside 1..{vocab_size - 1} (tokens other than the draft)"
            )


@dataclass(frozen=True)
class Branch:
    """A block prepared for the case that `accepted` drafts hold and the target's `token` follows."""

    accepted: int
    token: int


@dataclass(frozen=True)
class BranchPlan:
    """`branches` whose anchors are known, and whether full acceptance is prepared behind them."""

    branches: list[Branch]
    full: bool


def plan_branches(
    logits_DV: torch.Tensor, drafts: Sequence[int], verify_len: int, block_size: int, budget: Budget
) -> BranchPlan:
    """Branches of one block, the likeliest tokens by the drafter's own distributions.

    Args:
        logits_DV: the drafter's, row i for draft i+1.
        drafts: the D drafts.
        verify_len: slots that the target verifies now, 1..D+1.
        block_size: B.
        budget: C and F.
    """
    verified = verify_len - 1
    whole = verified == len(drafts)
    # a block of two slots has no draft left after its first
    full = whole and block_size > 2
    rejectable = min(budget.coverage - 1, verified)
    if not whole:
        rejectable = min(rejectable, max(0, budget.coverage - 2))
    positions = [*range(rejectable), *([] if whole else [verified])]
    if not positions:
        return BranchPlan([], full)
    fan_out = budget.fan_out if budget.coverage > 1 else 1
    # one more, as the draft itself is no alternative to itself
    best = logits_DV[positions].topk(min(fan_out + 1, logits_DV.shape[-1]), dim=-1).indices.tolist()
    branches = []
    for position, tokens in zip(positions, best, strict=True):
        others = [token for token in tokens if position == verified or token != drafts[position]]
        branches += [Branch(position, token) for token in others[:fan_out]]
    return BranchPlan(branches, full)


@dataclass(frozen=True)
class RoundOutcome:
    """How a round ended, as far as it tells which branch would have served.

    `accepted` drafts of a whole block; `rank` of the target's token among the drafter's tokens for its slot, the rejected
    draft left out (0 = the likeliest alternative), None after full acceptance.
    """

    accepted: int
    rank: int | None


@dataclass(frozen=True)
class RoundCost:
    """Measured in rounds with `slots` rows per request prepared: seconds of the parts, and committed tokens per round.

    `draft_s` is what a request without a prepared block waits for its drafting pass.
    """

    slots: int
    verify_s: float
    ahead_s: float
    draft_s: float
    tokens: float


@dataclass(frozen=True)
class BudgetEstimate:
    """What one budget is expected to do: hit rate, seconds per round, and per token."""

    budget: Budget | None
    hit_rate: float
    round_s: float
    token_s: float


def estimate_budgets(
    outcomes: Sequence[RoundOutcome],
    plain: RoundCost,
    ahead: Sequence[RoundCost],
    *,
    full_hit_rate: float,
    block_size: int,
    widest: Budget,
) -> list[BudgetEstimate]:
    """Expected seconds per token of every budget and of none, fastest first.

    A round takes the longer of verification and preparation, and a drafting pass more if no branch served. A high hit rate
    alone says little: branches that make preparation longer than verification cost every round, hit or not. A block prepared
    for full acceptance commits less than a drafted one; that is in the tokens per round of `ahead`.

    Args:
        outcomes: of rounds that verified whole blocks, from this drafter and workload.
        plain: the cost without preparation, the target and drafting having all cores.
        ahead: costs with preparation, at several `slots`; between two they are interpolated. On shared cores they contain what
            target and drafter take from each other.
        full_hit_rate: share of fully accepted blocks whose bonus token was foreseen.
        block_size: B.
        widest: largest C and F to consider.
    """
    if not outcomes or not ahead:
        raise ValueError("nothing to estimate from")
    ordered = sorted(ahead, key=lambda cost: cost.slots)
    full = sum(outcome.rank is None for outcome in outcomes) * full_hit_rate
    plain_s = plain.verify_s + plain.draft_s
    estimates = [BudgetEstimate(None, 0.0, plain_s, plain_s / plain.tokens)]
    for coverage in range(1, widest.coverage + 1):
        for fan_out in range(1, widest.fan_out + 1) if coverage > 1 else (1,):
            budget = Budget(coverage, fan_out)
            served = sum(
                outcome.rank is not None and outcome.rank < fan_out and outcome.accepted < coverage - 1
                for outcome in outcomes
            )
            hit_rate = (served + full) / len(outcomes)
            cost = _interpolate(ordered, budget.slots(block_size))
            round_s = max(cost.verify_s, cost.ahead_s) + (1 - hit_rate) * cost.draft_s
            estimates.append(BudgetEstimate(budget, hit_rate, round_s, round_s / cost.tokens))
    return sorted(estimates, key=lambda estimate: estimate.token_s)


def _interpolate(ordered: Sequence[RoundCost], slots: int) -> RoundCost:
    """The cost at `slots`: between two measurements in proportion, outside them preparation in proportion to its rows."""
    for low, high in itertools.pairwise(ordered):
        if low.slots <= slots <= high.slots:
            share = (slots - low.slots) / max(1, high.slots - low.slots)
            return RoundCost(
                slots,
                low.verify_s + share * (high.verify_s - low.verify_s),
                low.ahead_s + share * (high.ahead_s - low.ahead_s),
                low.draft_s + share * (high.draft_s - low.draft_s),
                low.tokens + share * (high.tokens - low.tokens),
            )
    nearest = ordered[0] if slots < ordered[0].slots else ordered[-1]
    return replace(nearest, slots=slots, ahead_s=nearest.ahead_s * slots / nearest.slots)

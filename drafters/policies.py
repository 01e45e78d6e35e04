"""Length policies: how many slots of a drafted block the target verifies.

One interface for all. At T>0 with sampled drafts a policy must decide from the context and the drafter's distributions
alone, or from d₁..d_{v-1} when it answers v: looking at d_v or later shifts the output distribution. The policies here
read hidden states only, never drafted tokens, so they are lossless with sampled and with argmax drafts alike. `survival` and
`throughput` have modules of their own.

Shapes: N blocks, B block size, D drafts of a block (B-1), H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

import torch

from drafters.errors import UserError
from drafters.length_head import LengthHead, verify_len_from

Value = TypeVar("Value")


@dataclass(frozen=True)
class Load:
    """What the engine knows when it asks: requests running in this round.

    `confidence_ND` fp32, for policies that read it (`reads_confidence`): the log-probability of the likeliest draft of every
    slot, at temperature 1. A function of the drafter's distributions, the same whichever drafts are drawn.
    """

    running: int = 1
    confidence_ND: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class RoundTiming:
    """A finished round without new prompts.

    `rows` that the target read for `requests` requests in `verify_s` seconds, the choice of what to commit included. `draft_s`
    seconds of drafting a block for each of them; None if none was drafted, or if it also had to read more text than usual.
    `committed` tokens of all of them together; None if that is not known.
    """

    requests: int
    rows: int
    verify_s: float
    draft_s: float | None
    committed: int | None = None


class LengthPolicy(Protocol):
    """Chooses verify_len for each drafted block."""

    @property
    def name(self) -> str: ...

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        """int64 [N] in 1..B, the anchor counted."""
        ...


@runtime_checkable
class AdaptivePolicy(Protocol):
    """What a policy has besides that learns from rounds and may do without drafting."""

    def wants_draft(self, load: Load) -> bool:
        """Asked before each round; False: all requests decode one token plainly. May depend on earlier rounds only."""
        ...

    def observe(self, timing: RoundTiming) -> None:
        """Told of each round after it."""
        ...


def reads_confidence(policy: LengthPolicy) -> bool:
    """Whether the policy wants `Load.confidence_ND`, which costs a pass over the draft logits."""
    return bool(getattr(policy, "reads_confidence", False))


def by_load(values: Mapping[int, Value], default: Value, load: Load) -> Value:
    """The value of the highest threshold of running requests that is reached, else the default."""
    reached = [threshold for threshold in values if threshold <= load.running]
    return values[max(reached)] if reached else default


@dataclass(frozen=True)
class FixedPolicy:
    """The same verify_len for every block; None verifies the whole block (plain DFlash)."""

    length: int | None = None
    name: str = "fixed"

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        num_blocks, block_size = hidden_NBH.shape[:2]
        if self.length is not None and not 1 <= self.length <= block_size:
            raise UserError(f"policy.length: {self.length} is outside 1..{block_size}")
        return torch.full((num_blocks,), self.length or block_size, device=hidden_NBH.device)


@dataclass(frozen=True)
class PlainPolicy:
    """Never drafts: plain decoding by the same engine, the baseline of speed."""

    name: str = "plain"

    def wants_draft(self, load: Load) -> bool:
        return False

    def observe(self, timing: RoundTiming) -> None:
        """Nothing to learn."""

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        return torch.ones(hidden_NBH.shape[0], dtype=torch.long, device=hidden_NBH.device)


@dataclass(frozen=True)
class AdaFlashPolicy:
    """verify_len = clamp(⌊â·γ·B⌋, 1, B) with γ chosen by load (AdaFlash §3.2).

    `gamma_by_load` maps "from this many running requests on" to γ; below `off_below_load` running requests the head is
    not asked and whole blocks are verified, as spare compute makes long verification free there.
    """

    head: LengthHead
    gamma: float = 1.0
    gamma_by_load: Mapping[int, float] = field(default_factory=dict)
    off_below_load: int = 0
    name: str = "adaflash"

    def gamma_at(self, load: Load) -> float:
        """γ for this load: that of the highest threshold reached, else the default."""
        return by_load(self.gamma_by_load, self.gamma, load)

    @torch.no_grad()
    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        num_blocks, block_size = hidden_NBH.shape[:2]
        if load.running < self.off_below_load:
            return torch.full((num_blocks,), block_size, device=hidden_NBH.device)
        features = hidden_NBH if self.head.features == "hidden" else embeddings_NBH
        return verify_len_from(self.head(features), self.gamma_at(load), block_size)

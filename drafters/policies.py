"""Length policies: how many slots of a drafted block the target verifies.

One interface for all. At T>0 with sampled drafts a policy must decide from the context and the drafter's distributions
alone, or from d₁..d_{v-1} when it answers v: looking at d_v or later shifts the output distribution. The policies here
read hidden states only, never drafted tokens, so they are lossless with sampled and with argmax drafts alike.

Shapes: N blocks, B block size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from drafters.errors import UserError
from drafters.length_head import LengthHead, verify_len_from


@dataclass(frozen=True)
class Load:
    """What the engine knows when it asks: requests running in this round."""

    running: int = 1


class LengthPolicy(Protocol):
    """Chooses verify_len for each drafted block."""

    @property
    def name(self) -> str: ...

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        """int64 [N] in 1..B, the anchor counted."""
        ...


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
        reached = [threshold for threshold in self.gamma_by_load if threshold <= load.running]
        return self.gamma_by_load[max(reached)] if reached else self.gamma

    @torch.no_grad()
    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        num_blocks, block_size = hidden_NBH.shape[:2]
        if load.running < self.off_below_load:
            return torch.full((num_blocks,), block_size, device=hidden_NBH.device)
        features = hidden_NBH if self.head.features == "hidden" else embeddings_NBH
        return verify_len_from(self.head(features), self.gamma_at(load), block_size)

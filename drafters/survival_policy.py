"""The policy `survival`: verify a draft if the chance that the target gets that far is worth it.

Lossless at T>0: the answer is a function of the drafter's hidden states and distributions alone, fixed before any draft of the
block is drawn.

Shapes: N blocks, B block size, D drafts of a block (B-1), H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from drafters.acceptance_head import AcceptanceHead
from drafters.policies import Load, by_load


@dataclass(frozen=True)
class SurvivalPolicy:
    """verify_len = 1 + number of slots j with S_j = Π_{i≤j} a_i ≥ threshold.

    `threshold_by_load` maps "from this many running requests on" to a threshold; the more requests share the target's pass, the
    dearer a row, and the higher it should be. 0 verifies whole blocks.
    """

    head: AcceptanceHead
    threshold: float = 0.3
    threshold_by_load: Mapping[int, float] = field(default_factory=dict)
    name: str = "survival"

    @property
    def reads_confidence(self) -> bool:
        return self.head.reads_confidence

    def threshold_at(self, load: Load) -> float:
        """The threshold for this load."""
        return by_load(self.threshold_by_load, self.threshold, load)

    @torch.no_grad()
    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        survival_ND = self.head.survival(hidden_NBH, load.confidence_ND)
        return 1 + (survival_ND >= self.threshold_at(load)).sum(dim=1)

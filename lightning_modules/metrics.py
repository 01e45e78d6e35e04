"""Acceptance length as a torchmetrics metric."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchmetrics import Metric

from drafters.replay import ReplayResult


class AcceptanceLength(Metric):
    """τ = Σ committed / Σ rounds, and the acceptance of each slot given that it was reached.

    Holds sums only, so ranks and batches add up exactly whatever their sizes.
    """

    full_state_update = False
    higher_is_better = True

    committed: torch.Tensor
    rounds: torch.Tensor
    reached_B: torch.Tensor
    matched_B: torch.Tensor

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size
        for name, size in (
            ("committed", 1),
            ("rounds", 1),
            ("reached_B", block_size),
            ("matched_B", block_size),
        ):
            self.add_state(name, torch.zeros(size, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, results: Sequence[ReplayResult]) -> None:
        """Add replayed documents."""
        for result in results:
            self.committed += result.committed
            self.rounds += result.rounds
            self.reached_B += torch.tensor(result.reached_B, device=self.device)
            self.matched_B += torch.tensor(result.matched_B, device=self.device)

    def compute(self) -> torch.Tensor:
        """τ, scalar fp32; nan before any round."""
        return (self.committed / self.rounds).squeeze(0)

    def acceptance_rate(self) -> torch.Tensor:
        """(τ-1)/(B-1)."""
        return (self.compute() - 1) / (self.block_size - 1)

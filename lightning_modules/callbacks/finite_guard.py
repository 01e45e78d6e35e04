"""Stops training at the first loss that is not finite; gradients are checked where their norms are taken, in `clip_each`."""

from __future__ import annotations

import lightning as L
import torch

from drafters.errors import UserError


class FiniteGuard(L.Callback):
    """Checks the loss of every batch.

    The weights are untouched when it raises, so the last checkpoint and exports stay good.
    """

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor
    ) -> None:
        if not torch.isfinite(loss):
            raise UserError(
                f"training stopped at step {trainer.global_step}: the loss is {loss.item()}; lower the learning "
                "rate (optim.lr) or check the data; earlier checkpoints and exports are intact"
            )

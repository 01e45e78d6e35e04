"""Stops training at the first loss or gradient that is not finite, naming it."""

from __future__ import annotations

import lightning as L
import torch
from torch.optim import Optimizer

from drafters.errors import UserError


class FiniteGuard(L.Callback):
    """Checks the loss of every batch and all gradients before every optimizer step.

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

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        gradients = [(n, p.grad) for n, p in pl_module.named_parameters() if p.grad is not None]
        if not gradients:
            return
        norms = torch.stack(torch._foreach_norm([g for _, g in gradients]))
        finite = torch.isfinite(norms)
        if not bool(finite.all()):
            name = gradients[int((~finite).nonzero()[0])][0]
            raise UserError(
                f"training stopped at step {trainer.global_step}: the gradient of {name} is not finite; lower "
                "the learning rate (optim.lr); earlier checkpoints and exports are intact"
            )

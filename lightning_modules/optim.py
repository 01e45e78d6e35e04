"""Optimizer and schedule shared by all objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from drafters.errors import UserError
from drafters.sharding import whole


@dataclass(frozen=True)
class OptimSpec:
    """AdamW with linear warm-up, then constant or cosine to zero.

    `total_steps` is needed by `cosine` only. The length head has its own rate and group.
    """

    lr: float = 3e-4
    head_lr: float = 2e-4
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 20
    schedule: Literal["constant", "cosine"] = "constant"
    total_steps: int | None = None

    def factor(self, step: int) -> float:
        """Multiplier of the learning rate at an optimizer step (a function of the step alone)."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.schedule == "constant" or not self.total_steps:
            return warm
        rest = max(0, step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))


def clip_each(owner: L.LightningModule, modules: Sequence[nn.Module | None], max_norm: float | None) -> None:
    """Clip each module's gradient by its own norm, so that one cannot shrink the other's.

    LightningModules call this instead of Lightning's clipping, which refuses fused optimizers under mixed precision although
    bfloat16 needs no gradient scaling. The norms, one pass over the gradients, also tell whether all are finite. The norm of a
    module that is divided among processes is that of all parts.

    Raises:
        UserError: naming a parameter of `owner` whose gradient is not finite; the weights are untouched.
    """
    for module in modules:
        gradients = [p.grad for p in module.parameters() if p.grad is not None] if module is not None else []
        if module is None or not gradients:
            continue
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if not torch.isfinite(norm):
            raise UserError(
                f"training stopped at step {owner.trainer.global_step}: the gradient of {_not_finite(owner)} is not "
                "finite; lower the learning rate (optim.lr); earlier checkpoints and exports are intact"
            )
        if max_norm and norm > max_norm:
            torch.nn.utils.clip_grads_with_norm_(module.parameters(), max_norm, norm)


def _not_finite(owner: nn.Module) -> str:
    for name, parameter in owner.named_parameters():
        if parameter.grad is not None and not torch.isfinite(whole(parameter.grad)).all():
            return name
    return "all parameters together"  # finite each, but their norm overflows


def configure_adamw(
    drafter: nn.Module | None, length_head: nn.Module | None, spec: OptimSpec
) -> dict[str, Any]:
    """Lightning's optimizer dictionary; vectors (norms, biases) are not decayed."""
    groups: list[dict[str, Any]] = []
    for module, lr in ((drafter, spec.lr), (length_head, spec.head_lr)):
        if module is None:
            continue
        parameters = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in parameters if p.dim() > 1]
        vectors = [p for p in parameters if p.dim() <= 1]
        groups.append({"params": matrices, "lr": lr, "weight_decay": spec.weight_decay})
        groups.append({"params": vectors, "lr": lr, "weight_decay": 0.0})
    # fused: one pass over the weights instead of about eight
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=spec.betas, fused=True)
    scheduler = LambdaLR(optimizer, spec.factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

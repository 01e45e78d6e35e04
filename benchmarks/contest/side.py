"""What a contender hands to the worker, and the optimizer that all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Side:
    """One contender's step.

    `loss` makes the loss of one step with its graph, metrics included; `factor` times it is Σ w·ℓ / Σ w; `weights` are what
    is trained, by their names in the serving layout.
    """

    loss: Callable[[], torch.Tensor]
    weights: Mapping[str, nn.Parameter]
    factor: float = 1.0


def adamw(side: Side) -> torch.optim.Optimizer:
    """The same fused optimizer for all: it is the fastest of torch's, and not what is compared here."""
    return torch.optim.AdamW(side.weights.values(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

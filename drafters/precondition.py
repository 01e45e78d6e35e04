"""Scaling of the feature projection while it is trained.

A few dimensions of a transformer's residual stream are hundreds of times larger than the rest. Adam moves every weight by
about the learning rate, so the columns of `fc` that read those dimensions would swing its output wildly while
the others hardly learn. Training therefore sees `fc.weight` = trained · diag(1/rms), which is folded into an ordinary
weight whenever the drafter is exported.

Shapes: T flat tokens, C feature width, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from drafters.dflash import DFlashDrafter
from drafters.packing import Document
from drafters.target import Target


class ColumnScale(nn.Module):
    """weight_HC = trained_HC · scale_C."""

    scale_C: torch.Tensor

    def __init__(self, scale_C: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale_C", scale_C)

    def forward(self, trained_HC: torch.Tensor) -> torch.Tensor:
        return trained_HC * self.scale_C

    def right_inverse(self, weight_HC: torch.Tensor) -> torch.Tensor:
        """The trained weight that gives `weight_HC`."""
        return weight_HC / self.scale_C


def feature_rms(target: Target, documents: Sequence[Document]) -> torch.Tensor:
    """Root mean square of every feature dimension over the documents' tokens, [C] fp32.

    The first token of each document is left out: models park outsized states there.
    """
    total: torch.Tensor | None = None
    count = 0
    for document in documents:
        ids_T = torch.tensor(document.token_ids, device=target.device)
        features_TC = target.forward_packed(ids_T, torch.arange(len(ids_T), device=target.device)).features_TC
        squares_C = features_TC[1:].float().square().sum(dim=0)
        total = squares_C if total is None else total + squares_C
        count += len(ids_T) - 1
    assert total is not None and count > 0
    return (total / count).sqrt().clamp_min(1e-6)


def precondition(drafter: DFlashDrafter, rms_C: torch.Tensor) -> None:
    """Train `fc` in scaled coordinates from now on; what the drafter computes does not change.

    The scale is relative to the features' overall size, so that the usual learning rates keep their meaning.
    """
    scale_C = (rms_C.square().mean().sqrt() / rms_C).to(drafter.fc.weight)
    parametrize.register_parametrization(drafter.fc, "weight", ColumnScale(scale_C))


def plain_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict under plain names, with scaled weights folded.

    Of a module that is divided among processes (`drafters.sharding`) all must ask: the first gets whole tensors, on the CPU,
    the others nothing.
    """
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        trained = cast(dict[str, torch.Tensor], get_model_state_dict(module, options=options))
        if not trained:
            return {}
    else:
        trained = module.state_dict()
    state = {name: tensor for name, tensor in trained.items() if ".parametrizations." not in name}
    for prefix, child in module.named_modules():
        if parametrize.is_parametrized(child):
            for name, steps in child.parametrizations.items():
                (step,) = steps
                parts = f"{prefix}.parametrizations.{name}"
                assert isinstance(step, ColumnScale)
                state[f"{prefix}.{name}"] = trained[f"{parts}.original"] * trained[f"{parts}.0.scale_C"]
    return state

"""A drafter's layers: which they are, and removing one for good."""

from __future__ import annotations

import torch
from torch import nn

from drafters.d3d import D3DDrafter
from drafters.errors import UserError
from drafters.fill import Drafter


def layers_of(drafter: Drafter) -> nn.ModuleList:
    """The layers that pruning may remove."""
    layers = drafter.lm.model.layers if isinstance(drafter, D3DDrafter) else drafter.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def mlp_output(layer: nn.Module) -> nn.Linear:
    """The projection through which a layer's MLP adds to the residual stream, weight [H, I]."""
    projection = layer.get_submodule("mlp.down_proj")
    assert isinstance(projection, nn.Linear)
    return projection


@torch.no_grad()
def remove_layer(drafter: Drafter, index: int, repair_HI: torch.Tensor | None = None) -> None:
    """Remove a layer for good; the configuration follows.

    Args:
        drafter: changed in place.
        index: which of its layers.
        repair_HI: output projection that the MLP before it gets (`drafters.repair`); None leaves it.

    Raises:
        UserError: when it is the last one.
    """
    layers, config = layers_of(drafter), drafter.config
    if len(layers) == 1:
        raise UserError("prune: the drafter has one layer left, and that one cannot be removed")
    if repair_HI is not None:
        mlp_output(layers[index - 1]).weight.copy_(repair_HI)
    del layers[index]
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [kind for i, kind in enumerate(config.layer_types) if i != index]
    for number, layer in enumerate(layers):
        # HF's layers know their place in the cache
        if hasattr(layer.self_attn, "layer_idx"):
            layer.self_attn.layer_idx = number

"""Starting weights of a drafter."""

from __future__ import annotations

from typing import Any, Literal

import torch

from drafters.dflash import DFlashAttention, DFlashDrafter
from drafters.errors import UserError
from drafters.target import Target

Initialisation = Literal["random", "target"]


def initialise(
    drafter: DFlashDrafter,
    target: Target,
    how: Initialisation,
    *,
    seed: int,
    layer_ids: list[int] | None = None,
) -> None:
    """Set the weights in place, deterministically.

    `random`: normal(0, 0.02), the output projections scaled down by √(2·layers) so that the residual stream starts
    calm. `target`: the drafter's layers are copies of the target's `layer_ids` (default: the last ones, which stand closest to
    the deepest feature). The gain of a copied layer's input norm is folded into its projections, since context
    features reach these without that norm. A Llama target has no query/key norms; there the norm weights are set to
    the size that the projections give for inputs of unit variance, so that attention starts as sharp as the target's.
    In both, `fc` starts by reading the deepest feature alone, and the final norm is the target's.

    Raises:
        UserError: when `layer_ids` does not name one target layer per drafter layer.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = len(drafter.layers)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            scale = (
                0.02 / (2 * depth) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            )
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        else:
            parameter.data.fill_(0.0 if name.endswith(".bias") else 1.0)
    _read_deepest_feature(drafter)
    # the head expects hidden states of the size that the target's own final norm gives
    drafter.norm.weight.data.copy_(target.model.model.norm.weight)
    if how == "target":
        num_target = target.config.num_hidden_layers
        chosen = layer_ids or list(range(max(0, num_target - depth), num_target))
        if len(chosen) != depth or not all(0 <= i < num_target for i in chosen):
            raise UserError(
                f"drafter.init_layer_ids: {chosen} must name {depth} layers within 0..{num_target - 1}"
            )
        for layer, source_id in zip(drafter.layers, chosen, strict=True):
            _copy_layer(layer, target.model.model.layers[source_id])


def _read_deepest_feature(drafter: DFlashDrafter) -> None:
    hidden = drafter.fc.weight.shape[0]
    with torch.no_grad():
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -hidden:] = torch.eye(hidden)


def _copy_layer(layer: Any, source: Any) -> None:
    own, given = layer.state_dict(), source.state_dict()
    for name, tensor in own.items():
        if name in given:
            tensor.copy_(given[name])
    attention = layer.self_attn
    assert isinstance(attention, DFlashAttention)
    gain_H = source.input_layernorm.weight.to(attention.q_proj.weight)
    with torch.no_grad():
        layer.input_layernorm.weight.fill_(1.0)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj):
            proj.weight.mul_(gain_H)
        if "self_attn.q_norm.weight" not in given:
            for norm, proj in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
                size = (proj.weight.square().sum() / proj.weight.shape[0]).sqrt()
                norm.weight.fill_(float(size))

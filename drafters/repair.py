"""Repair of a removed layer in closed form: the MLP before it takes over what it added to the residual stream.

Without layer k the stream lacks x_k - x_{k-1}. That is regressed on the activations a that the MLP of layer k-1 already computes:
its output projection W becomes W + ΔW with ΔW = argmin Σ_r w_r ‖x_k - x_{k-1} - a ΔWᵀ‖² + ρ‖ΔW‖². No gradient, one pass over a
few batches for all candidates at once; recovery then starts from there. (Beyond D3D, which recovers by training alone.)

Rows count by their relative error, w_r = 1/mean(x_k²), since a norm reads them next. A document's first token is where language
models park outsized states that all attention leans on: such rows are few, alike, and must stay right, so they count more.

Shapes: R rows of a batch, I width of an MLP, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from drafters.d3d import D3DDrafter
from drafters.fill import Drafter, features_of, fill_blocks
from drafters.layers import layers_of, mlp_output
from drafters.packing import PackedBatch
from drafters.target import Target

RIDGE = 0.3
"""ρ, in units of the activations' mean square: pruned drafters lose about the same between 0.1 and 1."""

FIRST_TOKEN_WEIGHT = 20.0


@dataclass(frozen=True)
class Repair:
    """`weight_HI` replaces the output projection of the MLP before the removed layer; `residual` is the share of the stream's
    mean square that stays wrong behind it."""

    weight_HI: torch.Tensor
    residual: float


@torch.no_grad()
def fit_repairs(
    drafter: Drafter, target: Target, batches: Iterable[PackedBatch], candidates: Sequence[int]
) -> dict[int, Repair]:
    """For each candidate layer what repairs its removal; the first layer has none before it, and gets none."""
    layers = layers_of(drafter)
    sums = {index: _NormalEquations() for index in candidates if index > 0}
    for batch in batches:
        on_device = batch.to(target.device)
        with _watched(drafter) as (activations, outputs):
            fill_blocks(drafter, target, on_device, features_of(drafter, target, on_device))
        emphasis_R = _emphasis(drafter, on_device, len(outputs[0]))
        for index, equations in sums.items():
            equations.add(activations[index - 1], outputs[index - 1], outputs[index], emphasis_R)
    repairs = {}
    for index, equations in sums.items():
        weight_HI = mlp_output(layers[index - 1]).weight
        change_HI, residual = equations.solve()
        repairs[index] = Repair((weight_HI + change_HI).to(weight_HI.dtype), residual)
    return repairs


class _NormalEquations:
    """Sums of the weighted least squares of one layer."""

    def __init__(self) -> None:
        self.gram_II: torch.Tensor | float = 0.0
        self.moment_IH: torch.Tensor | float = 0.0
        self.energy: torch.Tensor | float = 0.0
        self.weight: torch.Tensor | float = 0.0

    def add(
        self, a_RI: torch.Tensor, before_RH: torch.Tensor, after_RH: torch.Tensor, emphasis_R: torch.Tensor
    ) -> None:
        dtype = torch.float64 if a_RI.dtype == torch.float64 else torch.float32
        a_RI, after_RH = a_RI.to(dtype), after_RH.to(dtype)
        missing_RH = after_RH - before_RH.to(dtype)
        weights_R = emphasis_R.to(dtype) / after_RH.square().mean(-1).clamp_min(torch.finfo(dtype).tiny)
        weighted_RI = a_RI * weights_R[:, None]
        self.gram_II = self.gram_II + weighted_RI.T @ a_RI
        self.moment_IH = self.moment_IH + weighted_RI.T @ missing_RH
        self.energy = self.energy + (missing_RH.square().mean(-1) * weights_R).sum()
        self.weight = self.weight + emphasis_R.sum()

    def solve(self) -> tuple[torch.Tensor, float]:
        """ΔW [H, I], and the weighted relative error that it leaves."""
        gram_II, moment_IH = self.gram_II, self.moment_IH
        assert isinstance(gram_II, torch.Tensor) and isinstance(moment_IH, torch.Tensor)
        penalty = (RIDGE * gram_II.diagonal().mean()).clamp_min(torch.finfo(gram_II.dtype).tiny)
        regular_II = gram_II + penalty * torch.eye(len(gram_II), dtype=gram_II.dtype, device=gram_II.device)
        change_IH = torch.linalg.solve(regular_II, moment_IH)
        hidden = moment_IH.shape[1]
        explained = (change_IH * (2 * moment_IH - gram_II @ change_IH)).sum() / hidden
        return change_IH.T, float((self.energy - explained) / self.weight)


@contextmanager
def _watched(drafter: Drafter) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """What goes into each MLP's output projection, and what comes out of each layer, while the body runs."""
    activations: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def rows(hidden: Any) -> torch.Tensor:
        tensor: torch.Tensor = hidden[0] if isinstance(hidden, tuple) else hidden
        return tensor.reshape(-1, tensor.shape[-1])

    hooks = []
    for layer in layers_of(drafter):
        hooks += [
            mlp_output(layer).register_forward_pre_hook(
                lambda _module, inputs: activations.append(rows(inputs))
            ),
            layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(rows(output))),
        ]
    try:
        yield activations, outputs
    finally:
        for hook in hooks:
            hook.remove()


def _emphasis(drafter: Drafter, batch: PackedBatch, num_rows: int) -> torch.Tensor:
    emphasis_R = torch.ones(num_rows, device=batch.input_ids_T.device)
    if isinstance(drafter, D3DDrafter):
        emphasis_R[: batch.num_tokens][batch.position_ids_T == 0] = FIRST_TOKEN_WEIGHT
    return emphasis_R

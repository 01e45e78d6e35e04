"""Repair of a removed layer in closed form: the MLP before it takes over what it added to the residual stream.

Without layer k the stream lacks x_k - x_{k-1}. That is regressed on the activations a that the MLP of layer k-1 already computes:
its output projection W becomes W + ΔW with ΔW = argmin Σ_r w_r ‖x_k - x_{k-1} - a ΔWᵀ‖² + ρ‖ΔW‖². No gradient, one pass over a
few batches for all candidates at once; recovery then starts from there. (Beyond D3D, which recovers by training alone.)

Rows count by their relative error, w_r = 1/mean(x_k²), since a norm reads them next. A document's first token is where language
models park outsized states that all attention leans on: such rows are few, alike, and must stay right, so they count more.

Shapes: R rows of a batch, I width of an MLP, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from drafters.d3d import D3DDrafter
from drafters.fill import Drafter, features_of, fill_blocks
from drafters.layers import layers_of, mlp_output
from drafters.packing import PackedBatch
from drafters.target import Target

RIDGE = 0.3
"""ρ, in units of the activations' weighted mean square."""

FIRST_TOKEN_WEIGHT = 20.0


@dataclass(frozen=True)
class Repair:
    """What makes up for a layer.

    Attributes:
        weight_HI: replaces the output projection of the MLP before the removed layer.
        residual: share of the stream's mean square that stays wrong behind it, on the rows fitted.
        rows: how many those were; with fewer than I the fit has learnt them by heart.
    """

    weight_HI: torch.Tensor
    residual: float
    rows: int


@torch.no_grad()
def fit_repairs(
    drafter: Drafter,
    target: Target,
    batches: Iterable[PackedBatch],
    candidates: Sequence[int],
    *,
    stored: torch.dtype = torch.bfloat16,
) -> dict[int, Repair]:
    """For each candidate layer what repairs its removal; the first layer has none before it, and gets none.

    `stored` is the dtype of checkpoints: weights are rounded to it, so that what is measured is what will be loaded.
    """
    sums = {index: _NormalEquations() for index in candidates if index > 0}
    for batch in batches:
        on_device = batch.to(target.device)
        with _accumulating(drafter, on_device, sums):
            fill_blocks(drafter, target, on_device, features_of(drafter, target, on_device))
    layers = layers_of(drafter)
    repairs = {}
    for index in list(sums):
        equations = sums.pop(index)
        weight_HI = mlp_output(layers[index - 1]).weight
        change_HI, residual = equations.solve()
        repaired_HI = (weight_HI + change_HI).to(stored).to(weight_HI.dtype)
        repairs[index] = Repair(repaired_HI, residual, equations.rows)
    return repairs


class _NormalEquations:
    """Sums of the weighted least squares of one layer."""

    def __init__(self) -> None:
        self.gram_II: torch.Tensor | None = None
        self.moment_IH: torch.Tensor | None = None
        self.energy = self.weight = 0.0
        self.rows = 0

    def add(
        self, a_RI: torch.Tensor, before_RH: torch.Tensor, after_RH: torch.Tensor, emphasis_R: torch.Tensor
    ) -> None:
        dtype = torch.float64 if a_RI.dtype == torch.float64 else torch.float32
        a_RI, after_RH = a_RI.to(dtype), after_RH.to(dtype)
        missing_RH = after_RH - before_RH.to(dtype)
        weights_R = emphasis_R.to(dtype) / after_RH.square().mean(-1).clamp_min(torch.finfo(dtype).tiny)
        weighted_RI = a_RI * weights_R[:, None]
        if self.gram_II is None or self.moment_IH is None:
            self.gram_II = a_RI.new_zeros(a_RI.shape[1], a_RI.shape[1])
            self.moment_IH = a_RI.new_zeros(a_RI.shape[1], missing_RH.shape[1])
        self.gram_II.addmm_(weighted_RI.T, a_RI)
        self.moment_IH.addmm_(weighted_RI.T, missing_RH)
        self.energy += float((missing_RH.square().mean(-1) * weights_R).sum())
        self.weight += float(emphasis_R.sum())
        self.rows += len(a_RI)

    def solve(self) -> tuple[torch.Tensor, float]:
        """ΔW [H, I], and the weighted relative error that it leaves."""
        gram_II, moment_IH = self.gram_II, self.moment_IH
        assert gram_II is not None and moment_IH is not None, "repairs need at least one batch"
        # in fp64: the solution must not depend on how many threads a solver happens to get, or a resumed run would end elsewhere
        gram_II, moment_IH = gram_II.double(), moment_IH.double()
        penalty = (RIDGE * gram_II.diagonal().mean()).clamp_min(torch.finfo(torch.float32).tiny)
        identity_II = torch.eye(len(gram_II), dtype=gram_II.dtype, device=gram_II.device)
        change_IH = torch.linalg.solve(gram_II + penalty * identity_II, moment_IH)
        explained = (change_IH * (2 * moment_IH - gram_II @ change_IH)).sum() / moment_IH.shape[1]
        return change_IH.T, (self.energy - float(explained)) / self.weight


@contextmanager
def _accumulating(
    drafter: Drafter, batch: PackedBatch, sums: Mapping[int, _NormalEquations]
) -> Iterator[None]:
    """While the body runs, each layer adds to its equations; of all the hidden states only one layer's are kept."""
    activations: list[torch.Tensor] = []
    previous: list[torch.Tensor] = []

    def of_mlp(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        activations.append(_rows(inputs[0]))

    def of_layer(index: int, output: Any) -> None:
        output_RH = _rows(output[0] if isinstance(output, tuple) else output)
        if index in sums:
            emphasis_R = _emphasis(drafter, batch, len(output_RH))
            sums[index].add(activations[0], previous[0], output_RH, emphasis_R)
        if index:
            activations.pop(0)
            previous.pop(0)
        previous.append(output_RH)

    hooks = []
    for number, layer in enumerate(layers_of(drafter)):
        hooks += [
            mlp_output(layer).register_forward_pre_hook(of_mlp),
            layer.register_forward_hook(
                lambda _module, _inputs, output, number=number: of_layer(number, output)
            ),
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rows(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _emphasis(drafter: Drafter, batch: PackedBatch, num_rows: int) -> torch.Tensor:
    emphasis_R = torch.ones(num_rows, device=batch.input_ids_T.device)
    if isinstance(drafter, D3DDrafter):
        emphasis_R[: batch.num_tokens][batch.position_ids_T == 0] = FIRST_TOKEN_WEIGHT
    return emphasis_R

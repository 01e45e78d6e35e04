"""Recovery after pruning: the pruned drafter learns from the unpruned one (D3D eq. 9).

L_KL = Σ w_j KL(q̃₀‖q) / Σ w_j over the blocks' slots, with q₀ the fixed unpruned drafter's distribution at the same slot and
q̃₀ = (1-ε)·q₀ + ε·onehot(served token): adjusted toward the token that the target really served. The paper's digest gives no
formula for the adjustment; this mixture is our reading, and ε = 0 is plain distillation.

Loss and gradients are formed together, a few blocks at a time, as in `drafters.block_loss`.

Shapes: N blocks, B block size, H hidden, V vocabulary, R counted slots of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch

from drafters.block_loss import BlockLoss, BlockTargets
from drafters.errors import UserError
from drafters.objectives import LossSpec, fixed_weights

CHUNK_BYTES = 32 * 2**20
"""Default size of one fp32 [R, V] buffer; a chunk holds a handful of them."""


def recovery_loss(
    hidden_NBH: torch.Tensor,
    head_VH: torch.Tensor,
    teacher_NBH: torch.Tensor,
    teacher_head_VH: torch.Tensor,
    targets: BlockTargets,
    spec: LossSpec,
    *,
    label_share: float = 0.0,
    chunk_rows: int | None = None,
) -> BlockLoss:
    """Position-weighted forward KL from the adjusted teacher, scalar with a graph.

    Args:
        hidden_NBH: the pruned drafter's hidden states.
        head_VH: its head, which receives a gradient if it requires one; matmuls run in its dtype.
        teacher_NBH, teacher_head_VH: the unpruned drafter's, without a graph.
        targets: served tokens and slots that count.
        spec: its fixed slot weights; `survival` depends on the drafter and is refused.
        label_share: ε.
        chunk_rows: slots per chunk; default by the size of a buffer of logits.

    Raises:
        UserError: for slot weights that are not fixed.
    """
    if spec.weighting == "survival":
        raise UserError("prune.loss.weighting: recovery needs fixed weights, exponential or uniform")
    block_size = hidden_NBH.shape[1]
    rows = chunk_rows or max(block_size, CHUNK_BYTES // (4 * head_VH.shape[0]))
    with torch.autocast(hidden_NBH.device.type, enabled=False):
        value, weight, match_NB = _RecoveryFunction.apply(
            hidden_NBH,
            head_VH,
            teacher_NBH,
            teacher_head_VH,
            targets,
            spec,
            label_share,
            max(1, rows // (block_size - 1)),
        )
    return BlockLoss(value, weight, match_NB, 1.0)


class _RecoveryFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NBH: torch.Tensor,
        head_VH: torch.Tensor,
        teacher_NBH: torch.Tensor,
        teacher_head_VH: torch.Tensor,
        targets: BlockTargets,
        spec: LossSpec,
        label_share: float,
        blocks_per_chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        accumulate = torch.float64 if head_VH.dtype == torch.float64 else torch.float32
        weights_B = fixed_weights(spec, hidden_NBH.shape[1], hidden_NBH.device).to(accumulate)
        weight = (weights_B * targets.valid_NB).sum()
        weight_sum = weight.clamp_min(torch.finfo(accumulate).tiny)
        grad_NBH = torch.zeros(hidden_NBH.shape, dtype=accumulate, device=hidden_NBH.device)
        grad_VH = torch.zeros_like(head_VH, dtype=accumulate) if ctx.needs_input_grad[1] else None
        match_NB = torch.zeros_like(targets.valid_NB)
        loss = hidden_NBH.new_zeros((), dtype=accumulate)
        for start in range(0, len(hidden_NBH), blocks_per_chunk):
            chunk = slice(start, start + blocks_per_chunk)
            block_R, slot_R = targets.valid_NB[chunk].nonzero(as_tuple=True)
            if block_R.numel() == 0:
                continue
            rows_RH = hidden_NBH[chunk][block_R, slot_R].to(head_VH.dtype)
            teacher_RH = teacher_NBH[chunk][block_R, slot_R].to(teacher_head_VH.dtype)
            served_R = targets.served_NB[chunk][block_R, slot_R]
            weights_R = weights_B[slot_R] / weight_sum
            p_RV = (teacher_RH @ teacher_head_VH.T).softmax(-1, dtype=accumulate).mul_(1 - label_share)
            p_RV[torch.arange(len(served_R), device=served_R.device), served_R] += label_share
            logits_RV = rows_RH @ head_VH.T
            logq_RV = logits_RV.log_softmax(-1, dtype=accumulate)
            loss_R = torch.xlogy(p_RV, p_RV).sum(-1) - torch.linalg.vecdot(p_RV, logq_RV)
            loss += (loss_R * weights_R).sum()
            gradient_RV = (logq_RV.exp_() - p_RV).mul_(weights_R[:, None]).to(head_VH.dtype)
            grad_NBH[start + block_R, slot_R] = (gradient_RV @ head_VH).to(accumulate)
            if grad_VH is not None:
                grad_VH += gradient_RV.T @ rows_RH
            match_NB[start + block_R, slot_R] = logits_RV.max(-1).indices == served_R
        ctx.save_for_backward(
            grad_NBH.to(hidden_NBH.dtype), None if grad_VH is None else grad_VH.to(head_VH.dtype)
        )
        ctx.mark_non_differentiable(weight, match_NB)
        return loss, weight, match_NB

    @staticmethod
    def backward(ctx: Any, grad_value: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_NBH, grad_VH = ctx.saved_tensors
        return (
            grad_NBH * grad_value.to(grad_NBH.dtype),
            None if grad_VH is None else grad_VH * grad_value.to(grad_VH.dtype),
            *[None] * 6,
        )

"""OPD and OSD against the teacher's whole distribution, a few rows of logits at a time.

Logits exist once, in the head's dtype, and become their own gradient; whatever else has a column for every token is made for as
many rows as a cache holds.

Shapes: R slots, P distinct target positions, S rows of a slice, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from drafters.objectives import (
    LossSpec,
    distillation_losses,
    forward_kl_losses,
    softmax_and_normaliser,
)

SLICE_BYTES = 4 * 2**20
"""One fp32 [S, V] buffer on a CPU. On other devices kernels cost more to start than memory to read: there a slice is all rows."""


def row_slices(logits_RV: torch.Tensor) -> Iterator[slice]:
    """Slices that cover the rows."""
    rows, vocab = logits_RV.shape
    step = max(1, SLICE_BYTES // (4 * vocab)) if logits_RV.device.type == "cpu" else max(1, rows)
    return (slice(start, start + step) for start in range(0, rows, step))


@dataclass(frozen=True)
class TeacherLogits:
    """The target's prediction at each position: `logits_PV` in its head's dtype, before the temperature; `normaliser_P` the
    logarithm of Σ exp(logit / temperature); `greedy_P` the most likely token."""

    logits_PV: torch.Tensor
    normaliser_P: torch.Tensor
    greedy_P: torch.Tensor

    @classmethod
    def of(cls, hidden_PH: torch.Tensor, head_VH: torch.Tensor, temperature: float = 1.0) -> TeacherLogits:
        """From final hidden states in the head's dtype."""
        logits_PV = hidden_PH @ head_VH.T
        accumulate = torch.float64 if head_VH.dtype == torch.float64 else torch.float32
        greedy, normalisers = [], []
        for rows in row_slices(logits_PV):
            greedy.append(logits_PV[rows].max(dim=-1).indices)
            logits_SV = logits_PV[rows].to(accumulate)
            normalisers.append(
                softmax_and_normaliser(logits_SV / temperature if temperature != 1 else logits_SV)[1]
            )
        return cls(logits_PV, torch.cat(normalisers), torch.cat(greedy))


def whole_losses(
    logits_RV: torch.Tensor,
    teacher: TeacherLogits,
    positions_R: torch.Tensor,
    hard_R: torch.Tensor,
    spec: LossSpec,
    weight_sum: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss [R] and log q(label) [R] of `opd` or `osd`, fp32 (fp64 for fp64 logits).

    Args:
        logits_RV: the drafter's; overwritten by the gradient of each slot's loss with respect to them.
        teacher: at the spec's temperature for `opd`, at 1 for `osd`.
        positions_R: each slot's place among the teacher's.
        hard_R: see `distillation_losses`; not used by `osd`.
        spec: the objective.
        weight_sum: Z for `position_normalised`.
    """
    losses, logs = [], []
    for rows in row_slices(logits_RV):
        positions_S = positions_R[rows]
        normaliser_S, labels_S = teacher.normaliser_P[positions_S], teacher.greedy_P[positions_S]
        # a gather is a copy, and a cast of half precision another: both may be overwritten
        teacher_SV = teacher.logits_PV[positions_S].to(normaliser_S.dtype)
        logits_SV = logits_RV[rows].to(normaliser_S.dtype)
        if spec.objective == "osd":
            logp_SV = teacher_SV.sub_(normaliser_S[:, None])
            loss_S, grad_SV, log_label_S = forward_kl_losses(logits_SV, logp_SV, labels_S)
        else:
            loss_S, grad_SV, log_label_S = distillation_losses(
                logits_SV, teacher_SV, normaliser_S, labels_S, hard_R[rows], spec, weight_sum
            )
        logits_RV[rows] = grad_SV
        losses.append(loss_S)
        logs.append(log_label_S)
    return torch.cat(losses), torch.cat(logs)

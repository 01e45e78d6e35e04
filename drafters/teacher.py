"""Cross-entropy with hard and soft labels, and what soft ones need of the target: one head row per position.

For the forward KL(p‖q) with q = softmax(W h) both loss and gradient are linear in p:

    KL(p‖q) = Σ_v p_v log p_v - h·ē + log Σ_v exp(W_v·h),    ∂KL/∂h = Wᵀq - ē,    ē = Σ_v p_v W_v.

So ē and the negentropy, once computed, make a soft label cost what a hard one does, whose ē is the label's own row.

Shapes: T positions, H hidden, V vocabulary, R rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CHUNK_ROWS = 128


@dataclass(frozen=True)
class TeacherMoments:
    """The target's prediction at each position.

    Attributes:
        greedy_T: its most likely token, int64.
        mean_row_TH: ē in the head's dtype; None where only hard labels are wanted.
        negentropy_T: Σ p log p, fp32 (fp64 for a fp64 head); None likewise.
    """

    greedy_T: torch.Tensor
    mean_row_TH: torch.Tensor | None = None
    negentropy_T: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> TeacherMoments:
        """The moments at these positions."""
        return TeacherMoments(
            self.greedy_T[positions],
            None if self.mean_row_TH is None else self.mean_row_TH[positions],
            None if self.negentropy_T is None else self.negentropy_T[positions],
        )

    @staticmethod
    def cat(parts: list[TeacherMoments]) -> TeacherMoments:
        """One after another; all soft or all hard."""
        rows = [p.mean_row_TH for p in parts if p.mean_row_TH is not None]
        entropies = [p.negentropy_T for p in parts if p.negentropy_T is not None]
        return TeacherMoments(
            torch.cat([p.greedy_T for p in parts]),
            torch.cat(rows) if rows else None,
            torch.cat(entropies) if entropies else None,
        )

    @property
    def nbytes(self) -> int:
        tensors = (self.greedy_T, self.mean_row_TH, self.negentropy_T)
        return sum(t.nbytes for t in tensors if t is not None)


@torch.no_grad()
def teacher_moments(hidden_TH: torch.Tensor, head_VH: torch.Tensor, *, soft: bool = True) -> TeacherMoments:
    """Moments of p = softmax(W h).

    Args:
        hidden_TH: the target's final hidden states (head input).
        head_VH: its head.
        soft: also form the mean row and the negentropy.
    """
    accumulate = torch.float64 if head_VH.dtype == torch.float64 else torch.float32
    parts: list[TeacherMoments] = []
    for hidden_RH in hidden_TH.to(head_VH.dtype).split(CHUNK_ROWS):
        logits_RV = hidden_RH @ head_VH.T
        greedy_R = logits_RV.max(dim=-1).indices
        if not soft:
            parts.append(TeacherMoments(greedy_R))
            continue
        logp_RV = logits_RV.to(accumulate).log_softmax(dim=-1)
        p_RV = logp_RV.exp()
        # p = 0 has log p = -inf only when the logits overflow; 0·log 0 = 0
        negentropy_R = torch.linalg.vecdot(p_RV, logp_RV.clamp_min_(torch.finfo(accumulate).min))
        parts.append(TeacherMoments(greedy_R, p_RV.to(head_VH.dtype) @ head_VH, negentropy_R))
    if not parts:
        empty = hidden_TH.new_zeros(0, dtype=torch.long)
        return TeacherMoments(
            empty, head_VH.new_zeros(0, head_VH.shape[1]) if soft else None, empty.to(accumulate) if soft else None
        )
    return TeacherMoments.cat(parts)


def label_losses(
    hidden_RH: torch.Tensor,
    logits_RV: torch.Tensor,
    top_R: Any,
    head_VH: torch.Tensor,
    labels_R: torch.Tensor,
    hard_R: torch.Tensor,
    soft_R: TeacherMoments | None,
    accumulate: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy with hard labels, or KL(p‖q) with soft ones.

    The only [R, V] buffers are logits and softmax, both in the head's dtype.

    Args:
        hidden_RH: drafter hidden states in the head's dtype.
        logits_RV: their logits.
        top_R: `logits_RV.max(dim=-1)`.
        head_VH: the head.
        labels_R: hard labels.
        hard_R: bool, False drops a hard label.
        soft_R: moments of the soft labels, which replace the hard ones; None for hard labels.
        accumulate: dtype of what is returned.

    Returns:
        loss [R], gradient with respect to the hidden states [R, H], log q(label) [R].
    """
    q_RV = logits_RV.softmax(dim=-1)
    q_top_R = q_RV.gather(-1, top_R.indices[:, None])[:, 0].to(accumulate)
    log_normaliser_R = top_R.values.to(accumulate) - q_top_R.log()
    log_label_R = logits_RV.gather(-1, labels_R[:, None])[:, 0].to(accumulate) - log_normaliser_R
    expected_RH = (q_RV @ head_VH).to(accumulate)
    if soft_R is None:
        hard = hard_R.to(accumulate)
        grad_RH = (expected_RH - head_VH[labels_R].to(accumulate)) * hard[:, None]
        return -log_label_R * hard, grad_RH, log_label_R
    assert soft_R.mean_row_TH is not None
    assert soft_R.negentropy_T is not None
    mean_row_RH = soft_R.mean_row_TH.to(accumulate)
    cross_R = log_normaliser_R - torch.linalg.vecdot(hidden_RH.to(accumulate), mean_row_RH)
    return soft_R.negentropy_T + cross_R, expected_RH - mean_row_RH, log_label_R

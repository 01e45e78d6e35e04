"""Cross-entropy with hard and soft labels, and what soft ones need of the target: one row per position.

For the forward KL(p‖q) with q = softmax(W h) both loss and gradient are linear in p:

    KL(p‖q) = Σ_v p_v log p_v - h·ē + log Σ_v exp(W_v·h),    ∂KL/∂h = Wᵀq - ē,    ē = Σ_v p_v W_v.

So ē and the negentropy, once computed, make a soft label cost what a hard one does. Kept is ē - W_g with g the target's most
likely token, and 1 is taken from q_g before the product with W: where q is right both parts are small, so half precision
rounds small numbers and not the difference of large ones. A hard label is the case ē = W_g.

Shapes: T positions, H hidden, V vocabulary, R rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafters.whole_losses import row_slices

CHUNK_ROWS = 128


@dataclass(frozen=True)
class TeacherMoments:
    """The target's prediction at each position.

    Attributes:
        greedy_T: its most likely token, int64.
        excess_TH: ē - W_g in the head's dtype; None where only hard labels are wanted.
        negentropy_T: Σ p log p, fp32 (fp64 for a fp64 head); None likewise.
    """

    greedy_T: torch.Tensor
    excess_TH: torch.Tensor | None = None
    negentropy_T: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> TeacherMoments:
        """The moments at these positions."""
        return TeacherMoments(
            self.greedy_T[positions],
            None if self.excess_TH is None else self.excess_TH[positions],
            None if self.negentropy_T is None else self.negentropy_T[positions],
        )

    def spread(self, places_T: torch.Tensor) -> TeacherMoments:
        """These moments at the True places of `places_T` [T], zeros elsewhere."""

        def scattered(tensor: torch.Tensor) -> torch.Tensor:
            whole = tensor.new_zeros(places_T.numel(), *tensor.shape[1:])
            whole[places_T] = tensor
            return whole

        return TeacherMoments(
            scattered(self.greedy_T),
            None if self.excess_TH is None else scattered(self.excess_TH),
            None if self.negentropy_T is None else scattered(self.negentropy_T),
        )

    @staticmethod
    def cat(parts: list[TeacherMoments]) -> TeacherMoments:
        """One after another; all soft or all hard."""
        rows = [p.excess_TH for p in parts if p.excess_TH is not None]
        entropies = [p.negentropy_T for p in parts if p.negentropy_T is not None]
        return TeacherMoments(
            torch.cat([p.greedy_T for p in parts]),
            torch.cat(rows) if rows else None,
            torch.cat(entropies) if entropies else None,
        )

    @property
    def nbytes(self) -> int:
        tensors = (self.greedy_T, self.excess_TH, self.negentropy_T)
        return sum(t.nbytes for t in tensors if t is not None)


@torch.no_grad()
def teacher_moments(hidden_TH: torch.Tensor, head_VH: torch.Tensor, *, soft: bool = True) -> TeacherMoments:
    """Moments of p = softmax(W h).

    Args:
        hidden_TH: the target's final hidden states (head input).
        head_VH: its head.
        soft: also form what soft labels need.
    """
    accumulate = torch.float64 if head_VH.dtype == torch.float64 else torch.float32
    parts: list[TeacherMoments] = []
    # as in the block loss: autocast would round what a wider head dtype keeps
    with torch.autocast(hidden_TH.device.type, enabled=False):
        for hidden_RH in hidden_TH.to(head_VH.dtype).split(CHUNK_ROWS):
            logits_RV = hidden_RH @ head_VH.T
            greedy_R = logits_RV.max(dim=-1).indices
            if not soft:
                parts.append(TeacherMoments(greedy_R))
                continue
            logp_RV = logits_RV.to(accumulate).log_softmax(dim=-1)
            p_RV = logp_RV.exp()
            negentropy_R = torch.linalg.vecdot(p_RV, logp_RV)
            p_RV[torch.arange(greedy_R.numel(), device=greedy_R.device), greedy_R] -= 1
            parts.append(TeacherMoments(greedy_R, p_RV.to(head_VH.dtype) @ head_VH, negentropy_R))
    return TeacherMoments.cat(parts)


def label_losses(
    hidden_RH: torch.Tensor,
    logits_RV: torch.Tensor,
    peak_R: torch.Tensor,
    head_VH: torch.Tensor,
    labels_R: torch.Tensor,
    hard_R: torch.Tensor,
    soft_R: TeacherMoments | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy with hard labels, or KL(p‖q) with soft ones, in fp32 (fp64 for a fp64 head).

    Args:
        hidden_RH: drafter hidden states in the head's dtype.
        logits_RV: their logits; overwritten by q - onehot(label), the gradient where a hard label was not dropped.
        peak_R: the largest of each row.
        head_VH: the head.
        labels_R: the hard labels; with soft ones, their most likely tokens.
        hard_R: bool, False drops a hard label.
        soft_R: moments of the soft labels, which replace the hard ones; None for hard labels.

    Returns:
        loss [R], gradient with respect to the hidden states [R, H], log q(label) [R].
    """
    accumulate = torch.float64 if head_VH.dtype == torch.float64 else torch.float32
    rows = torch.arange(labels_R.numel(), device=labels_R.device)
    label_logit_R = logits_RV[rows, labels_R]
    log_top_R = torch.empty_like(peak_R, dtype=accumulate)
    for some in row_slices(logits_RV):
        # cast first: softmax's own cast is several times slower on CPUs
        q_SV = logits_RV[some].to(accumulate).softmax(dim=-1)
        log_top_R[some] = q_SV.amax(dim=-1).log()
        q_SV[rows[: q_SV.shape[0]], labels_R[some]] -= 1
        logits_RV[some] = q_SV
    # through the top token, whose probability cannot underflow
    log_label_R = label_logit_R.to(accumulate) - peak_R.to(accumulate) + log_top_R
    grad_RH = (logits_RV @ head_VH).to(accumulate)
    if soft_R is None:
        hard = hard_R.to(accumulate)
        return -log_label_R * hard, grad_RH * hard[:, None], log_label_R
    assert soft_R.excess_TH is not None
    assert soft_R.negentropy_T is not None
    excess_RH = soft_R.excess_TH.to(accumulate)
    loss_R = soft_R.negentropy_T - log_label_R - torch.linalg.vecdot(hidden_RH.to(accumulate), excess_RH)
    return loss_R, grad_RH - excess_RH, log_label_R

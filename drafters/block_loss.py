"""The training loss over all blocks of a batch, with memory that does not grow with slots × vocabulary.

Loss and d(loss)/d(hidden) are formed together in the forward pass, a few blocks at a time: logits of one chunk exist, then
only their gradient with respect to the hidden states remains, and with respect to the head if that is trained (D3D; DFlash's is
the target's and frozen). No recompute in the backward.
Slots that do not count never reach the head. Several slots share a target position: what is needed of the teacher is
computed once per distinct position of a chunk (blocks are sorted by anchor, so chunks hardly overlap), and for `ce` and `osd`
with a frozen head may be computed once for all (`drafters.teacher`).

Shapes: N blocks, B block size, T flat tokens, H hidden, V vocabulary, R counted slots of a chunk, P distinct
positions of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drafters.blocks import BlockLayout
from drafters.objectives import LossSpec, fixed_weights, survival_weights
from drafters.packing import PackedBatch
from drafters.teacher import TeacherMoments, label_losses, teacher_moments
from drafters.whole_losses import TeacherLogits, row_slices, whole_losses

LOGITS_BYTES = 96 * 2**20
"""Default size of a chunk's logits [R, V]. Distillation holds the teacher's beside them, and a GPU a few fp32 copies.

Products with a large head need some 150 rows at once to be fast: at a third of this, a vocabulary of 150,000 in fp32 lost a third
of a CPU's speed.
"""


@dataclass(frozen=True)
class BlockTargets:
    """What the blocks should predict.

    `served_NB` the token that serving committed at each slot; `valid_NB` slots that count;
    `teacher_NB` flat index whose final hidden state predicts the slot.
    """

    served_NB: torch.Tensor
    valid_NB: torch.Tensor
    teacher_NB: torch.Tensor

    @classmethod
    def from_layout(cls, batch: PackedBatch, layout: BlockLayout) -> BlockTargets:
        """Targets of a packed batch."""
        return cls(
            served_NB=batch.input_ids_T[layout.targets_NB],
            valid_NB=layout.valid_NB,
            teacher_NB=(layout.targets_NB - 1).clamp_min(0),
        )


@dataclass(frozen=True)
class BlockLoss:
    """`value` scalar with a graph, a mean over slots; the rest detached.

    `weight` sum of the slots' weights;
    `match_NB` True where the drafter's argmax over the head it was given is the *served* token (False at slots that do
    not count);
    `labels_agree` share of counted slots whose served token is the label.
    """

    value: torch.Tensor
    weight: torch.Tensor
    match_NB: torch.Tensor
    labels_agree: float


def block_loss(
    hidden_NBH: torch.Tensor,
    head_VH: torch.Tensor,
    targets: BlockTargets,
    spec: LossSpec,
    *,
    teacher_hidden_TH: torch.Tensor | None = None,
    moments: TeacherMoments | None = None,
    teacher_head_VH: torch.Tensor | None = None,
    chunk_rows: int | None = None,
) -> BlockLoss:
    """Weighted mean of the slot losses, Σ w·ℓ / Σ w.

    Args:
        hidden_NBH: drafter hidden states.
        head_VH: head of the drafter; matmuls run in its dtype, softmax and sums in fp32 (fp64 if the head is fp64).
            Receives a gradient if it requires one.
        targets: what to predict.
        spec: the objective.
        teacher_hidden_TH: the target's final hidden states. Required by `opd`, and by `osd` without `moments` or with a
            trained head, whose gradient needs the whole distribution. For `ce`, neither of the two takes the served tokens
            as labels, which for greedy text are the target's greedy tokens.
        moments: the teacher's moments at every flat position, for `ce` and `osd`; saves the teacher's share of the head.
        teacher_head_VH: the target's head where the drafter has its own; None: they share one.
        chunk_rows: slots per chunk; default by `LOGITS_BYTES`.
    """
    whole = spec.objective == "opd" or (spec.objective == "osd" and head_VH.requires_grad)
    if spec.needs_teacher and teacher_hidden_TH is None and (moments is None or whole):
        raise ValueError(f"objective {spec.objective} needs the target's hidden states")
    block_size = hidden_NBH.shape[1]
    rows = chunk_rows or max(block_size, LOGITS_BYTES // (head_VH.element_size() * head_VH.shape[0]))
    # autocast would round the logits to half precision, and cast the whole head again for every chunk
    with torch.autocast(hidden_NBH.device.type, enabled=False):
        value, weight, match_NB, agree = _BlockLossFunction.apply(
            hidden_NBH,
            head_VH,
            targets,
            spec,
            teacher_hidden_TH,
            moments,
            head_VH if teacher_head_VH is None else teacher_head_VH,
            _even_chunks(hidden_NBH.shape[0], max(1, rows // (block_size - 1))),
        )
    return BlockLoss(value, weight, match_NB, float(agree))


def _even_chunks(blocks: int, most: int) -> int:
    """Blocks per chunk, at most `most`, such that the last chunk is hardly smaller than the others."""
    chunks = -(-blocks // most)
    return -(-blocks // chunks) if chunks else most


class _BlockLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NBH: torch.Tensor,
        head_VH: torch.Tensor,
        targets: BlockTargets,
        spec: LossSpec,
        teacher_hidden_TH: torch.Tensor | None,
        moments: TeacherMoments | None,
        teacher_head_VH: torch.Tensor,
        blocks_per_chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        accumulate = torch.float64 if head_VH.dtype == torch.float64 else torch.float32
        valid_NB = targets.valid_NB
        base_B = fixed_weights(spec, hidden_NBH.shape[1], hidden_NBH.device).to(accumulate)
        weight_sum = float((base_B * valid_NB).sum())
        grad_NBH = torch.zeros(hidden_NBH.shape, dtype=accumulate, device=hidden_NBH.device)
        grad_VH = torch.zeros_like(head_VH, dtype=accumulate) if ctx.needs_input_grad[1] else None
        match_NB = torch.zeros_like(valid_NB)
        loss_sum = hidden_NBH.new_zeros((), dtype=accumulate)
        used_weight = hidden_NBH.new_zeros((), dtype=accumulate)
        agreeing = hidden_NBH.new_zeros((), dtype=torch.long)
        whole = spec.objective == "opd" or (spec.objective == "osd" and grad_VH is not None)
        for start in range(0, valid_NB.shape[0], blocks_per_chunk):
            chunk = slice(start, start + blocks_per_chunk)
            chunk_valid = valid_NB[chunk]
            block_R, slot_R = chunk_valid.nonzero(as_tuple=True)
            if block_R.numel() == 0:
                continue
            rows_RH = hidden_NBH[chunk][block_R, slot_R].to(head_VH.dtype)
            raw_RV = rows_RH @ head_VH.T
            peak_R = raw_RV.amax(dim=-1)
            served_R = targets.served_NB[chunk][block_R, slot_R]
            match_NB[start + block_R, slot_R] = _first_of_row_maximum(raw_RV, served_R, peak_R)
            position_R = targets.teacher_NB[chunk][block_R, slot_R]
            labels_R, known_R, teacher = served_R, None, None
            if not whole and moments is not None:
                known_R = moments.at(position_R)
            elif teacher_hidden_TH is not None:
                positions_P, inverse_R = position_R.unique(return_inverse=True)
                teacher_PH = teacher_hidden_TH[positions_P].to(teacher_head_VH.dtype)
                if whole:
                    teacher = TeacherLogits.of(
                        teacher_PH, teacher_head_VH, spec.temperature if spec.objective == "opd" else 1.0
                    )
                    labels_R = teacher.greedy_P[inverse_R]
                else:
                    known_R = teacher_moments(teacher_PH, teacher_head_VH, soft=spec.needs_teacher).at(
                        inverse_R
                    )
            if known_R is not None:
                labels_R = known_R.greedy_T
            same_R = labels_R == served_R
            hard_R = _before_first_difference(same_R, block_R, slot_R, chunk_valid)
            # from here on the logits are their own gradient
            if teacher is not None:
                loss_R, log_label_R = whole_losses(raw_RV, teacher, inverse_R, hard_R, spec, weight_sum)
                grad_RH = (raw_RV @ head_VH).to(accumulate)
            else:
                soft_R = known_R if spec.objective == "osd" else None
                loss_R, grad_RH, log_label_R = label_losses(
                    rows_RH, raw_RV, peak_R, head_VH, labels_R, hard_R, soft_R
                )
            weights_R = base_B[slot_R]
            if spec.weighting == "survival":
                log_a_NB = torch.zeros_like(chunk_valid, dtype=accumulate)
                log_a_NB[block_R, slot_R] = log_label_R
                survival_NB = survival_weights(log_a_NB, chunk_valid, spec.survival_floor)
                weights_R = survival_NB[block_R, slot_R]
            loss_sum += (loss_R * weights_R).sum()
            used_weight += weights_R.sum()
            # weights scale the [R, H] product, not the [R, V] gradient: fewer bytes, same result
            grad_NBH[start + block_R, slot_R] = grad_RH * weights_R[:, None]
            if grad_VH is not None:
                kept_R = weights_R * hard_R if spec.objective == "ce" else weights_R
                # weights on the [R, H] factor, as above
                grad_VH += raw_RV.T @ (rows_RH * kept_R[:, None]).to(head_VH.dtype)
            agreeing += same_R.sum()
        normaliser = used_weight.clamp_min(torch.finfo(accumulate).tiny)
        ctx.save_for_backward(
            (grad_NBH / normaliser).to(hidden_NBH.dtype),
            None if grad_VH is None else grad_VH.div_(normaliser).to(head_VH.dtype),
        )
        agree = agreeing / valid_NB.sum().clamp_min(1)
        ctx.mark_non_differentiable(used_weight, match_NB, agree)
        return loss_sum / normaliser, used_weight, match_NB, agree

    @staticmethod
    def backward(ctx: Any, grad_value: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_NBH, grad_VH = ctx.saved_tensors
        return (
            grad_NBH * grad_value.to(grad_NBH.dtype),
            None if grad_VH is None else grad_VH * grad_value.to(grad_VH.dtype),
            *[None] * 6,
        )


def next_token_loss(
    hidden_TH: torch.Tensor,
    head_VH: torch.Tensor,
    batch: PackedBatch,
    *,
    teacher_hidden_TH: torch.Tensor | None = None,
    teacher_head_VH: torch.Tensor | None = None,
    chunk_rows: int | None = None,
) -> BlockLoss:
    """Mean loss of every response token given all tokens before it.

    A next token is a block of one draft. Without a teacher cross-entropy (D3D eq. 6), with one KL(p‖q): a drafter that began as
    the target then has nothing to unlearn, where the few hard labels of a small corpus would be learnt by heart.
    """
    flat_T = torch.arange(batch.num_tokens, device=hidden_TH.device)
    follows_T = batch.position_ids_T > 0
    predicted_R = flat_T[batch.response_mask_T & follows_T]
    targets = BlockTargets(
        served_NB=batch.input_ids_T[predicted_R][:, None].expand(-1, 2),
        valid_NB=torch.tensor([False, True], device=hidden_TH.device).expand(len(predicted_R), 2),
        teacher_NB=(predicted_R - 1)[:, None].expand(-1, 2),
    )
    rows_R2H = hidden_TH[predicted_R - 1][:, None].expand(-1, 2, -1)
    spec = LossSpec(objective="ce" if teacher_hidden_TH is None else "osd", weighting="uniform")
    return block_loss(
        rows_R2H,
        head_VH,
        targets,
        spec,
        teacher_hidden_TH=teacher_hidden_TH,
        teacher_head_VH=teacher_head_VH,
        chunk_rows=chunk_rows,
    )


def _first_of_row_maximum(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, peak_R: torch.Tensor
) -> torch.Tensor:
    """True where a row's argmax is the given token; of equal logits the first counts, as in decoding.

    An argmax costs ten times a maximum, so it is only asked of rows in which the token has the largest logit.
    """
    first_R = logits_RV.gather(1, tokens_R[:, None])[:, 0] == peak_R
    for some in row_slices(logits_RV):
        # a slice at a time: a good drafter has the token in most rows, and picking them out copies them
        at = first_R[some].nonzero()[:, 0] + some.start
        first_R[at] = logits_RV[at].max(dim=-1).indices == tokens_R[at]
    return first_R


def _before_first_difference(
    same_R: torch.Tensor, block_R: torch.Tensor, slot_R: torch.Tensor, valid_NB: torch.Tensor
) -> torch.Tensor:
    """True for slots up to and including the first whose served token differs from the target's greedy token.

    Past it the served prefix is one that a greedy draft could not have produced, so the hard label is dropped.
    """
    same_NB = torch.ones_like(valid_NB, dtype=torch.long)
    same_NB[block_R, slot_R] = same_R.long()
    reached_NB = torch.ones_like(same_NB)
    reached_NB[:, 1:] = same_NB.cumprod(dim=1)[:, :-1]
    return reached_NB.bool()[block_R, slot_R]


@torch.no_grad()
def served_matches(
    hidden_NBH: torch.Tensor, head_VH: torch.Tensor, targets: BlockTargets, chunk_rows: int | None = None
) -> torch.Tensor:
    """`BlockLoss.match_NB` over the whole head without a loss: where the drafter's argmax is the served token."""
    match_NB = torch.zeros_like(targets.valid_NB)
    block_R, slot_R = targets.valid_NB.nonzero(as_tuple=True)
    rows = chunk_rows or max(1, LOGITS_BYTES // (4 * head_VH.shape[0]))
    for start in range(0, block_R.numel(), rows):
        at = (block_R[start : start + rows], slot_R[start : start + rows])
        with torch.autocast(hidden_NBH.device.type, enabled=False):
            top_R = (hidden_NBH[at].to(head_VH.dtype) @ head_VH.T).max(dim=-1).indices
        match_NB[at] = top_R == targets.served_NB[at]
    return match_NB


def accepted_prefix(match_NB: torch.Tensor) -> torch.Tensor:
    """Length of the matching prefix over slots 1..B-1 of each block, int64 [N]."""
    return match_NB[:, 1:].long().cumprod(dim=1).sum(dim=1)


def prefix_complete(match_NB: torch.Tensor, valid_NB: torch.Tensor) -> torch.Tensor:
    """True where the accepted prefix is known in full: it ends in a mismatch, or the whole block is inside the text."""
    accepted_N = accepted_prefix(match_NB)
    return (accepted_N < valid_NB[:, 1:].sum(dim=1)) | valid_NB[:, 1:].all(dim=1)

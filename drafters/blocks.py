"""Blocks of a packed batch: token slots, positions, validity, and what each block may attend to.

Slot 0 of a block is the clean anchor, slots 1..B-1 hold the mask token, slot j predicts the token at position
anchor+j. Queries are the block's slots; keys are the context features strictly before the anchor, then the block's own
slots, visible in both directions. Nothing crosses a block or a document.

Shapes: N blocks, B block size, T flat tokens, S tokens and A anchors of one document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafters.packing import PackedBatch


@dataclass(frozen=True)
class BlockLayout:
    """Index tensors of all blocks of a batch.

    `block_ids_NB` token ids fed to the drafter; `positions_NB` true positions; `targets_NB` flat index of the
    predicted token (clamped into the batch where invalid); `valid_NB` True for slots whose prediction counts: slot ≥ 1,
    same document, and every token from the anchor up to the predicted one was produced by the target.
    """

    block_ids_NB: torch.Tensor
    positions_NB: torch.Tensor
    targets_NB: torch.Tensor
    valid_NB: torch.Tensor


def build_blocks(batch: PackedBatch, block_size: int, mask_token_id: int) -> BlockLayout:
    """Blocks at the batch's anchors.

    A block that runs over the end of its document keeps all B slots (serving always drafts full blocks, and
    bidirectional attention makes their number matter); the slots past the end are only masked from the loss.
    """
    anchors_N1 = batch.anchors_N[:, None]
    offsets_B = torch.arange(block_size, device=anchors_N1.device)
    flat_NB = anchors_N1 + offsets_B
    inside_NB = flat_NB < batch.num_tokens
    targets_NB = flat_NB.clamp_max(batch.num_tokens - 1)
    same_document_NB = batch.document_ids_T[targets_NB] == batch.document_ids_T[anchors_N1]
    produced_NB = batch.response_mask_T[targets_NB] & same_document_NB & inside_NB
    valid_NB = produced_NB.long().cumprod(dim=1).bool()
    valid_NB[:, 0] = False
    block_ids_NB = torch.full_like(flat_NB, mask_token_id)
    block_ids_NB[:, 0] = batch.input_ids_T[batch.anchors_N]
    return BlockLayout(
        block_ids_NB=block_ids_NB,
        positions_NB=batch.position_ids_T[anchors_N1] + offsets_B,
        targets_NB=targets_NB,
        valid_NB=valid_NB,
    )


GROUP_ROWS = 128
"""Block slots that attend together. The context of a group ends at its last anchor and its own keys are its blocks' alone, so
small groups leave few of the scores to be masked away; smaller ones still do not fill the kernels."""


@dataclass(frozen=True)
class AttentionGroup:
    """Neighbouring blocks of one document, which attend to that document's features only.

    `blocks` and `context` are slices into the N blocks and the T flat tokens. `mask` is bool
    [A·B, S + A·B], True = visible, or None when every key is visible (decoding one block).
    """

    blocks: slice
    context: slice
    mask: torch.Tensor | None


def attention_groups(
    batch: PackedBatch, block_size: int, group_rows: int = GROUP_ROWS
) -> list[AttentionGroup]:
    """The blocks of each document in groups of at most about `group_rows` slots, in order.

    A group of A blocks costs A·B·(S + A·B) scores, with S the tokens before its last anchor, since none of its blocks may see
    further.
    """
    groups: list[AttentionGroup] = []
    owners_N = batch.document_ids_T[batch.anchors_N]
    counts = torch.bincount(owners_N, minlength=len(batch.document_names)).tolist()
    first_token = 0
    first_block = 0
    for length, count in zip(batch.document_lengths(), counts, strict=True):
        groups_here = -(-count * block_size // group_rows)
        for number in range(groups_here):
            blocks = slice(
                first_block + count * number // groups_here, first_block + count * (number + 1) // groups_here
            )
            if blocks.start == blocks.stop:  # a single block longer than a group
                continue
            anchors_A = batch.anchors_N[blocks] - first_token
            context_length = int(anchors_A[-1])
            groups.append(
                AttentionGroup(
                    blocks=blocks,
                    context=slice(first_token, first_token + context_length),
                    mask=block_mask(anchors_A, context_length, block_size),
                )
            )
        first_token += length
        first_block += count
    return groups


def block_mask(anchors_A: torch.Tensor, context_length: int, block_size: int) -> torch.Tensor:
    """Visibility of one document's keys to its blocks.

    Args:
        anchors_A: anchor positions inside the document, int64.
        context_length: number of context keys S.
        block_size: B.

    Returns:
        bool [A·B, S + A·B]: context strictly before the anchor, and the block itself in both directions.
    """
    device = anchors_A.device
    anchor_of_query = anchors_A.repeat_interleave(block_size)
    block_of_query = torch.arange(anchors_A.numel(), device=device).repeat_interleave(block_size)
    context = torch.arange(context_length, device=device)[None, :] < anchor_of_query[:, None]
    own = block_of_query[:, None] == block_of_query[None, :]
    return torch.cat([context, own], dim=1)

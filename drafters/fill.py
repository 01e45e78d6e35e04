"""Filling all blocks of a packed batch in one drafter pass: the step that training, replay and label making share.

Shapes: N blocks, B block size, T flat tokens, H hidden, C feature width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafters.blocks import BlockLayout, attention_groups, build_blocks
from drafters.dflash import DFlashDrafter
from drafters.packing import PackedBatch
from drafters.target import Target


@dataclass(frozen=True)
class FilledBlocks:
    """`hidden_NBH` drafter output, `embeddings_NBH` drafter input, and the blocks' `layout`."""

    hidden_NBH: torch.Tensor
    embeddings_NBH: torch.Tensor
    layout: BlockLayout


def fill_blocks(
    drafter: DFlashDrafter, target: Target, batch: PackedBatch, features_TC: torch.Tensor
) -> FilledBlocks:
    """Draft at every anchor of `batch`, given the target's features of its tokens."""
    layout = build_blocks(batch, drafter.block_size, drafter.spec.mask_token_id)
    embeddings_NBH = target.embed(layout.block_ids_NB)
    hidden_NBH = drafter(
        embeddings_NBH,
        layout.positions_NB,
        drafter.context_key_values(features_TC, batch.position_ids_T),
        attention_groups(batch, drafter.block_size),
    )
    return FilledBlocks(hidden_NBH, embeddings_NBH, layout)

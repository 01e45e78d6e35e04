"""Filling all blocks of a packed batch in one drafter pass: the step that training, replay and label making share.

Also the one place that knows what the families of drafters need: DFlash the target's features and head, D3D neither.

Shapes: N blocks, B block size, T flat tokens, H hidden, C feature width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from drafters.blocks import BlockLayout, attention_groups, build_blocks
from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.packing import PackedBatch
from drafters.target import Target

Drafter = DFlashDrafter | D3DDrafter


@dataclass(frozen=True)
class FilledBlocks:
    """`hidden_NBH` drafter output, `embeddings_NBH` drafter input, and the blocks' `layout`."""

    hidden_NBH: torch.Tensor
    embeddings_NBH: torch.Tensor
    layout: BlockLayout


def fill_blocks(
    drafter: Drafter, target: Target, batch: PackedBatch, features_TC: torch.Tensor | None
) -> FilledBlocks:
    """Draft at every anchor of `batch`, given what the drafter reads of the target (`features_of`)."""
    if isinstance(drafter, D3DDrafter):
        output = drafter(batch)
        return FilledBlocks(output.hidden_NBH, drafter.embed(output.layout.block_ids_NB), output.layout)
    assert features_TC is not None
    layout = build_blocks(batch, drafter.block_size, drafter.spec.mask_token_id)
    embeddings_NBH = target.embed(layout.block_ids_NB)
    hidden_NBH = drafter(
        embeddings_NBH,
        layout.positions_NB,
        drafter.context_key_values(features_TC, batch.position_ids_T),
        attention_groups(batch, drafter.block_size),
    )
    return FilledBlocks(hidden_NBH, embeddings_NBH, layout)


def block_filler(
    drafter: Drafter, target: Target, documents: PackedBatch, features_TC: torch.Tensor | None = None
) -> Callable[[PackedBatch], torch.Tensor]:
    """Fills blocks at any anchors of these documents: a batch of them with other anchors → hidden_NBH.

    What does not depend on the anchors is computed here, once, unless it is handed in (`features_of`).
    """
    features = features_of(drafter, target, documents) if features_TC is None else features_TC
    return lambda batch: fill_blocks(drafter, target, batch, features).hidden_NBH


def features_of(drafter: Drafter, target: Target, documents: PackedBatch) -> torch.Tensor | None:
    """What a drafter of this family reads of the target, [T, C]; None for nothing."""
    if isinstance(drafter, D3DDrafter):
        return None
    return target.forward_packed(documents.input_ids_T, documents.position_ids_T).features_TC


def draft_head(drafter: Drafter, target: Target) -> torch.Tensor:
    """The head [V, H] that turns the drafter's hidden states into drafts."""
    return drafter.head_VH if isinstance(drafter, D3DDrafter) else target.head_VH


def layer_conflict(drafter: Drafter, target: Target) -> str | None:
    """What is wrong with the layers that the drafter reads of this target; None if nothing, or if it reads none."""
    if isinstance(drafter, D3DDrafter) or drafter.spec.target_layer_ids == target.layer_ids:
        return None
    return f"reads target layers {drafter.spec.target_layer_ids}, the target captures {target.layer_ids}"

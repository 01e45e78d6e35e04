"""Measuring which of a drafter's layers matters least (D3D, progressive layer pruning).

A layer's importance is what its removal costs in replay τ, the measure that serving pays by. All removals are measured in one
sweep: before the removed layer (or the one whose MLP repairs the removal) everything is as it was, so each removal starts from
the hidden states that the whole drafter had there. For L layers that is L + L·(L-1)/2 layer passes, about half of what L replays
take; with only some of the layers as candidates, fewer.

Shapes: N blocks, B block size, T flat tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drafters.blocks import attention_groups, build_blocks
from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.fill import Drafter, draft_head
from drafters.layers import layers_of, mlp_output
from drafters.packing import Document, PackedBatch
from drafters.repair import Repair
from drafters.replay import Fill, ReplayResult, draft_variants, walk_rounds
from drafters.target import Target


def replay_without_each_layer(
    drafter: Drafter,
    target: Target,
    documents: Sequence[Document],
    candidates: Sequence[int],
    repairs: Mapping[int, Repair] | None = None,
) -> list[list[ReplayResult]]:
    """Replay with one layer removed, for each of the candidates in turn: results by candidate, then document.

    `repairs` are applied to the removals that they belong to.
    """
    removals = [_Removed(drafter, index, (repairs or {}).get(index)) for index in candidates]

    def prepare(whole: PackedBatch) -> Fill:
        if isinstance(drafter, D3DDrafter):
            return lambda batch: _d3d_without_each(drafter, batch, removals)
        features_TC = target.forward_packed(whole.input_ids_T, whole.position_ids_T).features_TC
        context = drafter.context_key_values(features_TC, whole.position_ids_T)
        return lambda batch: _dflash_without_each(drafter, target, batch, context, removals)

    results: list[list[ReplayResult]] = [[] for _ in candidates]
    head_VH = draft_head(drafter, target)
    for document, anchors, variants in draft_variants(documents, head_VH, drafter.block_size, prepare):
        for of_layer, drafts in zip(results, variants, strict=True):
            of_layer.append(walk_rounds(document, anchors, drafts, drafter.block_size))
    return results


class _Removed:
    """A drafter for a while without one layer, and without those before that the removal leaves as they are.

    `first` is the layer whose input is its input, `kept` are the layers that it runs.
    """

    def __init__(self, drafter: Drafter, index: int, repair: Repair | None) -> None:
        self.drafter, self.repair = drafter, repair
        later = range(index + 1, len(layers_of(drafter)))
        self.first = index if repair is None else index - 1
        self.kept = [*later] if repair is None else [index - 1, *later]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        holder = self.drafter.lm.model if isinstance(self.drafter, D3DDrafter) else self.drafter
        layers = layers_of(self.drafter)
        holder.layers = nn.ModuleList(layers[index] for index in self.kept)
        projection = mlp_output(layers[self.first])
        weight = projection.weight
        if self.repair is not None:
            projection.weight = nn.Parameter(self.repair.weight_HI, requires_grad=False)
        try:
            yield
        finally:
            projection.weight = weight
            holder.layers = layers


def _d3d_without_each(
    drafter: D3DDrafter, batch: PackedBatch, removals: Sequence[_Removed]
) -> Iterator[torch.Tensor]:
    with _inputs_of_layers(layers_of(drafter)) as inputs:
        drafter(batch)
    for removed in removals:
        with removed.in_place():
            yield drafter(batch, embeddings_LH=inputs[removed.first][0]).hidden_NBH


def _dflash_without_each(
    drafter: DFlashDrafter,
    target: Target,
    batch: PackedBatch,
    context: Sequence[Any],
    removals: Sequence[_Removed],
) -> Iterator[torch.Tensor]:
    layout = build_blocks(batch, drafter.block_size, drafter.spec.mask_token_id)
    groups = attention_groups(batch, drafter.block_size)
    embeddings_NBH = target.embed(layout.block_ids_NB)
    with _inputs_of_layers(layers_of(drafter)) as inputs:
        drafter(embeddings_NBH, layout.positions_NB, [*context], groups)
    for removed in removals:
        with removed.in_place():
            yield drafter(
                inputs[removed.first].view(embeddings_NBH.shape),
                layout.positions_NB,
                [context[index] for index in removed.kept],
                groups,
            )


@contextmanager
def _inputs_of_layers(layers: nn.ModuleList) -> Iterator[list[torch.Tensor]]:
    """The hidden states that go into each layer while the body runs."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0])) for layer in layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()

"""Removing a drafter's layers, and measuring which one matters least (D3D, progressive layer pruning).

A layer's importance is what its removal costs in replay τ, the measure that serving pays by. All removals are measured in one
sweep: before the removed layer everything is as it was, so each removal starts from the hidden states that the whole drafter
had there. For L layers that is L + L·(L-1)/2 layer passes, about half of what L replays take; with only some of the layers as
candidates, fewer.

Shapes: N blocks, B block size, T flat tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from drafters.blocks import attention_groups, build_blocks
from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.errors import UserError
from drafters.fill import Drafter, draft_head
from drafters.packing import Document, PackedBatch
from drafters.replay import Fill, ReplayResult, draft_variants, walk_rounds
from drafters.target import Target


def layers_of(drafter: Drafter) -> nn.ModuleList:
    """The layers that pruning may remove."""
    layers = drafter.lm.model.layers if isinstance(drafter, D3DDrafter) else drafter.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def remove_layer(drafter: Drafter, index: int) -> None:
    """Remove a layer for good; the configuration follows.

    Raises:
        UserError: when it is the last one.
    """
    layers, config = layers_of(drafter), drafter.config
    if len(layers) == 1:
        raise UserError("prune: the drafter has one layer left, and that one cannot be removed")
    del layers[index]
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [kind for i, kind in enumerate(config.layer_types) if i != index]
    for number, layer in enumerate(layers):
        # HF's layers know their place in the cache
        if hasattr(layer.self_attn, "layer_idx"):
            layer.self_attn.layer_idx = number


def replay_without_each_layer(
    drafter: Drafter, target: Target, documents: Sequence[Document], candidates: Sequence[int]
) -> list[list[ReplayResult]]:
    """Replay with one layer removed, for each of the candidates in turn: results by candidate, then document."""

    def prepare(whole: PackedBatch) -> Fill:
        if isinstance(drafter, D3DDrafter):
            return lambda batch: _d3d_without_each(drafter, batch, candidates)
        features_TC = target.forward_packed(whole.input_ids_T, whole.position_ids_T).features_TC
        context = drafter.context_key_values(features_TC, whole.position_ids_T)
        return lambda batch: _dflash_without_each(drafter, target, batch, context, candidates)

    results: list[list[ReplayResult]] = [[] for _ in candidates]
    head_VH = draft_head(drafter, target)
    for document, anchors, variants in draft_variants(documents, head_VH, drafter.block_size, prepare):
        for of_layer, drafts in zip(results, variants, strict=True):
            of_layer.append(walk_rounds(document, anchors, drafts, drafter.block_size))
    return results


def _d3d_without_each(
    drafter: D3DDrafter, batch: PackedBatch, candidates: Sequence[int]
) -> Iterator[torch.Tensor]:
    with _inputs_of_layers(layers_of(drafter)) as inputs:
        drafter(batch)
    for index in candidates:
        with _only(drafter, index + 1):
            yield drafter(batch, embeddings_LH=inputs[index][0]).hidden_NBH


def _dflash_without_each(
    drafter: DFlashDrafter,
    target: Target,
    batch: PackedBatch,
    context: list[Any],
    candidates: Sequence[int],
) -> Iterator[torch.Tensor]:
    layout = build_blocks(batch, drafter.block_size, drafter.spec.mask_token_id)
    groups = attention_groups(batch, drafter.block_size)
    embeddings_NBH = target.embed(layout.block_ids_NB)
    with _inputs_of_layers(layers_of(drafter)) as inputs:
        drafter(embeddings_NBH, layout.positions_NB, context, groups)
    for index in candidates:
        with _only(drafter, index + 1):
            yield drafter(
                inputs[index].view(embeddings_NBH.shape), layout.positions_NB, context[index + 1 :], groups
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


@contextmanager
def _only(drafter: Drafter, first: int) -> Iterator[None]:
    """The drafter without the layers before `first`."""
    holder = drafter.lm.model if isinstance(drafter, D3DDrafter) else drafter
    layers = layers_of(drafter)
    holder.layers = layers[first:]
    try:
        yield
    finally:
        holder.layers = layers

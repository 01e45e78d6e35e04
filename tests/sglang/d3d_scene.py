"""Tiny targets with D3D drafters that have memorised part of their texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from drafters.checkpoint import save_drafter
from drafters.d3d import D3DDrafter
from drafters.d3d_loss import d3d_loss
from drafters.objectives import LossSpec
from drafters.packing import Document, pack_documents
from drafters.target import Target
from tests.serving_bridge.tiny_serving import (
    BLOCK_SIZE,
    VOCAB,
    Scene,
    greedy,
    prompts,
    tiny_target,
    to_document,
)


def own_copy(target: Target) -> D3DDrafter:
    """A drafter that begins with the target's weights, its rows shifted as a causal LM's."""
    lm = AutoModelForCausalLM.from_config(d3d_config(target, shift=True)).float()
    lm.load_state_dict(target.model.state_dict())
    return D3DDrafter(lm)


def stranger(target: Target) -> D3DDrafter:
    """A drafter of a shape of its own, its head tied to its embedding."""
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 12}
    config = d3d_config(target, shift=False, tie_word_embeddings=True, initializer_range=0.1, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return D3DDrafter(AutoModelForCausalLM.from_config(config).float())


def d3d_config(target: Target, *, shift: bool, **changes: Any) -> Any:
    spec = {"block_size": BLOCK_SIZE, "mask_token_id": VOCAB - 1, "shift": shift}
    fields = {"d3d_config": spec, "layer_types": None}
    return type(target.config).from_dict(target.config.to_dict() | fields | changes)


def memorise(drafter: D3DDrafter, documents: Sequence[Document], steps: int) -> None:
    """Train until rounds really accept drafts."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    for _ in range(steps):
        loss = d3d_loss(drafter(batch), drafter.head_VH, batch, LossSpec()).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make_d3d_scene(directory: Path, kind: str, context: int) -> Scene:
    """Of `qwen3` the drafters begin as the target, of `llama` they are strangers to it."""
    target = tiny_target(kind, context=context)
    texts = prompts(5)
    outputs = [greedy(target, prompt) for prompt in texts]
    documents = [to_document(p, o, f"r{i}") for i, (p, o) in enumerate(zip(texts, outputs, strict=True))]
    places = []
    # both as sure of what they learnt: a drafter that hardly learnt has many tokens that rounding decides between
    for name, learnt in (("v1", documents[:4]), ("v2", documents[1:])):
        drafter = own_copy(target) if kind == "qwen3" else stranger(target)
        memorise(drafter, learnt, 60)
        save_drafter(directory / name, drafter, identity=target.identity, drafter_version=name)
        places.append(directory / name)
    return Scene(target, texts, outputs, documents, places[0], places[1])


@torch.no_grad()
def own_logits(drafter: D3DDrafter, context: Sequence[int]) -> torch.Tensor:
    """Of the block behind a text, drafted by ourselves: [B-1, V]."""
    (hidden_BH,) = drafter.draft([torch.tensor(context)], [0], [DynamicCache(config=drafter.config)])
    logits: torch.Tensor = hidden_BH[1:] @ drafter.head_VH.T
    return logits.float()

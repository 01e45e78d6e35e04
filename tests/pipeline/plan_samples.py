"""Tiny models and batches whose sizes a plan is compared with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from drafters.blocks import attention_groups, build_blocks
from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.dflash_config import drafter_config
from drafters.packing import Document, PackedBatch, pack_documents
from pipeline.plan.architecture import Architecture, from_hf
from pipeline.plan.step import Step

MASK = 3
VOCAB = 260


def step(family: Any = "dflash", **changes: Any) -> Step:
    """Two documents of 40 tokens with six blocks of four slots each."""
    plain = Step(
        family=family,
        documents=2,
        document_tokens=40,
        response_tokens=24,
        anchors=6,
        block_size=4,
        accumulate=1,
        objective="ce",
        teacher=False,
        next_token=family == "d3d",
        loss_vocabulary=VOCAB,
        target_bytes=4,
        mixed=False,
    )
    return replace(plain, **changes)


def batch(step: Step) -> PackedBatch:
    """What `step` describes, blocks side by side but for the last, whose anchor is at its latest, as a plan takes it to be."""
    length, response = step.document_tokens, step.response_tokens
    mask = [i >= length - response for i in range(length)]
    documents = [Document(list(range(4, 4 + length)), mask, str(i)) for i in range(step.documents)]
    packed = pack_documents(documents, anchors_per_document=step.anchors)
    first = length - response
    places = [first + i * step.block_size for i in range(step.anchors - 1)] + [length - 2]
    anchors = [d * length + place for d in range(step.documents) for place in places]
    return replace(packed, anchors_N=torch.tensor(anchors))


def lm_config(kind: str, **changes: Any) -> Any:
    """Hugging Face config; hidden, query and key widths all differ."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 88,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    return {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**(sizes | changes))


def architecture(config: Any) -> Architecture:
    """The sizes that a plan reads of a config."""
    return from_hf(config.to_dict(), "target.model: test")


def dflash(target: Any, *, layers: int, context_layers: int, block_size: int = 4) -> DFlashDrafter:
    """A DFlash drafter for this target."""
    ids = list(range(context_layers))
    config = drafter_config(
        target, num_layers=layers, block_size=block_size, mask_token_id=MASK, target_layer_ids=ids
    )
    return DFlashDrafter(config)


def run_dflash(drafter: DFlashDrafter, batch: PackedBatch) -> torch.Tensor:
    """The drafter's forward over random features and embeddings."""
    hidden, block = drafter.config.hidden_size, drafter.block_size
    features = torch.randn(batch.num_tokens, drafter.fc.in_features).bfloat16()
    return drafter(
        torch.randn(batch.num_blocks, block, hidden),
        build_blocks(batch, block, MASK).positions_NB,
        drafter.context_key_values(features, batch.position_ids_T),
        attention_groups(batch, block),
    )


def d3d(config: Any, block_size: int = 4) -> D3DDrafter:
    """A D3D drafter of a causal LM."""
    config.d3d_config = {"block_size": block_size, "mask_token_id": MASK, "shift": True}
    # fp32 even where a config has served another model already
    return D3DDrafter(AutoModelForCausalLM.from_config(config, dtype=torch.float32))

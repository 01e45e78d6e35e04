"""A small target, drafters that have memorised part of its texts, and a policy that can hold the engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from drafters.block_loss import BlockTargets, block_loss
from drafters.blocks import build_blocks
from drafters.checkpoint import LoadedDrafter, save_drafter
from drafters.dflash import DFlashDrafter
from drafters.dflash_config import drafter_config
from drafters.fill import fill_blocks
from drafters.identity import TargetIdentity
from drafters.initialise import initialise
from drafters.objectives import LossSpec
from drafters.packing import Document, pack_documents
from drafters.policies import FixedPolicy, Load
from drafters.target import Target

VOCAB = 64
CONTEXT = 128
BLOCK_SIZE = 4
NEW_TOKENS = 16
PATIENCE = 30.0


@cache
def tiny_target(
    kind: str = "llama", layer_ids: tuple[int, ...] = (0, 1, 3), context: int = CONTEXT
) -> Target:
    """A random target whose greedy texts wander over the vocabulary."""
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float()
    return Target(model, TargetIdentity(f"tiny-{kind}", "r0", "0123456789abcdef"), list(layer_ids))


def tiny_drafter(
    target: Target, *, seed: int, block_size: int = BLOCK_SIZE, layers: int = 1
) -> DFlashDrafter:
    """A random drafter for the target."""
    drafter = DFlashDrafter(
        drafter_config(
            target.config,
            num_layers=layers,
            block_size=block_size,
            mask_token_id=VOCAB - 1,
            target_layer_ids=target.layer_ids,
        )
    )
    initialise(drafter, target, "random", seed=seed)
    return drafter


def greedy(
    target: Target, prompt: Sequence[int], new_tokens: int = NEW_TOKENS, eos: int | None = None
) -> list[int]:
    """HF's own greedy output, the reference."""
    ids = torch.tensor([list(prompt)])
    output: Any = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def prompts(count: int, length: int = 6) -> list[list[int]]:
    """Different random prompts."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, VOCAB - 1, (count, length), generator=generator).tolist()


def to_document(prompt: Sequence[int], output: Sequence[int], name: str, **fields: Any) -> Document:
    """A single-turn document."""
    mask = [False] * len(prompt) + [True] * len(output)
    return Document([*prompt, *output], mask, name, **fields)


def memorise(
    target: Target, drafter: DFlashDrafter, documents: Sequence[Document], steps: int
) -> DFlashDrafter:
    """Train until rounds really accept drafts."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    output = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    targets = BlockTargets.from_layout(
        batch, build_blocks(batch, drafter.block_size, drafter.spec.mask_token_id)
    )
    for _ in range(steps):
        hidden_NBH = fill_blocks(drafter, target, batch, output.features_TC).hidden_NBH
        loss = block_loss(hidden_NBH, target.head_VH, targets, LossSpec()).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


@dataclass(frozen=True)
class Scene:
    """A target with prompts, its greedy outputs, and two serving checkpoints: `first` drafts better than `second`."""

    target: Target
    prompts: list[list[int]]
    outputs: list[list[int]]
    documents: list[Document]
    first: Path
    second: Path


def make_scene(directory: Path, kind: str, context: int = CONTEXT) -> Scene:
    """Checkpoints `v1` and `v2` below `directory`."""
    target = tiny_target(kind, context=context)
    texts = prompts(5)
    outputs = [greedy(target, prompt) for prompt in texts]
    documents = [to_document(p, o, f"r{i}") for i, (p, o) in enumerate(zip(texts, outputs, strict=True))]
    places = []
    for name, seed, steps in (("v1", 1, 20), ("v2", 2, 8)):
        drafter = memorise(target, tiny_drafter(target, seed=seed), documents[:4], steps)
        place = directory / name
        save_drafter(place, drafter, identity=target.identity, drafter_version=name)
        places.append(place)
    return Scene(target, texts, outputs, documents, places[0], places[1])


@dataclass
class Gate:
    """Holds the engine's thread inside a round: it stops before round number `stop_before` (counted from 0)."""

    stop_before: int

    def __post_init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self.blocks: list[int] = []
        """Requests in each round so far."""

    def policy(self, loaded: LoadedDrafter) -> GatedPolicy:
        """A policy factory for the engine."""
        return GatedPolicy(self)


class GatedPolicy(FixedPolicy):
    """Whole blocks, asked through a gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        object.__setattr__(self, "gate", gate)

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        gate: Gate = self.gate  # type: ignore[attr-defined]
        if len(gate.blocks) == gate.stop_before:
            gate.reached.set()
            assert gate.open.wait(PATIENCE)
        gate.blocks.append(hidden_NBH.shape[0])
        return super().verify_len(hidden_NBH, embeddings_NBH, load)

"""Tiny random targets, drafters and greedy texts shared by the tests of the core.

Weights are drawn with a large standard deviation so that greedy texts wander over the vocabulary instead of repeating
one token, and `trained` drafters have memorised a few texts so that rounds really accept drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from drafters.batched_attention import plain_attention
from drafters.block_loss import BlockTargets, block_loss
from drafters.blocks import build_blocks
from drafters.d3d import D3DDrafter
from drafters.d3d_loss import d3d_loss
from drafters.dflash import DFlashDrafter
from drafters.dflash_config import drafter_config
from drafters.fill import fill_blocks
from drafters.identity import TargetIdentity
from drafters.initialise import initialise
from drafters.objectives import LossSpec
from drafters.packing import Document, pack_documents
from drafters.replay import replay
from drafters.target import Target

VOCAB = 64
MASK_ID = 63
PROMPT_LENGTH = 6

MakeTarget = Callable[..., Target]
MakeDrafter = Callable[..., DFlashDrafter]


@cache
def _model(kind: str, dtype: torch.dtype, vocab: int) -> Any:
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    config = config_class(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def _target(
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    *,
    vocab: int = VOCAB,
    layer_ids: Sequence[int] = (0, 1, 3),
) -> Target:
    return Target(
        _model(kind, dtype, vocab), TargetIdentity(f"tiny-{kind}", "r0", "0123456789abcdef"), list(layer_ids)
    )


def _drafter(
    target: Target,
    *,
    block_size: int = 5,
    num_layers: int = 2,
    seed: int = 0,
    mask_token_id: int | None = None,
    spread: float = 0.3,
) -> DFlashDrafter:
    """A random drafter whose drafts vary with the context (`spread` is the standard deviation of its matrices)."""
    vocab = target.config.vocab_size
    config = drafter_config(
        target.config,
        num_layers=num_layers,
        block_size=block_size,
        mask_token_id=vocab - 1 if mask_token_id is None else mask_token_id,
        target_layer_ids=target.layer_ids,
    )
    drafter = DFlashDrafter(config)
    initialise(drafter, target, "random", seed=seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * spread if parameter.dim() > 1 else 1 + 0.2 * noise)
    return drafter.to(target.dtype).eval()


def _prompt(seed: int, length: int = PROMPT_LENGTH, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab - 1, (length,), generator=generator).tolist()


def _generate(
    target: Target, prompt: list[int], max_new_tokens: int, eos_ids: Sequence[int] = ()
) -> list[int]:
    """Greedy output of HF itself, the reference for losslessness."""
    ids = torch.tensor([prompt])
    with plain_attention(target.model):
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def _document(prompt: list[int], response: list[int], name: str = "d", **fields: Any) -> Document:
    mask = [False] * len(prompt) + [True] * len(response)
    return Document(prompt + response, mask, name, **fields)


@dataclass(frozen=True)
class Trained:
    """A drafter that has memorised greedy `texts` of `prompts`, up to some mistakes."""

    target: Target
    drafter: DFlashDrafter
    prompts: list[list[int]]
    texts: list[list[int]]
    documents: list[Document]


@cache
def _trained(kind: str) -> Trained:
    target = _target(kind)
    prompts = [_prompt(seed) for seed in range(6)]
    texts = [_generate(target, prompt, 40) for prompt in prompts]
    documents = [_document(p, t, f"doc{i}") for i, (p, t) in enumerate(zip(prompts, texts, strict=True))]
    drafter = _drafter(target, spread=0.1, seed=3)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    batch = pack_documents(documents[:5], anchors_per_document=0, anchor_source="all")
    output = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    layout = build_blocks(batch, drafter.block_size, drafter.spec.mask_token_id)
    targets = BlockTargets.from_layout(batch, layout)
    for _ in range(30):
        hidden = fill_blocks(drafter, target, batch, output.features_TC).hidden_NBH
        loss = block_loss(hidden, target.head_VH, targets, LossSpec()).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Trained(target, drafter.requires_grad_(False).eval(), prompts, texts, documents)


@dataclass(frozen=True)
class Learnt:
    """A target, and a D3D drafter of its own weights that has learnt some of the target's texts, up to some mistakes."""

    target: Target
    drafter: D3DDrafter
    documents: list[Document]


@pytest.fixture(scope="session")
def learnt() -> Learnt:
    trained = _trained("llama")
    config = copy.deepcopy(trained.target.config)
    config.d3d_config = {"block_size": 5, "mask_token_id": MASK_ID, "shift": True}
    lm = AutoModelForCausalLM.from_config(config)
    lm.load_state_dict(trained.target.model.state_dict())
    drafter = D3DDrafter(lm.float())
    batch = pack_documents(trained.documents[:5], anchors_per_document=0, anchor_source="all")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(40):
        loss = d3d_loss(drafter(batch), drafter.head_VH, batch, LossSpec()).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Learnt(trained.target, drafter.requires_grad_(False).eval(), trained.documents)


@pytest.fixture(scope="session")
def make_target() -> MakeTarget:
    return _target


@pytest.fixture(scope="session")
def make_drafter() -> MakeDrafter:
    return _drafter


@pytest.fixture(scope="session")
def make_prompt() -> Callable[..., list[int]]:
    return _prompt


@pytest.fixture(scope="session")
def make_document() -> Callable[..., Document]:
    return _document


@pytest.fixture(scope="session")
def generate() -> Callable[..., list[int]]:
    return _generate


@pytest.fixture(scope="session")
def make_trained() -> Callable[[str], Trained]:
    return _trained


def _reference_slot_loss(
    z_V: torch.Tensor,
    teacher_V: torch.Tensor,
    label: int,
    hard: bool,
    spec: LossSpec,
    weight_sum: float,
) -> torch.Tensor:
    """The loss of one slot entry by entry, for autograd in float64."""
    vocab = z_V.numel()
    ce = -torch.log_softmax(z_V, dim=0)[label] if hard else z_V.sum() * 0
    if spec.objective == "ce":
        return ce
    T = 1.0 if spec.objective == "osd" else spec.temperature
    q, p = torch.softmax(z_V / T, dim=0), torch.softmax(teacher_V / T, dim=0)
    if spec.objective == "osd":
        return torch.stack([p[y] * (p[y].log() - q[y].log()) for y in range(vocab)]).sum()
    delta = z_V.new_tensor(spec.delta)
    terms = [q[y] * (q[y].log() - p[y].log()) for y in range(vocab)]
    if spec.clip == "entry":
        terms = [torch.minimum(term, delta) for term in terms]
    if spec.clip == "bounded":
        gaps = [term - q[y] + p[y] for y, term in enumerate(terms)]
        terms = [torch.minimum(g, delta) if q[y] > p[y] else g for y, g in enumerate(gaps)]
    kl = torch.stack(terms).sum()
    if spec.clip == "position":
        kl = torch.minimum(kl, delta)
    if spec.clip == "position_normalised":
        kl = torch.minimum(kl / weight_sum, delta) * weight_sum
    return spec.alpha * ce + (1 - spec.alpha) * T**2 * kl


@pytest.fixture(scope="session")
def reference_slot_loss() -> Callable[..., torch.Tensor]:
    return _reference_slot_loss


@cache
def _eos_case(kind: str) -> tuple[int, int]:
    """(text index, token) such that declaring the token EOS ends that text on an accepted draft inside a block."""
    trained = _trained(kind)
    for i, result in enumerate(replay(trained.drafter, trained.target, trained.documents)):
        for start, accepted in zip(result.round_starts[1:], result.accepted_per_round[1:], strict=True):
            text, slot1 = trained.texts[i], start + 1 - PROMPT_LENGTH
            if accepted >= 2 and text.index(text[slot1]) == slot1:
                return i, text[slot1]
    raise AssertionError("no text has a suitable round")


@pytest.fixture(scope="session")
def eos_case() -> Callable[[str], tuple[int, int]]:
    return _eos_case


@pytest.fixture(params=["llama", "qwen3"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def trained(kind: str) -> Trained:
    return _trained(kind)

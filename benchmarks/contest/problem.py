"""One training problem, written once and read by every side: text, target states, head, initial weights, anchors.

Shapes: T tokens of the document, N blocks, B block size, H hidden, C feature width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DECAY = 7.0
"""γ_w of the slot weights exp(-(j-1)/γ_w)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a problem. `context_layers` hidden states of the target make a feature; `prompt` tokens have no loss."""

    name: str
    hidden: int
    vocab: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int = 4
    head_dim: int = 64
    context_layers: int = 5
    block: int = 8
    length: int = 384
    prompt: int = 64
    anchors: int = 48

    @property
    def counted(self) -> int:
        """Slots with a loss."""
        return self.anchors * (self.block - 1)

    @property
    def mask_token_id(self) -> int:
        return self.vocab - 1

    def layer_ids(self) -> list[int]:
        """What the drafter is told it reads."""
        return list(range(1, 1 + 2 * self.context_layers, 2))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("smollm2", hidden=576, vocab=49_152, intermediate=1536, heads=9, kv_heads=3),
        Shape("wide", 512, 151_936, 1536, heads=8, kv_heads=2, block=16, anchors=32),
        # for the tests of this benchmark itself
        Shape(
            "tiny", 64, 512, 128, heads=4, kv_heads=2, layers=2, head_dim=16, length=96, prompt=16, anchors=8
        ),
    )
}


@dataclass(frozen=True)
class Problem:
    """The tensors of a problem. The text is the target's greedy text, so that data tokens, which SpecForge learns, and
    the target's argmax, which speculators learns, are the same labels."""

    shape: Shape
    ids_T: torch.Tensor
    features_TC: torch.Tensor
    hidden_TH: torch.Tensor
    head_VH: torch.Tensor
    anchors_N: torch.Tensor
    drafter: dict[str, torch.Tensor]

    def response_mask_T(self) -> torch.Tensor:
        """True where a token counts."""
        return torch.arange(self.shape.length) >= self.shape.prompt


def drafter_config(shape: Shape) -> Any:
    """The drafter's `Qwen3Config`, with the fields that SpecForge and we read."""
    from transformers import Qwen3Config

    config: Any = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        layer_types=["full_attention"] * shape.layers,
        tie_word_embeddings=False,
    )
    config.block_size = shape.block
    config.num_target_layers = 2 * shape.context_layers + 4
    config.dflash_config = {"mask_token_id": shape.mask_token_id, "target_layer_ids": shape.layer_ids()}
    return config


def write_problem(shape: Shape, path: Path) -> None:
    """Make a problem. Needs the project's own packages; the peers' environment only reads."""
    from drafters.dflash import DFlashDrafter

    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    head_VH = (torch.randn(shape.vocab, shape.hidden, generator=generator) * 0.05).bfloat16().float()
    ids_T = torch.randint(0, shape.mask_token_id, (shape.length,), generator=generator)
    # half noise, half the next token's own direction: the target is sure of it in either number format
    toward_TH = torch.nn.functional.normalize(head_VH[ids_T.roll(-1)], dim=-1) * shape.hidden**0.5
    hidden_TH = torch.randn(shape.length, shape.hidden, generator=generator) + toward_TH
    # of unit size, so that speculators' norm before the head changes nothing
    hidden_TH = hidden_TH / hidden_TH.square().mean(dim=-1, keepdim=True).sqrt()
    assert torch.equal((hidden_TH[:-1] @ head_VH.T).argmax(dim=-1), ids_T[1:])
    candidates = shape.length - shape.block - shape.prompt
    tensors = {
        "ids_T": ids_T,
        "features_TC": torch.randn(
            shape.length, shape.context_layers * shape.hidden, generator=generator
        ).bfloat16(),
        "hidden_TH": hidden_TH.bfloat16(),
        "head_VH": head_VH.bfloat16(),
        "places": shape.prompt + torch.randperm(candidates, generator=generator),
    }
    for name, weight in DFlashDrafter(drafter_config(shape)).state_dict().items():
        tensors[f"drafter.{name}"] = weight.contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def read_problem(shape: Shape, path: Path, dtype: torch.dtype) -> Problem:
    """A problem with the target's part in `dtype`, in memory of this process (no page is left to be read later).

    The first `shape.anchors` of the file's places are the anchors: a shape may ask for more of them than it was written with.
    """
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    return Problem(
        shape=shape,
        ids_T=tensors["ids_T"],
        features_TC=tensors["features_TC"].to(dtype),
        hidden_TH=tensors["hidden_TH"].to(dtype),
        head_VH=tensors["head_VH"].to(dtype),
        anchors_N=tensors["places"][: shape.anchors].sort().values,
        drafter={
            name.removeprefix("drafter."): tensor
            for name, tensor in tensors.items()
            if name.startswith("drafter.")
        },
    )

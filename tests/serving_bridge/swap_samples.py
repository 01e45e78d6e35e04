"""Tiny drafter directories and a draft model as an engine has one, for the tests of hot swaps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from drafters.checkpoint import MANIFEST, file_sha256, save_drafter
from drafters.dflash import DFlashDrafter
from drafters.dflash_config import drafter_config
from drafters.identity import TargetIdentity
from drafters.length_head import LengthHead
from serving_bridge.sglang_plugin.drafter_store import DrafterStore, read_served

HIDDEN = 16
BLOCK_SIZE = 4
IDENTITY = TargetIdentity("tiny", "r0", "0123456789abcdef")
MODEL, HEAD = "model.safetensors", "length_head.safetensors"

Tensors = dict[str, torch.Tensor]


def tiny_config(*, block_size: int = BLOCK_SIZE, width: int = 24, layer_ids: tuple[int, ...] = (0, 2)) -> Any:
    target = LlamaConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=width,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
    )
    return drafter_config(
        target, num_layers=1, block_size=block_size, mask_token_id=31, target_layer_ids=list(layer_ids)
    )


def write_drafter(
    place: Path,
    *,
    seed: int,
    identity: TargetIdentity = IDENTITY,
    head: bool = True,
    **shape: Any,
) -> Path:
    """A drafter with random weights, of a version named as its directory."""
    drafter = DFlashDrafter(tiny_config(**shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        length_head = LengthHead(HIDDEN, width=4) if head else None
        if length_head is not None:
            length_head.out.bias.fill_(seed)
    return save_drafter(
        place, drafter, identity=identity, drafter_version=place.name, length_head=length_head
    )


def relist(directory: Path, **changes: Any) -> None:
    """Make the manifest truthful again, so that only a look at the content can notice a change."""
    manifest = json.loads((directory / MANIFEST).read_text())
    manifest["files"] = {name: file_sha256(directory / name) for name in manifest["files"]}
    (directory / MANIFEST).write_text(json.dumps({**manifest, **changes}))


def rewrite_tensors(directory: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(directory / MODEL)
    change(tensors)
    save_file(tensors, directory / MODEL)
    relist(directory)


def rewrite_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    relist(directory)


def damage(directory: Path, name: str = MODEL) -> None:
    """Turn over the last byte of a file."""
    content = bytearray((directory / name).read_bytes())
    content[-1] ^= 0xFF
    (directory / name).write_bytes(bytes(content))


def weights_of(directory: Path, name: str = MODEL) -> Tensors:
    return load_file(directory / name)


class FakeDraftModel(DFlashDrafter):
    """A draft model as the engine has it: loads in place, by name, and notices nothing else.

    fail_after: tensors after which loading fails; None never.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(tiny_config())
        self.load_state_dict(weights_of(directory))
        self.to(torch.bfloat16)
        self.fail_after: int | None = None
        self.copied = 0

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = self.state_dict()
        for number, (name, tensor) in enumerate(weights):
            if number == self.fail_after:
                raise RuntimeError("the device is lost")
            own[name].copy_(tensor)
            self.copied += 1


def snapshot(model: torch.nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(left: Tensors, right: Tensors) -> bool:
    """Whether all tensors are equal bit by bit."""
    return left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype and torch.equal(tensor, right[name])
        for name, tensor in left.items()
    )


def make_store(model: FakeDraftModel, served: Path, root: Path, **changes: Any) -> DrafterStore:
    settings: dict[str, Any] = {"swap_root": str(root), "max_bytes": 2**20}
    return DrafterStore(model, read_served(str(served), ""), **(settings | changes))


def order(step: str, directory: Path | str = "", digest: str | None = None) -> bytes:
    """An order for the store; of a `Path`, the name below the root and the true digest."""
    if isinstance(directory, Path):
        manifest = directory / MANIFEST
        if digest is None and manifest.is_file():
            digest = file_sha256(manifest)
        directory = directory.name
    return json.dumps({"step": step, "directory": directory, "manifest_sha256": digest or ""}).encode()

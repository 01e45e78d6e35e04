"""Serving checkpoints: a plain directory that SGLang loads as it is.

`config.json` + `model.safetensors` (DFlash: z-lab/SGLang layout, the drafter's own state dict, no embedding, no head; D3D: a HF
causal LM as `AutoModelForCausalLM` loads it, with `d3d_config`), optionally
`length_head.json` + `length_head.safetensors` and the same for `acceptance_head`, and `manifest.json` with the sha256 of every
file, the target's identity and the drafter's version. Engines ignore unknown tensors and do not notice missing ones, so both
are refused here.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from drafters.acceptance_head import AcceptanceHead
from drafters.d3d import D3DDrafter, D3DSpec
from drafters.dflash import DFlashDrafter
from drafters.errors import UserError
from drafters.fill import Drafter
from drafters.identity import TargetIdentity
from drafters.length_head import LengthHead
from drafters.precondition import plain_state

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
CONTENT = "{digest}"
"""In a version given to `save_drafter`: stands for the start of the checkpoint's digest, so that two runs that share a
registry or a server never call different weights by one name."""


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter directory in memory."""

    drafter: Drafter
    length_head: LengthHead | None
    manifest: dict[str, Any]
    acceptance_head: AcceptanceHead | None = None

    @property
    def drafter_version(self) -> str:
        return str(self.manifest["drafter_version"])

    @property
    def identity(self) -> TargetIdentity:
        return TargetIdentity.from_json(self.manifest["target"])


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def save_drafter(
    directory: str | Path,
    drafter: Drafter,
    *,
    identity: TargetIdentity,
    drafter_version: str,
    length_head: LengthHead | None = None,
    acceptance_head: AcceptanceHead | None = None,
    dtype: torch.dtype = torch.bfloat16,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write a serving checkpoint; the directory appears whole or not at all.

    An existing directory is replaced only after the new one is complete on disk. `CONTENT` in `drafter_version` is
    replaced by the first eight digits of the digest. `tensors` are the drafter's `serving_tensors`, if they are known: asking for
    those of a drafter that is divided among processes is everyone's business, writing them is not.

    Raises:
        UserError: when a weight is not finite, naming it.
    """
    directory = Path(directory)
    family = "d3d" if isinstance(drafter, D3DDrafter) else "dflash"
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        config = drafter.config.to_dict()
        _save_tensors(
            staging / "model.safetensors", serving_tensors(drafter) if tensors is None else tensors, dtype
        )
        if isinstance(drafter, D3DDrafter):
            config["architectures"] = [type(drafter.lm).__name__]
        # engines older than transformers 5 read the flat fields, newer ones `rope_parameters`
        rope = config.get("rope_parameters") or {}
        config["rope_theta"] = rope.get("rope_theta")
        config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("auto_map", None)
        # where it was loaded from: the same drafter elsewhere would be another version
        config.pop("_name_or_path", None)
        _write_json(staging / "config.json", config)
        if length_head is not None:
            shape: dict[str, Any] = {
                "hidden_size": length_head.proj.in_features,
                "width": length_head.proj.out_features,
                "features": length_head.features,
            }
            _save_head(staging, "length_head", length_head, shape)
        if acceptance_head is not None:
            shape = {
                "hidden_size": acceptance_head.proj.in_features,
                "width": acceptance_head.proj.out_features,
                "block_size": acceptance_head.block_size,
                "confidence": acceptance_head.reads_confidence,
            }
            _save_head(staging, "acceptance_head", acceptance_head, shape)
        files = {p.name: file_sha256(p) for p in sorted(staging.iterdir())}
        manifest = {
            "format_version": FORMAT_VERSION,
            "family": family,
            "drafter_version": drafter_version.replace(CONTENT, _digest(files)[:8]),
            "target": identity.to_json(),
            "block_size": drafter.block_size,
            "files": files,
            **(extra or {}),
        }
        _write_json(staging / MANIFEST, manifest)
        # temporary directories and safetensors files are private; a serving engine may run as another user
        for path in staging.iterdir():
            path.chmod(0o644)
        staging.chmod(0o755)
        replace_directory(staging, directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return directory


def serving_tensors(drafter: Drafter) -> dict[str, torch.Tensor]:
    """What a serving checkpoint holds of a drafter, under its names and in the precision of training; see `plain_state`."""
    if not isinstance(drafter, D3DDrafter):
        return plain_state(drafter)
    tensors = plain_state(drafter.lm)
    if drafter.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return tensors


def load_drafter(directory: str | Path, *, dtype: torch.dtype | None = None) -> LoadedDrafter:
    """Read and check a serving checkpoint.

    Raises:
        UserError: a missing file, wrong checksum, missing or extra tensor, wrong shape, or non-finite weight.
    """
    directory = Path(directory)
    manifest = verify_manifest(directory)
    drafter = _load_d3d(directory) if manifest.get("family") == "d3d" else _load_dflash(directory)
    length_head: LengthHead | None = None
    shape = _head_shape(directory, "length_head", manifest)
    if shape is not None:
        length_head = LengthHead(shape["hidden_size"], shape["width"], shape["features"])
        _load_strict(length_head, directory / "length_head.safetensors")
    acceptance_head: AcceptanceHead | None = None
    shape = _head_shape(directory, "acceptance_head", manifest)
    if shape is not None:
        acceptance_head = AcceptanceHead(
            shape["hidden_size"], shape["block_size"], shape["width"], confidence=shape["confidence"]
        )
        if acceptance_head.block_size != drafter.block_size:
            raise UserError(
                f"{directory}: the acceptance head is for blocks of {acceptance_head.block_size}, the drafter makes "
                f"blocks of {drafter.block_size}"
            )
        _load_strict(acceptance_head, directory / "acceptance_head.safetensors")
    for head in (length_head, acceptance_head):
        if head is not None:
            head.eval()
    return LoadedDrafter(drafter.to(dtype or torch.bfloat16).eval(), length_head, manifest, acceptance_head)


def _save_head(staging: Path, name: str, head: nn.Module, shape: dict[str, Any]) -> None:
    _save_tensors(staging / f"{name}.safetensors", plain_state(head), torch.float32)
    _write_json(staging / f"{name}.json", shape)


def _head_shape(directory: Path, name: str, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """What to build a head from, None if the checkpoint has none; its files are there whole and listed, or refused."""
    files = (f"{name}.json", f"{name}.safetensors")
    if not any(file in manifest["files"] or (directory / file).exists() for file in files):
        return None
    unlisted = [file for file in files if file not in manifest["files"]]
    if unlisted:
        raise UserError(
            f"{directory}: {', '.join(unlisted)} not listed in the manifest, but part of the {name.replace('_', ' ')}"
        )
    shape: dict[str, Any] = json.loads((directory / files[0]).read_text())
    return shape


def _load_dflash(directory: Path) -> Drafter:
    drafter = DFlashDrafter(Qwen3Config.from_pretrained(directory))
    _load_strict(drafter, directory / "model.safetensors")
    return drafter


def _load_d3d(directory: Path) -> Drafter:
    config = AutoConfig.from_pretrained(directory)
    D3DSpec.from_config(config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype="auto", output_loading_info=True
        )
    except (SafetensorError, OSError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(f"{directory}: the model cannot be loaded ({first_line})") from None
    lm, found = loaded
    problems = {
        key: sorted(map(str, found[key])) for key in ("missing_keys", "unexpected_keys") if found[key]
    }
    if problems:
        raise UserError(f"{directory}: {problems}")
    bad = first_nonfinite(lm.state_dict())
    if bad is not None:
        raise UserError(f"{directory}: {bad} is not finite")
    return D3DDrafter(lm)


def verify_manifest(directory: str | Path) -> dict[str, Any]:
    """The manifest, after every listed file was found with its checksum.

    Raises:
        UserError: naming the file at fault.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"{directory}: not a drafter checkpoint ({MANIFEST} is missing)")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        files = dict(manifest["files"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: unreadable manifest ({error})") from None
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {manifest.get('format_version')}, this release reads {FORMAT_VERSION}"
        )
    for needed in ("config.json", "model.safetensors"):
        if needed not in files:
            raise UserError(f"{path}: {needed} is not listed")
    for key in ("drafter_version", "target"):
        if key not in manifest:
            raise UserError(f"{path}: {key} is missing")
    for name, digest in files.items():
        file = directory / name
        if Path(name).name != name or not file.is_file():
            raise UserError(f"{file}: listed in the manifest but missing")
        if file_sha256(file) != digest:
            raise UserError(f"{file}: checksum differs from the manifest; the file is damaged")
    return manifest


def drafter_digest(directory: str | Path) -> str:
    """Sha256 over the file hashes of a checkpoint: equal digests mean equal weights and config."""
    return _digest(verify_manifest(directory)["files"])


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


def first_nonfinite(tensors: dict[str, torch.Tensor]) -> str | None:
    """Name of the first tensor holding a NaN or infinity."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            return name
    return None


def _save_tensors(path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    bad = first_nonfinite(tensors)
    if bad is not None:
        raise UserError(f"{path.parent}: refusing to export, {bad} is not finite")
    save_file(tensors, path, metadata={"format": "pt"})


def _load_strict(module: nn.Module, path: Path) -> None:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None
    expected = module.state_dict()
    missing, extra = (
        sorted(expected.keys() - tensors.keys()),
        sorted(tensors.keys() - expected.keys()),
    )
    if missing or extra:
        raise UserError(f"{path}: missing tensors {missing or 'none'}, unexpected tensors {extra or 'none'}")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{path}: {name} has shape {list(tensor.shape)}, the config asks for "
                f"{list(expected[name].shape)}"
            )
    bad = first_nonfinite(tensors)
    if bad is not None:
        raise UserError(f"{path}: {bad} is not finite")
    module.load_state_dict(tensors, strict=True)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def replace_directory(staging: Path, directory: Path) -> None:
    """Move a directory to a place in the same folder that may be taken; on failure the old one stays there."""
    if not directory.exists():
        staging.rename(directory)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old.", dir=directory.parent))
    directory.rename(old / "replaced")
    try:
        staging.rename(directory)
    except OSError:
        (old / "replaced").rename(directory)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)

"""Where the sizes of the models that a configuration names come from: a directory, a package's file, or shipped presets."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from drafters.errors import UserError
from pipeline.config import Config
from pipeline.plan.architecture import Architecture, from_hf

PRESETS = Path(__file__).resolve().parents[2] / "configs" / "architectures"


def target_architecture(config: Config) -> Architecture:
    """Sizes of the target.

    Raises:
        UserError: naming `target.model`.
    """
    made = config.output / "target"
    if config.target.model.startswith("package:") and (made / "config.json").is_file():
        return architecture_of(str(made), "target.model")
    return architecture_of(config.target.model, "target.model")


def drafter_architecture(config: Config, target: Architecture) -> Architecture:
    """Sizes of the causal LM that a d3d drafter is made of.

    Raises:
        UserError: naming `drafter.model`: not found, not an architecture that can draft, or of another vocabulary.
    """
    from drafters.d3d import SUPPORTED_MODEL_TYPES

    name = config.drafter.model
    drafter = target if name is None else architecture_of(name, "drafter.model")
    if drafter.model_type not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"drafter.model: architecture {drafter.model_type!r} cannot become a d3d drafter; name a model of "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    if drafter.vocab != target.vocab:
        raise UserError(
            f"drafter.model: {name} has {drafter.vocab} rows of vocabulary, the target {target.vocab}"
        )
    return drafter


def architecture_of(name: str, key: str) -> Architecture:
    """Sizes of a model: of a directory, `package:NAME`, `tiny:KIND`, or the preset named like the hub name's last part.

    Raises:
        UserError: naming `key`, and the presets there are.
    """
    directory = Path(name)
    if directory.is_dir():
        return from_hf(_read_json(directory / "config.json", key), f"{key}: {name}")
    if name.startswith("package:"):
        return from_hf(_packaged_fields(name.removeprefix("package:"), key), f"{key}: {name}")
    preset = PRESETS / f"{name.replace(':', '-').rsplit('/', 1)[-1]}.yaml"
    if not preset.is_file():
        known = ", ".join(sorted(p.stem for p in PRESETS.glob("*.yaml") if not p.stem.startswith("tiny-")))
        raise UserError(
            f"{key}: the sizes of {name} are not known; name a directory with its config.json, or one of {known}"
        )
    return from_hf(yaml.safe_load(preset.read_text()), f"{key}: {name}")


def _read_json(path: Path, key: str) -> Mapping[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path} cannot be read ({error})") from None
    if not isinstance(fields, dict):
        raise UserError(f"{key}: {path} is no mapping")
    return fields


def _packaged_fields(package: str, key: str) -> Mapping[str, Any]:
    """Configuration in the header of the GGUF file inside an installed package."""
    from transformers import AutoConfig

    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if len(files) != 1:
        raise UserError(f"{key}: package {package!r} is not installed, or does not hold one GGUF file")
    try:
        fields: dict[str, Any] = AutoConfig.from_pretrained(
            files[0].parent, gguf_file=files[0].name
        ).to_dict()
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"{key}: {files[0].name} cannot be read ({error})") from None
    return fields

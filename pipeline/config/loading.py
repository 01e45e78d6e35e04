"""Configurations from YAML files and `--set a.b=v`; errors name the file and the dotted path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from drafters.errors import UserError
from pipeline.config.data import SourceConfig
from pipeline.config.schema import Config


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply `a.b=v` overrides.

    A preset name without a path (`quickstart`) means the one shipped in `configs/`. Relative paths inside the file are
    tried from the working directory first, then beside the file.

    Raises:
        UserError: naming the file or dotted key.
    """
    path = find_preset(path)
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of sections at the top level")
    for override in overrides or []:
        apply_override(data, override)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}: {describe_errors(error)}") from None
    return _resolve_paths(config, path.parent)


def find_preset(path: Path) -> Path:
    """The file itself, or the shipped preset of that name."""
    if path.is_file():
        return path
    shipped = Path(__file__).resolve().parents[2] / "configs"
    for candidate in (shipped / path.name, shipped / f"{path.name}.yaml"):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(p.stem for p in shipped.glob("*.yaml")))
    raise UserError(f"{path}: no such config file; shipped presets: {known}")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in raw data; the value is parsed as YAML. List items are addressed by index."""
    key, separator, raw = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override}: expected KEY=VALUE with a dotted key, such as train.steps=100")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise UserError(f"--set {override}: the value is not valid YAML") from None
    node: Any = data
    parts = key.split(".")
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        where = ".".join(parts[: i + 1])
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise UserError(f"--set {override}: {where} is not an item of a list of {len(node)}")
            if last:
                node[int(part)] = value
            node = node[int(part)]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            elif node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise UserError(f"--set {override}: {'.'.join(parts[:i])} holds a value, not a section")


def describe_errors(error: ValidationError) -> str:
    """One line: every dotted path and what is wrong there."""
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(p) for p in item["loc"]) or "config"
        parts.append(f"{where}: {item['msg']}")
    return "; ".join(parts)


def _resolve_paths(config: Config, base: Path) -> Config:
    def resolve(source: SourceConfig) -> SourceConfig:
        if source.path is None or source.path.is_absolute() or source.path.exists():
            return source
        beside = base / source.path
        return source.model_copy(update={"path": beside}) if beside.exists() else source

    data = config.data.model_copy(
        update={
            "train": [resolve(s) for s in config.data.train],
            "heldout": [resolve(s) for s in config.data.heldout],
        }
    )
    traffic = config.traffic.model_copy(update={"sources": [resolve(s) for s in config.traffic.sources]})
    return config.model_copy(update={"data": data, "traffic": traffic})

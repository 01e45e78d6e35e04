"""The configuration schema, printed: JSON schema for tools, a table of dotted keys for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config import Config

Schema = Mapping[str, Any]
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
}
_INTRODUCTION = """\
# Configuration reference

This page is generated. To change it, edit the descriptions in `pipeline/config/`, then run
`draftsmith config schema --markdown > docs/config.md`.

Every key of the YAML files, as `--set KEY=VALUE` takes it. `N` is the index of a list item, from 0. A key that is left
out keeps the default shown. [Concepts](concepts.md) explains the terms.
"""


@dataclass(frozen=True)
class KeyRow:
    """One configurable value. `default` is JSON text, None where a value must be given."""

    key: str
    type: str
    default: str | None
    description: str


def json_schema() -> str:
    """The JSON schema of a configuration file, indented; editors complete and check YAML with it."""
    return json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False)


def key_rows() -> list[KeyRow]:
    """All keys in schema order. Defaults are those of the whole configuration.

    Two sections of one class differ where the configuration gives them different defaults, as `train.loss.objective`
    and `distill.loss.objective` do.
    """
    schema = Config.model_json_schema()
    return list(_walk(schema, schema["$defs"], "", {}))


def markdown_reference() -> str:
    """A Markdown page: one table for the top level, one for each section."""
    schema = Config.model_json_schema()
    rows = key_rows()
    parts = [_INTRODUCTION, "## Top level\n", _table([row for row in rows if "." not in row.key])]
    for name in schema["properties"]:
        section = [row for row in rows if row.key.startswith(f"{name}.")]
        if section:
            about = _resolve(schema["properties"][name], schema["$defs"]).get("description", "")
            parts += [f"## {name}\n", f"{about}\n", _table(section)]
    return "\n".join(parts).rstrip("\n")


def _walk(section: Schema, definitions: Schema, prefix: str, defaults: Mapping[str, Any]) -> Iterator[KeyRow]:
    """Rows of a section; `defaults` are what its parent gives it, ahead of the class's own."""
    for name, raw in section["properties"].items():
        field = _resolve(raw, definitions)
        key = f"{prefix}{name}"
        required = name in section.get("required", []) and name not in defaults
        default = defaults.get(name, raw.get("default", _made_by_factory(field)))
        if "properties" in field:
            yield from _walk(field, definitions, f"{key}.", default if isinstance(default, Mapping) else {})
            continue
        shown = None if required else json.dumps(default, ensure_ascii=False)
        yield KeyRow(key, _type_text(field, definitions), shown, raw.get("description", ""))
        item = _resolve(field.get("items", {}), definitions)
        if "properties" in item:
            yield from _walk(item, definitions, f"{key}.N.", {})


def _resolve(field: Schema, definitions: Schema) -> Schema:
    reference = field.get("$ref")
    return definitions[reference.rsplit("/", 1)[-1]] if reference else field


def _made_by_factory(field: Schema) -> Any:
    """Default of a field whose schema names none: JSON schema leaves out the empty lists and mappings of factories."""
    return [] if field.get("type") == "array" else {}


def _type_text(field: Schema, definitions: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_type_text(option, definitions) for option in field["anyOf"])
    if "const" in field:
        return json.dumps(field["const"])
    if "enum" in field:
        return ", ".join(json.dumps(value) for value in field["enum"])
    if field["type"] == "array":
        item = _resolve(field["items"], definitions)
        few = f"at least {field['minItems']} " if "minItems" in field else ""
        base = f"list of {few}{'section' if 'properties' in item else _type_text(item, definitions)}"
    elif field["type"] == "object":
        base = f"mapping to {_type_text(field['additionalProperties'], definitions)}"
    else:
        base = field.get("format", field["type"])
    bounds = [text.format(field[name]) for name, text in _BOUNDS.items() if name in field]
    return f"{base} {' and '.join(bounds)}" if bounds else base


def _table(rows: list[KeyRow]) -> str:
    lines = ["| key | type | default | description |", "|---|---|---|---|"]
    for row in rows:
        default = "*required*" if row.default is None else f"`{row.default}`"
        cells = (f"`{row.key}`", row.type, default, row.description)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

"""The registry for people: its versions as plain rows, what differs between two, and how to find it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from drafters.errors import UserError
from pipeline.config import Config, load_config
from pipeline.lineage import Lineage, show_time
from pipeline.model_card import decision
from pipeline.registry import RegisteredVersion, Registry
from pipeline.tracking import (
    open_client,
    probe,
    redacted,
    sqlite_file,
    tracking_errors,
    without_passwords,
)

IDENTITY = ("drafter_version", "family", "block_size", "target_id", "tokenizer_hash")
PROVENANCE = ("stage", "parent_version", "data_window", "config_hash", "git_commit")


@dataclass(frozen=True)
class Difference:
    """One line of a comparison; None where a side has no such thing."""

    name: str
    first: Any
    second: Any


@contextmanager
def open_registry(source: str, model: str | None) -> Iterator[Registry]:
    """The registered model of a configuration, or of a store.

    Args:
        source: a configuration file, a preset's name, or the address of a store (`sqlite:///…`, `http://…`).
        model: name of the registered model; None takes the configuration's, or the only one of a store.

    Raises:
        UserError: the store cannot be reached, or has no such model; also for what goes wrong inside the block.
    """
    config = None if "://" in source else load_config(Path(source))
    uri = source if config is None else _store_of(config)
    database = sqlite_file(uri)
    if database is not None and not database.is_file():
        raise UserError(
            f"{database}: no registry there yet; run `draftsmith deploy` first, or check the path"
        )
    with tracking_errors(uri):
        probe(uri)
        known = _models(uri)
        name = model or (_only(known, uri) if config is None else _model_of(config))
        if name not in known:
            raise UserError(
                f"registry: no model {name!r} at {redacted(uri)}; there is {', '.join(sorted(known)) or 'none'}"
            )
        yield Registry(uri, name)


def row(found: RegisteredVersion) -> dict[str, Any]:
    """A version as tables and JSON show it."""
    tags = found.tags
    return {
        "version": found.version,
        "aliases": list(found.aliases),
        "tau": float(tags["tau"]) if "tau" in tags else None,
        "registered": show_time(found.created_ms / 1000),
        **{key: tags.get(key) for key in (*PROVENANCE, *IDENTITY)},
        "decision": decision(tags),
        "run_id": found.run_id,
    }


def compare(registry: Registry, first: RegisteredVersion, second: RegisteredVersion) -> dict[str, Any]:
    """What differs between two versions: identity, origin, configuration, data by domain, metrics.

    Keys hold lists of `Difference`; `problems` says what could not be compared.
    """
    problems: list[str] = []
    lineages = [_lineage(registry, found, problems) for found in (first, second)]
    configs = [_config(registry, found, problems) for found in (first, second)]
    return {
        "identity": _differences(*(_pick(found.tags, IDENTITY) for found in (first, second))),
        "origin": _differences(*(_pick(found.tags, PROVENANCE) for found in (first, second))),
        "config": [] if None in configs else _differences(*(flatten(config or {}) for config in configs)),
        "data": _differences(*(_domains(lineage) for lineage in lineages)),
        "metrics": _differences(*(metrics(found) for found in (first, second))),
        "problems": problems,
    }


def metrics(found: RegisteredVersion) -> dict[str, float]:
    """τ in all and by domain."""
    return {key: float(value) for key, value in found.tags.items() if key == "tau" or key.startswith("tau_")}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; list items by index, empty lists and sections as they are."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, list) and value:
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            flat |= flatten({str(k): v for k, v in value.items()}, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _store_of(config: Config) -> str:
    return config.tracking.uri or f"sqlite:///{(config.output / 'mlflow.db').resolve()}"


def _model_of(config: Config) -> str:
    from pipeline.models import read_identity
    from pipeline.registry import model_name_for

    return config.tracking.model_name or model_name_for(
        read_identity(config).target_id, config.drafter.family
    )


def _models(uri: str) -> list[str]:
    """Registered models that hold drafters."""
    client = open_client(uri)
    names: list[str] = []
    token: str | None = None
    while True:
        page = client.search_registered_models(page_token=token)
        names += [found.name for found in page if {"target_id", "family"} <= found.tags.keys()]
        token = page.token
        if not token:
            return names


def _only(known: list[str], uri: str) -> str:
    if len(known) != 1:
        raise UserError(
            f"--model: {redacted(uri)} has {len(known)} models of drafters, name one: "
            f"{', '.join(sorted(known)) or 'run `draftsmith deploy` first'}"
        )
    return known[0]


def _pick(tags: Mapping[str, str], keys: tuple[str, ...]) -> dict[str, str]:
    return {key: tags[key] for key in keys if key in tags}


def _lineage(registry: Registry, found: RegisteredVersion, problems: list[str]) -> Lineage | None:
    try:
        lineage = registry.lineage(found.version)
    except UserError as error:
        problems.append(str(error))
        return None
    if lineage is None:
        problems.append(f"version {found.version} has no record of its data")
    return lineage


def _config(registry: Registry, found: RegisteredVersion, problems: list[str]) -> dict[str, Any] | None:
    try:
        if found.run_id is None:
            raise UserError(f"version {found.version} has no run that keeps its configuration")
        kept = yaml.safe_load(registry.artifact_text(found.run_id, "config.yaml"))
        # versions of older releases were logged with them
        return dict(without_passwords(kept))
    except (UserError, yaml.YAMLError, TypeError, ValueError) as error:
        problems.append(str(error))
        return None


def _domains(lineage: Lineage | None) -> dict[str, int]:
    return {} if lineage is None or lineage.data is None else lineage.data.domains


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    keys = [*first, *(key for key in second if key not in first)]
    return [
        Difference(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)
    ]

"""Registered drafters: one MLflow registered model per (target, family), versions moved by aliases.

A version is a serving directory, logged file by file as run artifacts, so it downloads as a
directory that an engine loads as it is. Aliases: `challenger` (under judgement), `candidate` (accepted by the gate, waits for
a person), `champion` (serving), `previous-champion` (what a rollback restores). Version tags:

- `target_id`, `tokenizer_hash`, `block_size`, `family`, `drafter_version`: from the manifest;
- `drafter_digest`: hash of weights and config; `directory_sha256`: hash of all files, manifest
included;
- `stage`, `parent_version`, `config_hash`, `git_commit`, `data_window`: from the lineage, which lies whole in the run's
artifacts, as do the model card and the configuration; metrics are given by the caller, `tau_<domain>` among them;
- `registered_at`: unix seconds;
- `gate_outcome` (`accepted` or `refused`), `gate_reason`, `rolled_back_reason`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.errors import UserError
from pipeline.lineage import Lineage
from pipeline.model_card import DESCRIPTION_LENGTH, render_card
from pipeline.result import hash_path
from pipeline.tracking import flatten_metrics, legal_key, open_client

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

_log = logging.getLogger(__name__)

CHALLENGER = "challenger"
CANDIDATE = "candidate"
CHAMPION = "champion"
PREVIOUS_CHAMPION = "previous-champion"
_LINEAGE = "lineage.json"
_CARD = "card.md"


@dataclass(frozen=True)
class RegisteredVersion:
    """One version of a registered drafter, as it was when read."""

    version: int
    aliases: tuple[str, ...]
    tags: dict[str, str]
    run_id: str | None
    created_ms: int


class Registry:
    """Versions and aliases of one registered model; the store must have been initialised by `Tracking`."""

    def __init__(self, tracking_uri: str, model_name: str) -> None:
        if not re.fullmatch(r"[\w\-]+", model_name, flags=re.ASCII):
            raise UserError(
                f"registry: {model_name!r} is no legal model name; use letters, digits, `_` and `-`"
            )
        self.tracking_uri = tracking_uri
        self.model_name = model_name
        self._client = open_client(tracking_uri)

    def register(
        self,
        directory: Path,
        *,
        run_id: str,
        tags: Mapping[str, str] | None = None,
        metrics: Mapping[str, Any] | None = None,
        lineage: Lineage | None = None,
    ) -> int:
        """Log a serving directory under a run and make it a version, with its lineage and card; returns its number.

        Weights and config that are a version already are not registered again: that version is
        returned with its tags as they were, so repeating the call after a crash is safe.

        Raises:
            UserError: the directory fails its manifest, or belongs to another target or family than
                this model.
        """
        from drafters.checkpoint import drafter_digest, verify_manifest

        identity = _manifest_tags(verify_manifest(directory), directory)
        digest = drafter_digest(directory)
        self._require_model(identity, directory)
        for known in self.list_versions():
            if known.tags.get("drafter_digest") == digest:
                return known.version
        folder = f"drafters/{digest[:16]}"
        self._client.log_artifacts(run_id, str(directory), folder)
        papers: dict[str, str] = {}
        if lineage is not None:
            papers = {"papers": f"versions/{digest[:16]}", **lineage.tags()}
            self._client.log_dict(run_id, lineage.to_json(), f"{papers['papers']}/{_LINEAGE}")
        source = f"{self._client.get_run(run_id).info.artifact_uri}/{folder}"
        finite, _ = flatten_metrics(metrics or {})
        created = self._client.create_model_version(
            self.model_name,
            source=source,
            run_id=run_id,
            tags={
                **identity,
                **{key: f"{value:.6g}" for key, value in finite.items()},
                **{legal_key(key): str(value) for key, value in (tags or {}).items()},
                **papers,
                "registered_at": f"{time.time():.0f}",
                "drafter_digest": digest,
                "directory_sha256": hash_path(directory),
            },
        )
        self._refresh_card(int(created.version))
        return int(created.version)

    def download(self, version_or_alias: int | str, destination: Path) -> Path:
        """Put a version's directory, bit-equal to the one registered, at `destination`.

        It appears there whole or not at all. A destination that already holds this version is left
        as it is.

        Raises:
            UserError: no such version or alias; the files differ from those registered; or the
                destination is in use.
        """
        from mlflow.artifacts import download_artifacts

        found = self._resolve(version_or_alias)
        label = f"{self.model_name} version {found.version}"
        expected = found.tags.get("directory_sha256")
        if expected is None:
            raise UserError(f"registry: {label} has no hash to check it by; register it again")
        if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
            if hash_path(destination) == expected:
                return destination
            raise UserError(f"{destination}: exists and is not {label}; remove it first")
        destination.parent.mkdir(parents=True, exist_ok=True)
        source = self._client.get_model_version_download_uri(self.model_name, str(found.version))
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".download.") as staging:
            fetched = Path(download_artifacts(source, dst_path=staging, tracking_uri=self.tracking_uri))
            _verify(fetched, expected, label)
            os.replace(fetched, destination)
        return destination

    def lineage(self, version: int) -> Lineage | None:
        """What was recorded when a version was registered; None for one of an older release.

        Raises:
            UserError: no such version, or its record is damaged or gone from the artifact store.
        """
        found = self.get(version)
        if "papers" not in found.tags or found.run_id is None:
            return None
        text = self.artifact_text(found.run_id, f"{found.tags['papers']}/{_LINEAGE}")
        try:
            return Lineage.from_json(json.loads(text))
        except ValueError as error:
            raise UserError(f"registry: {_LINEAGE} of version {version} is damaged ({error})") from None

    def artifact_text(self, run_id: str, path: str) -> str:
        """A text file among a run's artifacts.

        Raises:
            UserError: it is not there.
        """
        from mlflow.exceptions import MlflowException

        try:
            with tempfile.TemporaryDirectory() as staging:
                return Path(self._client.download_artifacts(run_id, path, staging)).read_text()
        except (MlflowException, OSError) as error:
            first_line = (str(error).strip() or type(error).__name__).partition("\n")[0]
            raise UserError(
                f"registry: {path} of run {run_id} is not in the artifact store ({first_line})"
            ) from None

    def card(self, version: int) -> str:
        """The model card as of now."""
        found = self.get(version)
        return render_card(self.model_name, version, found.tags, found.aliases, self.lineage(version))

    def resolve(self, name: str) -> RegisteredVersion:
        """A version by number or alias, as people write it: `3`, `champion`, `@champion`.

        Raises:
            UserError: there is none.
        """
        text = name.strip().removeprefix("@")
        return self._resolve(int(text) if text.isdecimal() else text)

    def get(self, version: int) -> RegisteredVersion:
        """One version with its tags and aliases.

        Raises:
            UserError: there is no such version.
        """
        from mlflow.exceptions import MlflowException

        try:
            return _entity(self._client.get_model_version(self.model_name, str(version)), self._aliases())
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise UserError(f"registry: {self.model_name} has no version {version}") from error

    def list_versions(self) -> list[RegisteredVersion]:
        """All versions, oldest first."""
        aliases = self._aliases()
        versions: list[RegisteredVersion] = []
        token: str | None = None
        while True:
            page = self._client.search_model_versions(f"name='{self.model_name}'", page_token=token)
            versions += [_entity(version, aliases) for version in page]
            token = page.token
            if not token:
                return sorted(versions, key=lambda found: found.version)

    def champion(self) -> RegisteredVersion | None:
        """The serving version, None before the first promotion."""
        return self._aliased(CHAMPION)

    def challenger(self) -> RegisteredVersion | None:
        """The version under judgement, if any."""
        return self._aliased(CHALLENGER)

    def candidate(self) -> RegisteredVersion | None:
        """The latest version that the gate accepted and nobody has promoted yet, if any."""
        return self._aliased(CANDIDATE)

    def previous_champion(self) -> RegisteredVersion | None:
        """The version that a rollback restores, if any."""
        return self._aliased(PREVIOUS_CHAMPION)

    def set_challenger(self, version: int) -> None:
        """Point `challenger` at a version, away from any other."""
        self._point(CHALLENGER, self.get(version).version)

    def promote(self, version: int, *, reason: str = "promoted without a gate") -> None:
        """Make a version champion and the old champion previous-champion. Safe to repeat.

        `previous-champion` moves first and each move replaces its alias in one transaction, so a
        crash at any point leaves the old champion or the new one, never none.
        """
        found = self.get(version)
        old = self._aliases().get(CHAMPION)
        self._tag(version, {"gate_outcome": "accepted", "gate_reason": reason})
        if "rolled_back_reason" in found.tags:
            self._client.delete_model_version_tag(self.model_name, str(version), "rolled_back_reason")
        if old is not None and old != version:
            self._point(PREVIOUS_CHAMPION, old)
        self._point(CHAMPION, version)
        self._clear(CHALLENGER, version)
        self._clear(CANDIDATE, version)
        for moved in {version, version if old is None else old}:
            self._refresh_card(moved)

    def accept(self, version: int, reason: str) -> None:
        """Record that the gate would have a version; it is the candidate until somebody promotes it, or the next one comes."""
        self._tag(self.get(version).version, {"gate_outcome": "accepted", "gate_reason": reason})
        self._point(CANDIDATE, version)
        self._clear(CHALLENGER, version)
        self._refresh_card(version)

    def refuse(self, version: int, reason: str) -> None:
        """Record that the gate turned a version down; it stays registered but is no longer challenger.

        Raises:
            UserError: the version is champion; that takes a rollback.
        """
        if CHAMPION in self.get(version).aliases:
            raise UserError(
                f"registry: version {version} of {self.model_name} is champion; roll back instead"
            )
        self._tag(version, {"gate_outcome": "refused", "gate_reason": reason})
        self._clear(CHALLENGER, version)
        self._clear(CANDIDATE, version)
        self._refresh_card(version)

    def rollback(self, reason: str, *, version: int | None = None) -> int:
        """Make previous-champion champion again and tag the one it replaces; returns the restored version.

        With `version`, the champion to take out of service, the call is safe to repeat: once
        another version is champion, nothing more happens. A rollback uses `previous-champion` up,
        so a second one cannot bring the bad version back.

        Raises:
            UserError: there is no champion or no earlier one.
        """
        aliases = self._aliases()
        bad, good = aliases.get(CHAMPION), aliases.get(PREVIOUS_CHAMPION)
        if bad is not None and version is not None and bad != version:
            self._clear(PREVIOUS_CHAMPION, bad)
            return bad
        if bad is None or good is None or good == bad:
            raise UserError(
                f"registry: {self.model_name} has no previous champion to roll back to; promote a known good version"
            )
        self._tag(bad, {"rolled_back_reason": reason})
        self._point(CHAMPION, good)
        self._clear(PREVIOUS_CHAMPION, good)
        for moved in (bad, good):
            self._refresh_card(moved)
        return good

    def _refresh_card(self, version: int) -> None:
        """Write the card anew, as artifact and as the description that MLflow shows. It is for people alone, so a failure
        holds nothing up.
        """
        from mlflow.exceptions import MlflowException

        try:
            found = self.get(version)
            if "papers" not in found.tags or found.run_id is None:
                return
            card = self.card(version)
            self._client.log_text(found.run_id, card, f"{found.tags['papers']}/{_CARD}")
            self._client.update_model_version(self.model_name, str(version), card[:DESCRIPTION_LENGTH])
        except (MlflowException, UserError, OSError) as error:
            _log.warning("the card of version %d of %s was not written: %s", version, self.model_name, error)

    def _require_model(self, identity: Mapping[str, str], directory: Path) -> None:
        """Create the registered model on first use; afterwards hold it to its target and family."""
        from mlflow.exceptions import MlflowException

        owner = {key: identity[key] for key in ("target_id", "family")}
        try:
            self._client.create_registered_model(self.model_name, tags=owner)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        held = self._client.get_registered_model(self.model_name).tags
        for key, value in owner.items():
            if held.get(key, value) != value:
                raise UserError(
                    f"{directory}: has {key} {value}, but {self.model_name} holds drafters of {held[key]}"
                )

    def _resolve(self, version_or_alias: int | str) -> RegisteredVersion:
        if isinstance(version_or_alias, int):
            return self.get(version_or_alias)
        found = self._aliased(version_or_alias)
        if found is None:
            raise UserError(f"registry: {self.model_name} has no alias {version_or_alias!r}")
        return found

    def _aliased(self, alias: str) -> RegisteredVersion | None:
        version = self._aliases().get(alias)
        return None if version is None else self.get(version)

    def _aliases(self) -> dict[str, int]:
        """Alias → version; empty before the first registration."""
        from mlflow.exceptions import MlflowException

        try:
            aliases = self._client.get_registered_model(self.model_name).aliases
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return {}
        return {alias: int(version) for alias, version in aliases.items()}

    def _point(self, alias: str, version: int) -> None:
        self._client.set_registered_model_alias(self.model_name, alias, str(version))

    def _clear(self, alias: str, version: int) -> None:
        """Delete an alias if it points at this version."""
        if self._aliases().get(alias) == version:
            self._client.delete_registered_model_alias(self.model_name, alias)

    def _tag(self, version: int, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self._client.set_model_version_tag(self.model_name, str(version), key, value)


def model_name_for(target_id: str, family: str) -> str:
    """Registered model name of a (target, family): readable, legal in MLflow, distinct by a hash."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", target_id.partition("@")[0]).strip("-")[:60]
    digest = hashlib.sha256(target_id.encode()).hexdigest()[:10]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', family)}-{readable}-{digest}"


def _manifest_tags(manifest: Mapping[str, Any], directory: Path) -> dict[str, str]:
    from drafters.identity import TargetIdentity

    try:
        identity = TargetIdentity.from_json(manifest["target"])
        fields = {key: str(manifest[key]) for key in ("family", "drafter_version", "block_size")}
    except KeyError as missing:
        raise UserError(f"{directory}: the manifest lacks {missing}; export the drafter again") from missing
    return {"target_id": identity.target_id, "tokenizer_hash": identity.tokenizer_hash, **fields}


def _verify(directory: Path, expected: str, label: str) -> None:
    """Raise unless a download is what was registered.

    The manifest names the damaged file; the registered hash also covers the manifest itself and
    files added beside it.
    """
    from drafters.checkpoint import verify_manifest

    try:
        verify_manifest(directory)
    except UserError as error:
        raise UserError(f"registry: {label} is damaged in the artifact store: {error}") from error
    if hash_path(directory) != expected:
        raise UserError(
            f"registry: {label} is not what was registered: files were added or its manifest was changed"
        )


def _entity(version: ModelVersion, aliases: Mapping[str, int]) -> RegisteredVersion:
    """MLflow's searches leave a version's aliases out, so they come from the model."""
    number = int(version.version)
    return RegisteredVersion(
        version=number,
        aliases=tuple(sorted(alias for alias, target in aliases.items() if target == number)),
        tags=dict(version.tags),
        run_id=version.run_id,
        created_ms=int(version.creation_timestamp),
    )

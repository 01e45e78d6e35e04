"""Drafters as users name them: directories, registry versions, aliases."""

from __future__ import annotations

from pathlib import Path

from drafters.errors import UserError
from pipeline.benchmark.methods import DrafterChoice, describe_drafter
from pipeline.config import Config
from pipeline.registry import Registry
from pipeline.stage_plan import MANIFEST, choose_drafter


def split_label(written: str) -> tuple[str | None, str]:
    """`LABEL=PLACE` in its parts; a directory with `=` in its name has no label.

    Raises:
        UserError: an empty label or place.
    """
    if (Path(written) / MANIFEST).is_file() or "=" not in written:
        return None, written
    label, _, place = written.partition("=")
    if not label or not place:
        raise UserError(f"--drafter {written}: write PLACE, or LABEL=PLACE")
    return label, place


def is_directory(place: str) -> bool:
    """Whether it is looked for on disk and not in the registry."""
    return (Path(place) / MANIFEST).is_file() or ("/" in place and not place.startswith("models:/"))


def resolve_drafters(config: Config) -> list[DrafterChoice]:
    """The drafters of `benchmark.drafters`, or the latest one of the output directory; versions are downloaded.

    Raises:
        UserError: for one that is not there.
    """
    if not config.benchmark.drafters:
        return [describe_drafter(None, choose_drafter(config.output, "evaluate", None))]
    found = []
    for written in config.benchmark.drafters:
        label, place = split_label(written)
        if is_directory(place):
            found.append(describe_drafter(label, Path(place)))
        else:
            found.append(
                describe_drafter(label or place.removeprefix("models:/"), _downloaded(config, place))
            )
    return found


def _downloaded(config: Config, place: str) -> Path:
    registry = open_registry(config)
    version = version_number(registry, place)
    return registry.download(version, config.output / "versions" / f"version-{version}")


def open_registry(config: Config) -> Registry:
    """The registered model of this target and family."""
    from pipeline.models import read_identity
    from pipeline.stages.context import registry_for, tracking_for

    tracking_for(config).initialise()
    return registry_for(config, read_identity(config).target_id)


def version_number(registry: Registry, place: str) -> int:
    """The version that a number, an alias or `models:/…` means.

    Raises:
        UserError: when there is none, naming what else a drafter can be.
    """
    from pipeline.stages.servers import MODELS, aliased_version, registered_version

    if place.startswith(MODELS):
        return registered_version(registry, place).version
    try:
        return (
            registry.get(int(place)).version
            if place.isdecimal()
            else aliased_version(registry, place).version
        )
    except UserError as error:
        raise UserError(
            f"--drafter {place}: neither a drafter directory ({MANIFEST} is missing) nor a registered one ({error})"
        ) from None

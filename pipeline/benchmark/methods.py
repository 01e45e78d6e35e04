"""Ways of decoding that are compared: plain, fixed lengths, length policies, drafting ahead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafters.errors import UserError
from pipeline.config import PolicyConfig
from pipeline.stage_plan import MANIFEST

METHODS = ("ar", "fixed", "fixed:N", "adaflash", "survival", "throughput", "d3d-sync", "d3d-async")
AR = "ar"
ASYNC = "d3d-async"
_POLICIES = ("fixed", "adaflash", "survival", "throughput")
_D3D = ("d3d-sync", ASYNC)
_HEADS = {
    "adaflash": "length_head.safetensors",
    "survival": "acceptance_head.safetensors",
    "throughput": "acceptance_head.safetensors",
}


@dataclass(frozen=True)
class Method:
    """One way of decoding; `length` is the N of `fixed:N`."""

    name: str
    length: int | None = None

    @property
    def label(self) -> str:
        return self.name if self.length is None else f"{self.name}:{self.length}"

    @property
    def plain(self) -> bool:
        """Decodes without drafts."""
        return self.name == AR

    def policy(self, config: PolicyConfig) -> PolicyConfig:
        """The configured length policy with this method's own name and length in it."""
        name = self.name if self.name in _POLICIES else "fixed"
        return config.model_copy(update={"name": name, "length": self.length})


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter under its label in reports, with what its manifest says."""

    label: str
    directory: Path
    drafter_version: str
    digest: str
    family: str
    block_size: int
    files: frozenset[str]

    def lacks(self, method: Method) -> str | None:
        """Why this drafter cannot be decoded with by this method; None if it can."""
        if method.plain:
            return None
        head = _HEADS.get(method.name)
        if head is not None and head not in self.files:
            return f"drafter {self.label} has no {head.partition('.')[0].replace('_', ' ')}"
        if method.name in _D3D and self.family != "d3d":
            return f"drafter {self.label} is of family {self.family}, not d3d"
        if method.length is not None and not 1 <= method.length <= self.block_size:
            return f"drafter {self.label} has blocks of {self.block_size}"
        return None


def parse_method(text: str) -> Method:
    """A method by the name that users write.

    Raises:
        UserError: unknown name, or a length that is none.
    """
    name, colon, number = text.strip().lower().partition(":")
    if colon and name == "fixed" and number.isdecimal() and int(number) >= 1:
        return Method(name, int(number))
    if colon or name not in METHODS:
        raise UserError(f"--method {text}: unknown; use one of {', '.join(METHODS)}")
    return Method(name)


def parse_methods(texts: Sequence[str]) -> list[Method]:
    """Methods in the order given; a repeated one is a mistake.

    Raises:
        UserError: as `parse_method`, or for a repetition.
    """
    methods = [parse_method(text) for text in texts]
    for method in methods:
        if methods.count(method) > 1:
            raise UserError(f"--method {method.label}: given twice")
    return methods


def describe_drafter(label: str | None, directory: Path) -> DrafterChoice:
    """A drafter as its manifest tells; its files are checked when it is loaded.

    Raises:
        UserError: no readable manifest there.
    """
    import hashlib

    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        return DrafterChoice(
            label=label or str(manifest["drafter_version"]),
            directory=directory,
            drafter_version=str(manifest["drafter_version"]),
            # as `drafters.checkpoint.drafter_digest`, which would load torch
            digest=hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest(),
            family=str(manifest.get("family", "dflash")),
            block_size=int(manifest["block_size"]),
            files=frozenset(files),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--drafter {directory}: not a drafter directory ({MANIFEST} is missing or damaged: {error})"
        ) from None


def default_methods(drafters: Sequence[DrafterChoice]) -> list[Method]:
    """Plain decoding, and what these drafters are made for."""
    methods = [Method(AR)]
    if any(drafter.family == "d3d" for drafter in drafters):
        methods += [Method(name) for name in _D3D]
    if any(drafter.family != "d3d" for drafter in drafters):
        methods.append(Method("fixed"))
    adaptive = Method("adaflash")
    return [*methods, adaptive] if any(d.lacks(adaptive) is None for d in drafters) else methods


def pair_up(
    drafters: Sequence[DrafterChoice], methods: Sequence[Method]
) -> list[tuple[DrafterChoice, Method]]:
    """Every drafter with every method it can do; plain decoding once.

    Raises:
        UserError: two drafters under one label, or a method that none of them can do.
    """
    labels = [drafter.label for drafter in drafters]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"--drafter: {repeated[0]} names two of them; give labels, as --drafter LABEL=PLACE")
    pairs: list[tuple[DrafterChoice, Method]] = []
    for method in methods:
        reasons = [drafter.lacks(method) for drafter in drafters]
        fitting = [d for d, reason in zip(drafters, reasons, strict=True) if reason is None]
        if not fitting:
            raise UserError(f"--method {method.label}: {'; '.join(r for r in reasons if r is not None)}")
        pairs += [(drafter, method) for drafter in (fitting[:1] if method.plain else fitting)]
    return pairs

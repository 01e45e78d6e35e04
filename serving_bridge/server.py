"""What a server that runs a drafter must offer to be kept fresh: one interface for the embedded engine and SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class SwapReport:
    """What a swap did. `target_checksum` must be the same before and after: a swap touches the draft only."""

    old_version: str
    new_version: str
    draft_checksum: str
    target_checksum: str
    pause_ms: float


class SwapError(RuntimeError):
    """The swap did not happen; the server still runs the last good drafter."""


class DraftServer(Protocol):
    """A running server whose drafter can be replaced between rounds."""

    @property
    def drafter_version(self) -> str:
        """Version serving now."""
        ...

    def swap(self, directory: Path) -> SwapReport:
        """Replace drafter and length head by a serving checkpoint, without stopping requests.

        Raises:
            SwapError: nothing changed.
        """
        ...

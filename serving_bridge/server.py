"""What a server that runs a drafter must offer to be kept fresh: one interface for the embedded engine and SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class SwapReport:
    """What a swap did.

    target_checksum: the same before and after, or the swap would have failed: it touches the draft only.
    pause_ms: for which requests waited.
    old_draft_checksum: before the swap; empty where the server does not tell.
    route: how the weights went there.
    note: what the operator should know, such as stale entries left in a prefix cache.
    """

    old_version: str
    new_version: str
    draft_checksum: str
    target_checksum: str
    pause_ms: float
    old_draft_checksum: str = ""
    route: str = "memory"
    note: str = ""


class SwapError(RuntimeError):
    """The swap did not happen; the server still runs the last good drafter."""


class ServerLost(SwapError):
    """The server cannot be reached, or is in a state that it must be restarted from."""


class DraftServer(Protocol):
    """A running server whose drafter can be replaced between rounds."""

    @property
    def drafter_version(self) -> str:
        """Version serving now.

        Raises:
            ServerLost: when the server does not answer.
        """
        ...

    def resume(self) -> None:
        """Make sure that requests are not held up by a swap that was cut off.

        Raises:
            ServerLost: when the server does not answer.
        """
        ...

    def swap(self, directory: Path) -> SwapReport:
        """Replace drafter and length head by a serving checkpoint, without stopping requests.

        Raises:
            SwapError: nothing changed.
        """
        ...

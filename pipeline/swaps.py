"""Bringing servers to the champion, and what is noted of a swap."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafters.checkpoint import verify_manifest
from drafters.errors import UserError
from pipeline.console import say
from serving_bridge.server import DraftServer, SwapError, SwapReport


@dataclass
class SwapNote:
    """A swap that happened, for the record."""

    time: float
    old_version: str
    new_version: str
    pause_ms: float
    route: str
    note: str = ""

    @classmethod
    def of(cls, report: SwapReport) -> SwapNote:
        """Stamped with the present time, unix seconds."""
        return cls(
            time.time(), report.old_version, report.new_version, report.pause_ms, report.route, report.note
        )


def bring_to(
    servers: Sequence[DraftServer],
    checkpoint: Path | None,
    note: Callable[[SwapNote], object] = lambda _: None,
) -> None:
    """Let servers go on, and swap those that are not on a checkpoint (None: as they are) to it.

    `note` is given each swap.

    Raises:
        UserError: naming a server that does not answer or will not swap.
    """
    try:
        for server in servers:
            server.resume()
        behind = [
            server
            for server in servers
            if checkpoint is not None and server.drafter_version != drafter_version_of(checkpoint)
        ]
    except SwapError as error:
        raise UserError(f"{error}; start the server, or leave it out, and continue with --resume") from error
    if checkpoint is not None:
        swap_back(behind, checkpoint, note)


def swap_back(
    servers: Sequence[DraftServer], champion: Path, note: Callable[[SwapNote], object] = lambda _: None
) -> None:
    """Swap servers to the champion, as many as will; `note` is given each swap.

    Raises:
        UserError: for those that would not, after all were tried.
    """
    failures: list[SwapError] = []
    for server in servers:
        try:
            report = server.swap(champion)
        except SwapError as error:
            failures.append(error)
        else:
            note(SwapNote.of(report))
            say(f"server brought from {report.old_version} to the champion {report.new_version}")
    if failures:
        raise UserError(
            f"{len(failures)} of {len(servers)} servers cannot be brought to the champion: {failures[0]}; "
            "repair or restart them, then continue with --resume"
        )


def drafter_version_of(checkpoint: Path) -> str:
    """The version that records of this checkpoint carry."""
    return str(verify_manifest(checkpoint)["drafter_version"])

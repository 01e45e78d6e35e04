"""The spool: a log transport that is a directory of segment files, for any number of writers and readers.

``spool_layout`` describes the directory. This module is the way in, and holds what an operator does to a spool.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from serving_bridge.spool_layout import SpoolError, SpoolLayout, file_size, sync_directory
from serving_bridge.spool_quarantine import count_quarantined
from serving_bridge.spool_reader import SpoolReader, unread_bytes
from serving_bridge.spool_writer import SpoolWriter

__all__ = [
    "SpoolError",
    "SpoolReader",
    "SpoolWriter",
    "describe",
    "forget_reader",
    "retain",
    "seal_orphans",
]


def retain(directory: str | os.PathLike[str], max_total_bytes: int | None = None) -> list[int]:
    """Delete the oldest segments that no registered reader needs, and return their numbers.

    A reader needs everything from the older of its checkpointed cursor and its ``keep_from`` on. Given
    ``max_total_bytes``, history within that size is kept; without, all of it goes. Without a registered reader, or
    if a registration is unreadable (``SpoolError``), nothing is deleted. The newest segment always stays, as
    numbering continues from it.
    """
    layout = _existing(directory)
    deleted: list[int] = []
    with layout.lock():
        readers = layout.load_readers().values()
        sequences = layout.sequences()
        if not readers or not sequences:
            return deleted
        floor = min(min(state.floor for state in readers).segment, sequences[-1])
        excess = sum(map(layout.size, sequences)) - (max_total_bytes or 0)
        for sequence in sequences:
            if sequence >= floor or excess <= 0:
                break
            excess -= layout.size(sequence)
            layout.segment(sequence).unlink()
            deleted.append(sequence)
        if deleted:
            sync_directory(layout.segments)
    return deleted


def forget_reader(directory: str | os.PathLike[str], name: str) -> bool:
    """Remove a retired reader's registration, so that it holds back retention no longer; False if it had none."""
    layout = _existing(directory)
    with layout.lock():
        known = layout.reader_file(name).exists()
        layout.reader_file(name).unlink(missing_ok=True)
    return known


def seal_orphans(directory: str | os.PathLike[str]) -> int:
    """Seal what dead writers left open and return the number of new segments; for when no writer will start."""
    return _existing(directory).seal_orphans()


def describe(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the state of a spool as plain values, for status views."""
    layout = _existing(directory)
    sequences = layout.sequences()
    open_sizes = [file_size(path) for path in layout.open.glob("*.jsonl.tmp")]
    quarantined = count_quarantined(layout)
    return {
        "directory": str(layout.root),
        "segments": len(sequences),
        "first_segment": sequences[0] if sequences else None,
        "last_segment": sequences[-1] if sequences else None,
        "sealed_bytes": sum(map(layout.size, sequences)),
        "open_files": len(open_sizes),
        "open_bytes": sum(open_sizes),
        "readers": {
            name: {
                "cursor": state.cursor.to_json(),
                "keep_from": None if state.keep_from is None else state.keep_from.to_json(),
                "lag_bytes": unread_bytes(layout, state.cursor),
            }
            for name, state in layout.load_readers().items()
        },
        "quarantined": quarantined.total(),
        "quarantine_reasons": dict(quarantined),
    }


def _existing(directory: str | os.PathLike[str]) -> SpoolLayout:
    layout = SpoolLayout(Path(directory))
    if not layout.segments.is_dir():
        raise SpoolError(f"{layout.root}: not a spool (it has no segments/); check the path")
    return layout

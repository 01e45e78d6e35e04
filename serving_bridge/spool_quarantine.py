"""Where a spool keeps the lines that could not be used."""

from __future__ import annotations

import base64
import os
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from serving_bridge.records import RecordError
from serving_bridge.spool_layout import SpoolLayout, file_size
from serving_bridge.transport import Cursor

MAX_LINES_PER_SEGMENT = 10_000
MAX_KEPT_BYTES = 64 * 1024
"""Only the head of a bad line is copied; the segment itself holds the rest until retention."""


class _Place(msgspec.Struct):
    offset: int
    kind: str


class Quarantine:
    """Bad lines with their reason, each once however often and by however many readers it is met.

    A segment of nothing but short garbage would grow many times over in here, hence the limit per segment.
    """

    def __init__(self, layout: SpoolLayout) -> None:
        self._layout = layout
        self._path: Path | None = None
        self._size = 0
        self._offsets: set[int] = set()

    def add(self, place: Cursor, head: bytes, size: int, error: RecordError) -> None:
        """Keep the line of ``size`` bytes at ``place`` that begins with ``head``; raises ``OSError``."""
        with self._layout.lock():
            path = self._layout.quarantine / self._layout.segment(place.segment).name
            self._load(path)
            if place.offset in self._offsets or len(self._offsets) >= MAX_LINES_PER_SEGMENT:
                return
            entry = msgspec.json.encode(_entry(place, head[:MAX_KEPT_BYTES], size, error)) + b"\n"
            with path.open("ab") as file:
                file.write(entry)
            self._offsets.add(place.offset)
            self._size += len(entry)

    def _load(self, path: Path) -> None:
        size = file_size(path)
        if path == self._path and size == self._size:
            return
        data = path.read_bytes() if size else b""
        whole = data.rfind(b"\n") + 1
        if whole < size:
            # A crash cut the last entry short; its line will be met again.
            os.truncate(path, whole)
        self._offsets = {entry.offset for entry in _entries(data[:whole])}
        self._path, self._size = path, whole


def count_quarantined(layout: SpoolLayout) -> Counter[str]:
    """Return how many lines are in quarantine by kind of ``RecordError``."""
    kinds: Counter[str] = Counter()
    for path in layout.quarantine.glob("*.jsonl"):
        kinds.update(entry.kind for entry in _entries(path.read_bytes()))
    return kinds


def _entry(place: Cursor, head: bytes, size: int, error: RecordError) -> dict[str, Any]:
    entry = {
        "segment": place.segment,
        "offset": place.offset,
        "bytes": size,
        "kind": error.kind,
        "reason": error.reason,
    }
    try:
        return entry | {"text": head.decode()}
    except UnicodeDecodeError:
        return entry | {"base64": base64.b64encode(head).decode()}


def _entries(data: bytes) -> list[_Place]:
    entries = []
    for line in data.splitlines():
        try:
            entries.append(msgspec.json.decode(line, type=_Place))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return entries

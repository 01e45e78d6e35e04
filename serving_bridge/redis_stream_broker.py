"""One record stream in its broker: keys, positions, registered readers, and the calls that both sides make.

::

    NAME                     the stream; each entry has one field, ``record``, with one JSON line
    NAME (consumer groups)   one per registered reader; its last delivered id is the committed cursor
    NAME:readers             hash of what each registered reader keeps from retention, '' for nothing but its cursor
    NAME:writer:ID           number of a writer's last record, so that a retry does not append it twice; expires
    NAME:quarantine          heads of the entries that could not be used, under their own id; capped
    NAME:quarantine:kinds    hash of how many there were by kind of ``RecordError``

A ``Cursor`` is the first id not yet read: ``segment`` its milliseconds, ``offset`` its sequence number.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from serving_bridge import redis_stream_scripts as scripts
from serving_bridge.records import MAX_LINE_BYTES, RecordError
from serving_bridge.redis_stream_address import (
    BrokerError,
    StreamError,
    broker_errors,
    connect,
    parse_url,
)
from serving_bridge.transport import Cursor

MAX_QUARANTINED = 1000
MAX_KEPT_BYTES = 4096
"""Of a bad entry only the head is copied; the stream itself holds the rest until retention."""

MARK_LIFETIME_S = 7 * 24 * 3600
"""How long an outage may last for a retry still to be told from a new record."""

TIMEOUT_S = 5.0
"""Longest wait for the broker's socket."""

_BATCH_RECORDS = 256
_BATCH_BYTES = 8 * 1024 * 1024
_LAST_SEQUENCE = 2**64 - 1
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_ID = re.compile(rb"(\d{1,20})-(\d{1,20})")


class Entry(NamedTuple):
    """An entry as it came: ``size`` of its line in bytes, None if it has none; of too long a line only the head."""

    place: Cursor
    size: int | None
    line: bytes


class StreamView(NamedTuple):
    """A stream at one instant.

    first: id of the oldest entry, None if there is none. last: the greatest id ever given. removed: entries ever
    deleted. registered: whether the reader that asked is. entries: those from its position on, not always all.
    """

    exists: bool
    first: Cursor | None
    last: Cursor
    removed: int
    registered: bool
    entries: list[Entry]


class ReaderState(msgspec.Struct, frozen=True):
    """What a reader has registered: its checkpointed cursor, and what its replay buffer still refers to."""

    cursor: Cursor
    keep_from: Cursor | None = None

    @property
    def floor(self) -> Cursor:
        """The oldest position this reader may still ask for."""
        return self.cursor if self.keep_from is None else min(self.cursor, self.keep_from)


class Registrations(NamedTuple):
    """The registered readers by name, and the broker's own words, by which ``trim`` knows they have not changed."""

    readers: dict[str, ReaderState]
    flat: list[bytes]


@dataclass(frozen=True)
class RetryPolicy:
    """How long a call is repeated while the broker fails, in seconds; 0 is a single try."""

    patience_s: float = 0.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0


class StreamBroker:
    """The calls on one stream; nothing is sent before the first one.

    All of them raise ``BrokerError`` for what waiting may cure, once ``retry`` is used up, and ``StreamError`` for
    what it will not.
    """

    def __init__(self, url: str, timeout_s: float, retry: RetryPolicy | None = None) -> None:
        self.address = parse_url(url)
        self._client = connect(self.address, timeout_s)
        self._retry = retry or RetryPolicy()
        self._stream = self.address.stream
        self._readers = f"{self._stream}:readers"
        self._quarantine = f"{self._stream}:quarantine"
        self._kinds = f"{self._stream}:quarantine:kinds"

    def append(self, writer: str, number: int, line: bytes) -> None:
        """Append record ``number`` of a writer unless that, or a later one of its records, is there already."""
        mark = f"{self._stream}:writer:{writer}"
        self._run(scripts.APPEND, [self._stream, mark], number, line, MARK_LIFETIME_S)

    def look(
        self, reader: str, position: Cursor, limit: int, max_line_bytes: int = MAX_LINE_BYTES
    ) -> StreamView:
        """Return the stream's state with at most ``limit`` entries from ``position`` on, fewer if they are big."""
        limit = min(limit, _BATCH_RECORDS)
        arguments = (reader, to_id(position), limit, _BATCH_BYTES, max_line_bytes, MAX_KEPT_BYTES)
        exists, first, last, removed, registered, entries = self._run(
            scripts.LOOK, [self._stream], *arguments
        )
        return StreamView(
            bool(exists),
            from_id(first) if first else None,
            from_id(last),
            int(removed),
            bool(registered),
            [Entry(from_id(place), None if size < 0 else size, line) for place, size, line in entries],
        )

    def registrations(self) -> Registrations:
        """Return the registered readers; raises ``StreamError`` if a registration cannot be read."""
        flat: list[bytes] = self._run(scripts.READERS, [self._stream, self._readers])
        readers = {}
        for name, last, keep_from in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            label = name.decode(errors="replace")
            if keep_from and not _ID.fullmatch(keep_from):
                raise StreamError(
                    f"{self.address}: {self._readers} holds no position for {label}; "
                    "commit that reader again, or forget it"
                )
            readers[label] = ReaderState(after(from_id(last)), from_id(keep_from) if keep_from else None)
        return Registrations(readers, flat)

    def commit(self, reader: str, cursor: Cursor, keep_from: Cursor | None) -> None:
        """Register a reader, replacing what it had registered."""
        kept = "" if keep_from is None else to_id(keep_from)
        self._run(scripts.COMMIT, [self._stream, self._readers], reader, to_id(before(cursor)), kept)

    def forget(self, reader: str) -> bool:
        """Remove a registration; False if there was none."""
        return bool(self._run(scripts.FORGET, [self._stream, self._readers], reader))

    def anchor(self, floor: Cursor) -> Cursor | None:
        """Return the first record to keep for a reader that goes on at ``floor``; None if it has all before it.

        That is the last record it has had. By it a reader that is up to date is told from one that was left behind,
        as what ``XTRIM`` deletes leaves no other trace.
        """
        place = self._run(scripts.ANCHOR, [self._stream], to_id(floor))
        return from_id(place) if place else None

    def oldest(self, stop: Cursor, size: int, limit: int) -> tuple[Cursor | None, int]:
        """Return the place of the last of the oldest records that hold ``size`` bytes, and the bytes they hold.

        At most ``limit`` records before ``stop`` are looked at; None if there are none.
        """
        place, found = self._run(scripts.OLDEST, [self._stream], to_id(stop), size, limit)
        return (from_id(place) if place else None), int(found)

    def trim(self, floor: Cursor, known: Registrations) -> int | None:
        """Delete what lies before ``floor`` and return how many records; None if the registrations have changed."""
        deleted = int(self._run(scripts.TRIM, [self._stream, self._readers], to_id(floor), *known.flat))
        return None if deleted < 0 else deleted

    def quarantine(self, entry: Entry, error: RecordError) -> None:
        """Keep a bad entry once, and count it."""
        self._run(
            scripts.QUARANTINE,
            [self._quarantine, self._kinds],
            *(MAX_QUARANTINED, to_id(entry.place), error.kind, entry.size or 0),
            *(error.reason, entry.line[:MAX_KEPT_BYTES]),
        )

    def quarantined(self) -> dict[str, int]:
        """Return how many bad entries were met by kind."""
        counts: dict[bytes, bytes] = self._call("HGETALL", self._kinds)
        return {kind.decode(errors="replace"): int(count) for kind, count in counts.items()}

    def size(self) -> tuple[int, int]:
        """Return the number of records and the bytes of memory that the broker reckons they take."""
        return int(self._call("XLEN", self._stream)), int(self._call("MEMORY USAGE", self._stream) or 0)

    def durability(self) -> dict[str, Any]:
        """Return what decides whether records survive the broker, see ``redis_stream``."""
        with broker_errors(self.address):
            memory, persistence, replication = map(
                self._client.info, ("memory", "persistence", "replication")
            )
        return {
            "append_only_file": bool(persistence.get("aof_enabled")),
            "maxmemory_policy": memory.get("maxmemory_policy"),
            "replicas": replication.get("connected_slaves"),
        }

    def close(self) -> None:
        """Close the connections; a later call opens them again."""
        self._client.close()

    def _run(self, script: str, keys: list[str], *arguments: object) -> Any:
        return self._call("EVAL", script, len(keys), *keys, *arguments)

    def _call(self, *command: object) -> Any:
        deadline = time.monotonic() + self._retry.patience_s
        wait = self._retry.first_wait_s
        while True:
            try:
                with broker_errors(self.address):
                    return self._client.execute_command(*command)
            except BrokerError:
                if time.monotonic() + wait > deadline:
                    raise
            time.sleep(wait)
            wait = min(2 * wait, self._retry.longest_wait_s)


def check_reader_name(name: str) -> str:
    """Return the name; raises ``StreamError`` if it cannot be a reader's."""
    if not _NAME.fullmatch(name):
        raise StreamError(f"reader name {name!r}: use 1 to 100 of A-Z a-z 0-9 _ . -")
    return name


def to_id(cursor: Cursor) -> str:
    """Return a position as Redis writes it."""
    return f"{cursor.segment}-{cursor.offset}"


def from_id(text: bytes) -> Cursor:
    """Return the position that Redis has written."""
    match = _ID.fullmatch(text)
    if match is None:
        raise StreamError(f"the broker gives {text[:50]!r} for an identifier of a stream")
    return Cursor(int(match[1]), int(match[2]))


def after(place: Cursor) -> Cursor:
    """Return the position right after an id; at 0-0, which no entry has, it is the beginning."""
    if place == Cursor():
        return place
    at_end = place.offset >= _LAST_SEQUENCE
    return Cursor(place.segment + 1, 0) if at_end else Cursor(place.segment, place.offset + 1)


def before(position: Cursor) -> Cursor:
    """Return the greatest id before a position."""
    if position.offset:
        return Cursor(position.segment, position.offset - 1)
    return Cursor(position.segment - 1, _LAST_SEQUENCE) if position.segment else position

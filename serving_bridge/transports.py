"""One way in to every record log: a path is a spool, ``redis://`` and ``rediss://`` are Redis Streams."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from serving_bridge import redis_stream, spool
from serving_bridge.records import VerificationRecord
from serving_bridge.transport import BufferedWriter, LogReader, RecordSink

LogPlace = str | os.PathLike[str]
"""A path, ``spool:PATH``, or ``redis[s]://HOST:PORT/DB?stream=NAME``."""

LOG_ERRORS = (spool.SpoolError, redis_stream.StreamError)
"""What a log raises if it cannot be used as asked; the messages name the fix."""

_SPOOL = "spool:"
_STREAMS = ("redis:", "rediss:")


def open_writer(
    place: LogPlace,
    *,
    capacity: int = 1024,
    on_drop: Callable[[VerificationRecord], object] | None = None,
    spool_max_bytes: int = 8 * 1024 * 1024,
    spool_max_age_s: float = 60.0,
) -> BufferedWriter:
    """Return a writer that never blocks serving; the spool's settings say when it seals a segment.

    A broker need not be up yet. Raises one of ``LOG_ERRORS`` for a place that makes no sense, and ``OSError`` for a
    directory that cannot be made.
    """
    sink: RecordSink
    if is_stream(place):
        sink = redis_stream.RedisStreamSink(str(place))
    else:
        sink = spool.SpoolWriter(_directory(place), spool_max_bytes, spool_max_age_s)
    return BufferedWriter(sink, capacity, on_drop)


def open_reader(place: LogPlace, name: str, quarantine: bool = True) -> LogReader:
    """Return a reader at the cursor that ``name`` has committed, or else at the oldest record.

    Raises one of ``LOG_ERRORS`` or, if a broker stays unreachable, ``OSError``; so do the reader's own methods.
    """
    if is_stream(place):
        return redis_stream.RedisStreamReader(str(place), name, quarantine)
    return spool.SpoolReader(_directory(place), name, quarantine)


def retain(place: LogPlace, max_total_bytes: int | None = None) -> int:
    """Delete what no registered reader needs, see ``spool.retain``; return how many segments or records went."""
    if is_stream(place):
        return redis_stream.retain(str(place), max_total_bytes)
    return len(spool.retain(_directory(place), max_total_bytes))


def forget_reader(place: LogPlace, name: str) -> bool:
    """Remove a retired reader's registration; False if it had none."""
    if is_stream(place):
        return redis_stream.forget_reader(str(place), name)
    return spool.forget_reader(_directory(place), name)


def describe(place: LogPlace) -> dict[str, Any]:
    """Return the state of a log as plain values; ``readers`` and ``quarantined`` mean the same for all."""
    return redis_stream.describe(str(place)) if is_stream(place) else spool.describe(_directory(place))


def is_stream(place: LogPlace) -> bool:
    """Whether a place is meant as a URL, not as a path."""
    text = os.fspath(place)
    # A URL that lost a slash, as in a Path, is for parse_url to refuse, not a name for a directory.
    return not text.startswith(_SPOOL) and ("://" in text or text.startswith(_STREAMS))


def _directory(place: LogPlace) -> str:
    return os.fspath(place).removeprefix(_SPOOL)

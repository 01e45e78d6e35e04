"""Interfaces of the record log, and the bounded buffer that keeps a slow log away from serving."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from serving_bridge.records import VerificationRecord

_log = logging.getLogger(__name__)


class Cursor(msgspec.Struct, frozen=True, order=True):
    """A position in the log between two records, ordered as the log is."""

    segment: int = 0
    offset: int = 0

    def to_json(self) -> dict[str, int]:
        """Return a plain dict, to be kept in a checkpoint."""
        return {"segment": self.segment, "offset": self.offset}

    @classmethod
    def from_json(cls, value: Any) -> Cursor:
        """Rebuild a cursor from ``to_json``; raises ``ValueError`` for anything else."""
        try:
            cursor = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"not a cursor: {error}") from error
        if not isinstance(value, dict) or value.keys() != {"segment", "offset"}:
            raise ValueError("not a cursor: expected the keys segment and offset")
        if cursor < cls(0, 0) or cursor.offset < 0:
            raise ValueError("not a cursor: negative position")
        return cursor


class Delivery(msgspec.Struct, frozen=True):
    """A record with its place in the log.

    cursor: position right after the record: what to commit once the record is safely kept.
    start: position of the record itself: ``seek(start)`` delivers it again, and as ``keep_from`` it holds it back
        from retention.
    """

    cursor: Cursor
    record: VerificationRecord
    start: Cursor


class LogWriter(Protocol):
    """What serving sees: it neither blocks nor raises."""

    @property
    def written(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    def write(self, record: VerificationRecord) -> bool:
        """Take a record; False if it was refused."""
        ...

    def close(self) -> object: ...


class LogReader(Protocol):
    """An ordered log with a cursor that survives the reader."""

    @property
    def cursor(self) -> Cursor:
        """Position after the last record returned."""
        ...

    @property
    def quarantined(self) -> int:
        """Entries that were no records, and were put aside."""
        ...

    def read(self, limit: int) -> list[Delivery]:
        """Return up to ``limit`` next records, fewer if there are no more yet."""
        ...

    def seek(self, cursor: Cursor) -> None: ...

    def commit(self, cursor: Cursor, keep_from: Cursor | None = None) -> None:
        """Register durably that a checkpoint holds everything before ``cursor``.

        Records from ``keep_from`` on (default: ``cursor``) stay in the log.
        """
        ...

    def lag(self) -> int:
        """Return how much of the log is still unread, in the transport's own unit."""
        ...


class RecordSink(Protocol):
    """Where ``BufferedWriter`` delivers to: it may block, and raise ``OSError`` for what a retry can cure.

    A failed ``write`` must leave the record out. Any other exception means that this record will never do.
    """

    def write(self, record: VerificationRecord) -> bool: ...

    def maybe_roll(self) -> bool:
        """Called now and then while no records arrive."""
        ...

    def roll(self) -> bool:
        """Make everything written visible to readers; called from any thread."""
        ...

    def close(self) -> object: ...


class BufferedWriter:
    """A ``LogWriter`` with a thread between serving and a sink that may be slow, full or broken.

    ``capacity`` records wait at most; then the oldest is dropped and counted, and ``on_drop`` is told. ``OSError`` of
    the sink is retried for ever with a delay that doubles from ``backoff_s`` to ``max_backoff_s``; records that
    the sink refuses otherwise are counted as rejected. ``sleep`` replaces the wait between retries.
    """

    def __init__(
        self,
        sink: RecordSink,
        capacity: int = 1024,
        on_drop: Callable[[VerificationRecord], object] | None = None,
        *,
        idle_s: float = 1.0,
        backoff_s: float = 0.1,
        max_backoff_s: float = 5.0,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._sink = sink
        self._capacity = capacity
        self._on_drop = on_drop
        self._idle_s = idle_s
        self._backoff_s, self._max_backoff_s = backoff_s, max_backoff_s
        self._wake = threading.Event()
        self._sleep = self._wake.wait if sleep is None else sleep
        self._changed = threading.Condition()
        self._tickets = itertools.count()
        self._queue: deque[tuple[int, VerificationRecord]] = deque()
        self._inflight: int | None = None
        self._closing = self._abandoned = self._failing = False
        self._written = self._dropped = self._rejected = self._sink_failures = 0
        self._last_error: str | None = None
        self._thread = threading.Thread(target=self._run, name="record-writer", daemon=True)
        self._thread.start()

    @property
    def written(self) -> int:
        """Records the sink has taken."""
        return self._written

    @property
    def dropped(self) -> int:
        """Records lost: pushed out of the full buffer, offered after ``close``, or left over by it."""
        return self._dropped

    def write(self, record: VerificationRecord) -> bool:
        """Queue a record without waiting for the sink; False once the writer is closed."""
        oldest: VerificationRecord | None = None
        with self._changed:
            if accepted := not self._closing:
                if len(self._queue) >= self._capacity:
                    oldest = self._queue.popleft()[1]
                self._queue.append((next(self._tickets), record))
                self._changed.notify_all()
            else:
                oldest = record
            self._dropped += oldest is not None
        self._tell_drop(oldest)
        return accepted

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the sink has everything queued so far and has made it visible to readers.

        False if that took longer than ``timeout`` seconds or the sink could not do the latter.
        """
        with self._changed:
            last = next(self._tickets)
            if not self._changed.wait_for(lambda: self._oldest_pending() > last, timeout):
                return False
        try:
            self._sink.roll()
        except Exception as error:
            self._note_failure(error)
            return False
        return True

    def close(self, timeout: float | None = 5.0) -> bool:
        """Stop taking records, drain for up to ``timeout`` seconds, close the sink; True if nothing was left over.

        What a failing sink has not taken by then counts as dropped. A sink that hangs keeps its (daemon) thread.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake.set()
        self._thread.join(timeout)
        if not self._thread.is_alive():
            return not self._abandoned
        with self._changed:
            self._abandoned = True
            left = [record for _, record in self._queue]
            self._queue.clear()
            self._dropped += len(left)
        self._wake.set()
        for record in left:
            self._tell_drop(record)
        return False

    def stats(self) -> dict[str, int | str | None]:
        """Return the counters, for status views and metrics."""
        with self._changed:
            return {
                "capacity": self._capacity,
                "buffered": len(self._queue) + (self._inflight is not None),
                "written": self._written,
                "dropped": self._dropped,
                "rejected": self._rejected,
                "sink_failures": self._sink_failures,
                "last_error": self._last_error,
            }

    def _run(self) -> None:
        delay = self._backoff_s
        while (item := self._next()) is not None:
            try:
                if not self._sink.write(item[1]):
                    raise ValueError("the sink refused the record")
            except OSError as error:
                self._note_failure(error)
                self._put_back(item)
                self._sleep(delay)
                delay = self._backoff_s if self._wake.is_set() else min(2 * delay, self._max_backoff_s)
                self._wake.clear()
            except Exception as error:
                self._finish(rejected=error)
            else:
                delay = self._backoff_s
                self._finish()
        try:
            self._sink.close()
        except Exception as error:
            self._note_failure(error)

    def _next(self) -> tuple[int, VerificationRecord] | None:
        while True:
            with self._changed:
                if self._queue:
                    item = self._queue.popleft()
                    self._inflight = item[0]
                    return item
                if self._closing:
                    return None
                if self._changed.wait(self._idle_s):
                    continue
            try:
                self._sink.maybe_roll()
            except Exception as error:
                self._note_failure(error)

    def _put_back(self, item: tuple[int, VerificationRecord]) -> None:
        with self._changed:
            self._inflight = None
            if keep := len(self._queue) < self._capacity and not self._abandoned:
                self._queue.appendleft(item)
            else:
                self._dropped += 1
            self._changed.notify_all()
        if not keep:
            self._tell_drop(item[1])

    def _finish(self, rejected: Exception | None = None) -> None:
        with self._changed:
            self._inflight = None
            if rejected is None:
                self._written += 1
                self._failing = False
            else:
                self._rejected += 1
                self._last_error = f"{type(rejected).__name__}: {rejected}"
            self._changed.notify_all()

    def _oldest_pending(self) -> float:
        if self._inflight is not None:
            return self._inflight
        return self._queue[0][0] if self._queue else float("inf")

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            self._sink_failures += 1
            first, self._failing = not self._failing, True
            self._last_error = f"{type(error).__name__}: {error}"
        if first:
            _log.warning("record log fails, records are buffered: %s", error)

    def _tell_drop(self, record: VerificationRecord | None) -> None:
        if record is not None and self._on_drop is not None:
            # A faulty observer must not reach the serving thread.
            with contextlib.suppress(Exception):
                self._on_drop(record)

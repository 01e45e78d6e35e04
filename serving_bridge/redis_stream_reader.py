"""The reading side of the record stream."""

from __future__ import annotations

import logging
from collections import Counter

from serving_bridge.records import MAX_LINE_BYTES, RecordError, VerificationRecord, decode
from serving_bridge.redis_stream_address import BrokerError, StreamError
from serving_bridge.redis_stream_broker import (
    TIMEOUT_S,
    Entry,
    RetryPolicy,
    StreamBroker,
    StreamView,
    after,
    check_reader_name,
    to_id,
)
from serving_bridge.transport import Cursor, Delivery

_log = logging.getLogger(__name__)


class RedisStreamReader:
    """Delivers the records of a stream in order, from its registered cursor on.

    A reader that has never committed starts at the oldest record, and retention does not know it:
    ``commit(reader.cursor)`` registers it, as a consumer group. Entries that are no valid records are passed over,
    counted, and copied into the quarantine unless told not to. While the broker fails, each call tries again for
    ``patience_s`` and then raises ``BrokerError``, an ``OSError``; the cursor then stays where it is.
    """

    def __init__(
        self,
        url: str,
        name: str,
        quarantine: bool = True,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = 30.0,
    ) -> None:
        self._name = check_reader_name(name)
        self._broker = StreamBroker(url, timeout_s, RetryPolicy(patience_s))
        self._max_line_bytes = max_line_bytes
        self._keeps_bad = quarantine
        state = self._broker.registrations().readers.get(name)
        self._registered = state is not None
        self._cursor = self._oldest() if state is None else state.cursor
        self._counted_to = Cursor()
        self._reasons: Counter[str] = Counter()

    @property
    def cursor(self) -> Cursor:
        """Position up to which everything was delivered or passed over."""
        return self._cursor

    @property
    def quarantined(self) -> int:
        """Bad entries passed over so far; going back over them does not count them again."""
        return self._reasons.total()

    @property
    def quarantine_reasons(self) -> Counter[str]:
        """The same by kind of ``RecordError``."""
        return Counter(self._reasons)

    def read(self, limit: int) -> list[Delivery]:
        """Return up to ``limit`` next records; fewer means that there are no more yet.

        Raises ``StreamError`` if the records that come next are gone; the cursor then stays where it is.
        """
        deliveries: list[Delivery] = []
        position = self._cursor
        while (missing := limit - len(deliveries)) > 0:
            view = self._broker.look(self._name, position, missing, self._max_line_bytes)
            if (problem := self._problem(view, position)) is not None:
                # What was found so far is delivered first; the problem is reported by the next call.
                if not deliveries:
                    raise StreamError(problem)
                break
            if not view.entries:
                break
            for entry in view.entries:
                self._take(entry, deliveries)
            position = after(view.entries[-1].place)
        self._cursor = position
        return deliveries

    def seek(self, cursor: Cursor) -> None:
        """Continue at ``cursor``; raises ``StreamError`` if what follows it is gone or if it lies beyond the end."""
        problem = self._problem(self._broker.look(self._name, cursor, 0), cursor)
        if problem is not None:
            raise StreamError(problem)
        self._cursor = cursor

    def commit(self, cursor: Cursor, keep_from: Cursor | None = None) -> None:
        """Register that a checkpoint holds everything before ``cursor``; atomic, and as durable as the broker is.

        Records from the older of ``cursor`` and ``keep_from`` (what the replay buffer still refers to) on are kept.
        """
        self._broker.commit(self._name, cursor, keep_from)
        self._registered = True

    def lag(self) -> int:
        """Return the milliseconds from the first unread record to the newest one, 0 only if nothing is unread."""
        return unread_ms(self._broker, self._cursor)

    def _oldest(self) -> Cursor:
        view = self._broker.look(self._name, Cursor(), 0)
        return after(view.last) if view.first is None else view.first

    def _take(self, entry: Entry, deliveries: list[Delivery]) -> None:
        end = after(entry.place)
        try:
            deliveries.append(Delivery(end, self._decoded(entry), entry.place))
        except RecordError as error:
            if entry.place >= self._counted_to:
                self._reasons[error.kind] += 1
                self._counted_to = end
            self._keep(entry, error)

    def _decoded(self, entry: Entry) -> VerificationRecord:
        if entry.size is None:
            raise RecordError(
                "missing field record: the entry was not written by this program", "missing_field"
            )
        if entry.size > self._max_line_bytes:
            raise RecordError(f"line of {entry.size} bytes exceeds {self._max_line_bytes}", "oversize")
        return decode(entry.line)

    def _keep(self, entry: Entry, error: RecordError) -> None:
        if not self._keeps_bad:
            return
        try:
            self._broker.quarantine(entry, error)
        except (BrokerError, StreamError) as failure:
            _log.warning("the quarantine cannot be written, bad entries are only counted: %s", failure)
            self._keeps_bad = False

    def _problem(self, view: StreamView, position: Cursor) -> str | None:
        """Say what is wrong with reading on at ``position``, None if nothing is."""
        where = f"{self._broker.address}: reader {self._name} needs records from {to_id(position)} on"
        if self._registered and not view.registered:
            return (
                f"{where}, but its registration is gone: the stream was deleted, or lost by a broker that keeps "
                "nothing; see what is left, and commit the reader again"
            )
        left = after(view.last) if view.first is None else view.first
        if view.removed and position < left:
            return (
                f"{where}, but those before {to_id(left)} are gone; restore them, or accept the loss by "
                f"seeking to Cursor({left.segment}, {left.offset})"
            )
        if position > after(view.last):
            return (
                f"{where}, but the last one is {to_id(view.last)}; the cursor belongs to another stream, or the "
                "broker has lost its last records, in which case reading goes on with the next one written"
            )
        return None


def unread_ms(broker: StreamBroker, position: Cursor) -> int:
    """Return the milliseconds from the first record at or after ``position`` to the newest one, 0 if there is none."""
    view = broker.look("", position, 1, max_line_bytes=0)
    if not view.entries:
        return 0
    return view.last.segment - view.entries[0].place.segment + 1

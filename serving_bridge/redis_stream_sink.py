"""The writing side of the record stream."""

from __future__ import annotations

import threading
import uuid

from serving_bridge.records import VerificationRecord, encode
from serving_bridge.redis_stream_address import BrokerError, StreamError
from serving_bridge.redis_stream_broker import TIMEOUT_S, StreamBroker


class RedisStreamSink:
    """Appends records to a stream, where readers see them at once.

    Any number of sinks may share a stream. Writes block on the network for up to ``timeout_s`` and raise
    ``BrokerError``, an ``OSError``: put a ``BufferedWriter`` in front. Making one needs no broker yet.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._broker = StreamBroker(url, timeout_s)
        self._id = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._number = 0
        self._unsure: bytes | None = None
        self._closed = False
        self._written = self._dropped = 0

    @property
    def written(self) -> int:
        """Records the broker has acknowledged."""
        return self._written

    @property
    def dropped(self) -> int:
        """Records offered after ``close``."""
        return self._dropped

    def write(self, record: VerificationRecord) -> bool:
        """Append one record, False after ``close``.

        Raises ``RecordError`` for a record that cannot be encoded or is too large for the broker, and ``OSError`` if
        the broker fails. The record is then not in the log, or the answer was lost: the same record written next is
        appended only if it is not there.
        """
        line = encode(record)
        with self._lock:
            if self._closed:
                self._dropped += 1
                return False
            if line != self._unsure:
                self._number += 1
            self._unsure = line
            try:
                self._broker.append(self._id, self._number, line)
            except StreamError as error:
                # The wrong key or server is no fault of the record, and the operator may put it right.
                raise BrokerError(str(error)) from error
            self._unsure = None
            self._written += 1
        return True

    def maybe_roll(self) -> bool:
        """Nothing to do: what is written is visible."""
        return False

    def roll(self) -> bool:
        """Nothing to do: what is written is visible."""
        return False

    def close(self) -> None:
        """Refuse further records and hang up."""
        with self._lock:
            self._closed = True
            self._broker.close()

"""The record stream: a log transport that is a Redis Stream, for serving and training on different machines.

``redis_stream_broker`` describes the keys. This module is the way in, and holds what an operator does to a stream.

A record is acknowledged when the broker has appended it; how long it then lives is the broker's configuration:

- ``appendonly yes`` with ``appendfsync always``: on the broker's disk before it is acknowledged. With ``everysec``
  a crash of the machine costs about the last second, a crash of the process alone nothing. With snapshots only, or
  neither, everything since the last snapshot is lost.
- Replication is asynchronous, so a failover may lose what was acknowledged last; ``min-replicas-to-write 1`` with a
  small ``min-replicas-max-lag`` bounds that. Clocks of primary and replicas must agree, as ids follow the clock.
- ``maxmemory-policy noeviction``: any other policy may evict the whole stream. A full broker then refuses records,
  which wait in the buffer, but still lets readers read and commit and ``retain`` delete.
- ``proto-max-bulk-len`` (512 MiB as shipped) must exceed ``records.MAX_LINE_BYTES``.
"""

from __future__ import annotations

from typing import Any

from serving_bridge.redis_stream_address import BrokerError, StreamError, parse_url
from serving_bridge.redis_stream_broker import TIMEOUT_S, StreamBroker, after, check_reader_name
from serving_bridge.redis_stream_reader import RedisStreamReader, unread_ms
from serving_bridge.redis_stream_sink import RedisStreamSink
from serving_bridge.transport import Cursor

__all__ = [
    "BrokerError",
    "RedisStreamReader",
    "RedisStreamSink",
    "StreamError",
    "describe",
    "forget_reader",
    "parse_url",
    "retain",
]

_TRIM_RECORDS = 1000


def retain(url: str, max_total_bytes: int | None = None, *, timeout_s: float = 60.0) -> int:
    """Delete the oldest records that no registered reader needs, and return how many.

    A reader needs everything from the older of its checkpointed cursor and its ``keep_from`` on, and the last record
    before, see ``StreamBroker.anchor``; a consumer group that somebody else made counts as a reader. Given
    ``max_total_bytes``, history within that size (the broker's own estimate of its memory) is kept; without, all of
    it goes. Without a registered reader, or if a registration is unreadable (``StreamError``), nothing is deleted.
    """
    broker = _existing(url, timeout_s)
    deleted = 0
    excess = None if max_total_bytes is None else broker.size()[1] - max_total_bytes
    while excess is None or excess > 0:
        known = broker.registrations()
        if not known.readers:
            break
        cut, freed = broker.anchor(min(state.floor for state in known.readers.values())), 0
        if cut is None:
            break
        if excess is not None:
            last, freed = broker.oldest(cut, excess, _TRIM_RECORDS)
            if last is None:
                break
            cut = after(last)
        if (count := broker.trim(cut, known)) is None:
            continue
        deleted += count
        if excess is None:
            break
        excess -= freed
    return deleted


def forget_reader(url: str, name: str) -> bool:
    """Remove a retired reader's registration, so that it holds back retention no longer; False if it had none."""
    return _existing(url).forget(check_reader_name(name))


def describe(url: str) -> dict[str, Any]:
    """Return the state of a stream as plain values, for status views."""
    broker = _existing(url)
    view = broker.look("", Cursor(), 0)
    records, size = broker.size()
    kinds = broker.quarantined()
    return {
        "stream": str(broker.address),
        "records": records,
        "memory_bytes": size,
        "first": None if view.first is None else view.first.to_json(),
        "last": view.last.to_json(),
        "readers": {
            name: {
                "cursor": state.cursor.to_json(),
                "keep_from": None if state.keep_from is None else state.keep_from.to_json(),
                "lag_ms": unread_ms(broker, state.cursor),
            }
            for name, state in broker.registrations().readers.items()
        },
        "quarantined": sum(kinds.values()),
        "quarantine_reasons": kinds,
        "durability": broker.durability(),
    }


def _existing(url: str, timeout_s: float = TIMEOUT_S) -> StreamBroker:
    broker = StreamBroker(url, timeout_s)
    if not broker.look("", Cursor(), 0).exists:
        raise StreamError(f"{broker.address}: no such stream; check the URL's database and stream=NAME")
    return broker

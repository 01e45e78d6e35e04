"""The record stream in Redis: what the contract of all transports does not cover."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from serving_bridge import redis_stream_broker
from serving_bridge.records import RecordError, encode
from serving_bridge.redis_stream import (
    RedisStreamReader,
    RedisStreamSink,
    StreamError,
    describe,
    forget_reader,
    parse_url,
    retain,
)
from serving_bridge.redis_stream_address import PASSWORD_VARIABLE
from serving_bridge.redis_stream_broker import StreamBroker
from serving_bridge.transport import BufferedWriter, Cursor
from serving_bridge.transports import open_writer
from tests.serving_bridge.record_samples import make_record
from tests.serving_bridge.transport_logs import (
    PATIENCE,
    RedisLog,
    failing,
    fill,
    names,
    running_redis,
    wait_until,
)


@pytest.fixture
def redis_log(tmp_path: Path) -> Iterator[RedisLog]:
    with running_redis(tmp_path) as log:
        yield log


def test_the_address_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    address = parse_url("rediss://me:p%40ss@broker.example:7000/3?stream=a:b&ca=/c&cert=/d&key=/e")
    assert (address.host, address.port, address.db, address.stream) == ("broker.example", 7000, 3, "a:b")
    assert (address.tls, address.username, address.password) == (True, "me", "p@ss")
    assert (address.ca, address.cert, address.key) == ("/c", "/d", "/e")
    assert str(address) == "rediss://broker.example:7000/3?stream=a:b"
    assert "p@ss" not in repr(address)
    plain = parse_url("redis://[::1]?stream=s")
    assert (plain.host, plain.port, plain.db, plain.tls, plain.password) == ("::1", 6379, 0, False, None)
    assert str(plain) == "redis://[::1]:6379/0?stream=s"
    monkeypatch.setenv(PASSWORD_VARIABLE, "kept")
    assert parse_url("redis://host?stream=s").password == "kept"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://host/0", "stream=NAME is missing"),
        ("redis://host/0?stream=", "needs one value"),
        ("redis://host/0?stream=a&stream=b", "needs one value"),
        ("redis://host/0?stream=a%20b", "stream=NAME"),
        ("redis://host/0?stream=a&sream=b", "option sream is unknown"),
        ("redis://host/0?stream=a&ca=/x", "needs TLS: rediss://"),
        ("rediss://host/0?stream=a&key=/x", "needs cert"),
        ("redis://host/zero?stream=a", "number of the database"),
        ("redis://host:port/0?stream=a", "host or port"),
        ("redis://:secret/0@host:1/0?stream=a", "%-encode"),
        ("redis://:secret#0@host:1/0?stream=a", "%-encode"),
        ("redis:///0?stream=a", "host is missing"),
        ("unix:///run/redis.sock?stream=a", "unix:// is no known transport"),
    ],
)
def test_wrong_addresses_name_the_fix_and_no_password(url: str, problem: str) -> None:
    with pytest.raises(StreamError, match=problem) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_tls_checks_the_server_and_the_files_must_be_there(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    with pytest.raises(StreamError, match="not a file"):
        RedisStreamSink(f"rediss://host/0?stream=a&ca={authority}")
    authority.write_text("")
    broker = StreamBroker(f"rediss://host/0?stream=a&ca={authority}", 1.0)
    options = broker._client.connection_pool.connection_kwargs
    assert options["ssl_check_hostname"] is True
    assert options["ssl_cert_reqs"] == "required"
    assert options["ssl_ca_certs"] == str(authority)


def test_a_missing_client_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(StreamError, match=r"pip install 'draftsmith\[redis\]'"):
        open_writer("redis://host/0?stream=a")


def test_a_broker_that_hangs_holds_up_nobody_and_gets_nothing_twice(redis_log: RedisLog) -> None:
    writer = BufferedWriter(RedisStreamSink(redis_log.place, timeout_s=0.2), backoff_s=0.001)
    writer.write(make_record("a"))
    assert writer.flush(PATIENCE)
    redis_log.server.freeze()
    assert [writer.write(make_record(name)) for name in "bcd"] == [True] * 3
    # By now the first try lies in the socket of the frozen broker, which will carry it out.
    wait_until(lambda: int(writer.stats()["sink_failures"] or 0) >= 2)
    assert writer.written == 1
    redis_log.server.thaw()
    assert writer.close(PATIENCE)
    assert names(redis_log.reader("trainer").read(9)) == list("abcd")


def test_a_late_first_try_is_not_appended_behind_newer_records(redis_log: RedisLog) -> None:
    broker = StreamBroker(redis_log.place, 5.0)
    for number, name in ((1, "a"), (3, "c"), (2, "b"), (3, "c"), (4, "d")):
        broker.append("writer", number, encode(make_record(name)))
    broker.append("another", 1, encode(make_record("x")))
    assert names(redis_log.reader("trainer").read(9)) == list("acdx")


def test_a_writer_may_start_before_its_broker(redis_log: RedisLog) -> None:
    redis_log.server.kill()
    writer = open_writer(redis_log.place)
    writer.write(make_record("a"))
    wait_until(lambda: bool(writer.stats()["sink_failures"]))
    redis_log.server.start()
    assert writer.close(PATIENCE)
    assert names(redis_log.reader("trainer").read(9)) == ["a"]


def test_a_reader_waits_for_its_broker_and_then_gives_up_in_place(
    redis_log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(redis_log, "ab")
    reader = redis_log.reader("hasty")
    reader.read(1)
    reader.commit(reader.cursor)
    patient = RedisStreamReader(redis_log.place, "patient", patience_s=PATIENCE)
    redis_log.server.kill()
    for _ in range(2):
        with pytest.raises(OSError, match=rf"127.0.0.1:{redis_log.server.port}/0\?stream=records"):
            reader.read(1)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            redis_log.server.start()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(redis_stream_broker, "time", clock)
    assert names(patient.read(9)) == list("ab")
    assert waits == [0.1, 0.2, 0.4]
    assert names(reader.read(9)) == ["b"]


def test_a_full_broker_can_still_be_read_and_emptied(redis_log: RedisLog) -> None:
    redis_log.inject([b"garbage"])
    fill(redis_log, "abc")
    with failing(redis_log, "full"):
        with pytest.raises(OSError, match="OutOfMemory"):
            redis_log.sink().write(make_record("d"))
        reader = redis_log.reader("trainer")
        deliveries = reader.read(2)
        reader.commit(deliveries[1].cursor, keep_from=deliveries[1].start)
        assert describe(redis_log.place)["quarantined"] == 1
        assert retain(redis_log.place) == 2
        assert forget_reader(redis_log.place, "trainer")
    assert names(redis_log.reader("new").read(9)) == ["b", "c"]


def test_a_registered_reader_is_a_consumer_group_at_its_last_record(redis_log: RedisLog) -> None:
    fill(redis_log, "abc")
    reader = redis_log.reader("trainer")
    deliveries = reader.read(3)
    reader.commit(deliveries[1].cursor, keep_from=deliveries[0].start)
    client = redis_log.server.client()
    ids = [entry[0] for entry in client.xrange("records")]
    [group] = client.xinfo_groups("records")
    assert (group["name"], group["last-delivered-id"]) == (b"trainer", ids[1])
    assert client.hgetall("records:readers") == {b"trainer": ids[0]}
    assert describe(redis_log.place)["readers"]["trainer"] == {
        "cursor": deliveries[1].cursor.to_json(),
        "keep_from": deliveries[0].start.to_json(),
        "lag_ms": 1,
    }
    # An operator may move a reader with Redis' own command.
    client.xgroup_setid("records", "trainer", ids[0])
    assert names(redis_log.reader("trainer").read(9)) == list("bc")


def test_somebody_elses_consumer_group_holds_records_back(redis_log: RedisLog) -> None:
    fill(redis_log, "abcd")
    reader = redis_log.reader("trainer")
    deliveries = reader.read(4)
    reader.commit(reader.cursor)
    client = redis_log.server.client()
    client.xgroup_create("records", "audit", client.xrange("records")[1][0])
    # One, or two if the third came within the same millisecond as the second.
    assert retain(redis_log.place) in (1, 2)
    assert names(redis_log.reader("new").read(9))[-2:] == list("cd")
    assert redis_log.reader("audit").read(1) == [deliveries[2]]


def test_retention_decided_on_old_registrations_deletes_nothing(redis_log: RedisLog) -> None:
    fill(redis_log, "abc")
    reader = redis_log.reader("trainer")
    deliveries = reader.read(3)
    reader.commit(reader.cursor)
    broker = StreamBroker(redis_log.place, 5.0)
    known = broker.registrations()
    reader.commit(reader.cursor, keep_from=deliveries[0].start)
    assert broker.trim(reader.cursor, known) is None
    redis_log.reader("second").commit(deliveries[1].cursor)
    assert retain(redis_log.place) == 0
    assert broker.trim(deliveries[1].start, broker.registrations()) == 1


def test_an_unreadable_registration_stops_retention(redis_log: RedisLog) -> None:
    fill(redis_log, "abc")
    reader = redis_log.reader("trainer")
    reader.read(3)
    reader.commit(reader.cursor)
    redis_log.server.client().hset("records:readers", "trainer", "yesterday")
    with pytest.raises(StreamError, match="commit that reader again"):
        retain(redis_log.place)
    assert describe_records(redis_log) == 3
    reader.commit(reader.cursor)
    assert retain(redis_log.place) == 2


def describe_records(log: RedisLog) -> int:
    return int(log.server.client().xlen("records"))


def test_a_reader_that_is_up_to_date_is_not_left_behind(redis_log: RedisLog) -> None:
    fill(redis_log, "abc")
    reader = redis_log.reader("trainer")
    end = reader.read(9)[-1].cursor
    reader.commit(end)
    assert retain(redis_log.place) == 2
    assert retain(redis_log.place) == 0
    assert reader.read(9) == []
    fill(redis_log, "d")
    again = redis_log.reader("trainer")
    again.seek(end)
    assert names(again.read(9)) == names(reader.read(9)) == ["d"]


@pytest.mark.parametrize("kept", [1, 0])
def test_records_that_somebody_else_trimmed_are_missed(redis_log: RedisLog, kept: int) -> None:
    fill(redis_log, "abc")
    behind, ahead = redis_log.reader("behind"), redis_log.reader("ahead")
    behind.read(1)
    ahead.read(3)
    redis_log.server.client().xtrim("records", maxlen=kept, approximate=False)
    with pytest.raises(StreamError, match="are gone") as caught:
        behind.read(9)
    assert ahead.read(9) == []
    place = str(caught.value).split("seeking to Cursor(")[1].split(")")[0]
    behind.seek(Cursor(*map(int, place.split(", "))))
    assert names(behind.read(9)) == ["c"][:kept]


def test_a_lost_stream_is_not_taken_for_an_empty_one(redis_log: RedisLog) -> None:
    fill(redis_log, "ab")
    reader, watcher = redis_log.reader("trainer"), redis_log.reader("watcher")
    reader.read(1)
    watcher.read(9)
    reader.commit(reader.cursor)
    redis_log.server.client().flushall()
    with pytest.raises(StreamError, match="another stream"):
        watcher.read(9)
    fill(redis_log, "c")
    for _ in range(2):
        with pytest.raises(StreamError, match="registration is gone"):
            reader.read(9)
    reader.commit(reader.cursor)
    assert names(reader.read(9)) == ["c"]


def test_the_quarantine_is_capped_and_counting_is_not(
    redis_log: RedisLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_stream_broker, "MAX_QUARANTINED", 3)
    client = redis_log.server.client()
    redis_log.inject([b"garbage" * 1000] * 8)
    client.xadd("records", {"other": "field"})
    reader = redis_log.reader("trainer")
    assert reader.read(9) == []
    assert reader.quarantine_reasons == {"not_json": 8, "missing_field": 1}
    kept = client.xrange("records:quarantine")
    assert [place for place, _ in kept] == [place for place, _ in client.xrange("records")][-3:]
    assert kept[0][1][b"bytes"] == b"7000"
    assert kept[0][1][b"head"] == (b"garbage" * 1000)[: redis_stream_broker.MAX_KEPT_BYTES]
    assert describe(redis_log.place)["quarantine_reasons"] == {"not_json": 8, "missing_field": 1}


def test_reading_goes_on_without_or_with_an_unwritable_quarantine(redis_log: RedisLog) -> None:
    redis_log.inject([b"bad", encode(make_record("a")), b"bad"])
    quiet = RedisStreamReader(redis_log.place, "quiet", quarantine=False)
    assert names(quiet.read(9)) == ["a"]
    assert quiet.quarantined == 2
    assert describe(redis_log.place)["quarantined"] == 0
    redis_log.server.client().set("records:quarantine", "in the way")
    reader = redis_log.reader("trainer")
    assert names(reader.read(9)) == ["a"]
    assert reader.quarantined == 2


def test_a_key_that_is_no_stream_is_named_and_records_wait(redis_log: RedisLog) -> None:
    client = redis_log.server.client()
    client.set("records", "x")
    sink = redis_log.sink()
    with pytest.raises(OSError, match="choose another stream=NAME"):
        sink.write(make_record("a"))
    for ask in (describe, lambda _: redis_log.reader("trainer")):
        with pytest.raises(StreamError, match="choose another stream=NAME"):
            ask(redis_log.place)
    client.delete("records")
    sink.write(make_record("a"))
    assert names(redis_log.reader("trainer").read(9)) == ["a"]


def test_passwords_open_the_broker_and_stay_out_of_errors(redis_log: RedisLog) -> None:
    redis_log.server.client().config_set("requirepass", "right")
    for secret in ("", ":hunter2@"):
        place = redis_log.place.replace("//", f"//{secret}")
        with pytest.raises(OSError, match="Authentication") as caught:
            RedisStreamSink(place).write(make_record("a"))
        assert "hunter2" not in str(caught.value)
    place = redis_log.place.replace("//", "//:right@")
    RedisStreamSink(place).write(make_record("a"))
    reader = RedisStreamReader(place, "trainer")
    assert names(reader.read(9)) == ["a"]
    with pytest.raises(StreamError) as refused:
        reader.seek(Cursor(reader.cursor.segment + 10**9, 0))
    assert "right" not in str(refused.value)


def test_a_record_the_broker_finds_too_large_is_rejected(redis_log: RedisLog) -> None:
    broker = StreamBroker(redis_log.place, 5.0)
    import redis

    def refuse(*_: object) -> None:
        raise redis.ResponseError("Elements are too large to be stored")

    broker._client.execute_command = refuse
    with pytest.raises(RecordError, match="too large"):
        broker.append("writer", 1, b"{}")

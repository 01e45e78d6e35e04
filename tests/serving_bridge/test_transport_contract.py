"""What every log transport must do; what only one of them can get wrong is in ``test_spool*`` and ``test_redis*``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving_bridge.records import VerificationRecord, encode
from serving_bridge.transport import BufferedWriter, Cursor, LogReader
from serving_bridge.transports import (
    LOG_ERRORS,
    describe,
    forget_reader,
    is_stream,
    open_reader,
    open_writer,
    retain,
)
from tests.serving_bridge.record_samples import make_record
from tests.serving_bridge.transport_logs import (
    PATIENCE,
    Log,
    RedisLog,
    SpoolLog,
    failing,
    fill,
    names,
    running_redis,
    wait_until,
)

ROOT = Path(__file__).parents[2]

ENDLESS = """
import itertools, sys
from serving_bridge.redis_stream import RedisStreamSink
from serving_bridge.spool import SpoolWriter
from tests.serving_bridge.record_samples import make_record
place = sys.argv[1]
if place.startswith("spool:"):
    sink = SpoolWriter(place.removeprefix("spool:"), max_bytes=4000, fsync=False)
else:
    sink = RedisStreamSink(place)
for index in itertools.count():
    sink.write(make_record(str(index)))
    print(index, flush=True)
"""

LIGHT = """
import sys
import serving_bridge.records, serving_bridge.transport, serving_bridge.transports
heavy = {"lightning", "pytorch_lightning", "mlflow", "pydantic", "torch", "redis"} & sys.modules.keys()
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


@pytest.fixture
def redis_log(tmp_path: Path) -> Iterator[RedisLog]:
    with running_redis(tmp_path) as log:
        yield log


@pytest.fixture(params=["spool", "redis"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    if request.param == "redis":
        redis_log: RedisLog = request.getfixturevalue("redis_log")
        return redis_log
    return SpoolLog(tmp_path / "spool")


# The contract


def test_records_arrive_once_in_order_whatever_the_limit(log: Log) -> None:
    written = [f"r{index}" for index in range(300)]
    writer = open_writer(log.place)
    for name in written:
        assert writer.write(make_record(name))
    assert writer.flush(PATIENCE)
    reader: LogReader = open_reader(log.place, "trainer")
    assert reader.read(0) == []
    assert reader.lag() > 0
    got = reader.read(1) + reader.read(2) + reader.read(1000)
    assert [delivery.record for delivery in got] == [make_record(name) for name in written]
    assert [delivery.cursor for delivery in got] == sorted({delivery.cursor for delivery in got})
    assert reader.read(1000) == []
    assert reader.lag() == 0
    writer.write(make_record("later"))
    assert writer.close(PATIENCE)
    assert names(reader.read(1000)) == ["later"]


def test_seek_delivers_the_same_again_from_any_cursor_in_its_durable_form(log: Log) -> None:
    fill(log, "abcde")
    reader = log.reader("trainer")
    begin = reader.cursor
    first = reader.read(100)
    for index, delivery in enumerate(first):
        kept = Cursor.from_json(json.loads(json.dumps(delivery.cursor.to_json())))
        reader.seek(kept)
        assert reader.cursor == kept == delivery.cursor
        assert reader.read(100) == first[index + 1 :]
        reader.seek(delivery.start)
        assert reader.read(1) == [delivery]
    reader.seek(begin)
    assert reader.read(100) == first


def test_a_new_reader_goes_on_at_the_committed_cursor_and_at_no_other(log: Log) -> None:
    fill(log, "abc")
    reader = log.reader("trainer")
    reader.commit(reader.cursor)
    assert names(log.reader("trainer").read(9)) == list("abc")
    deliveries = reader.read(3)
    reader.commit(deliveries[1].cursor)
    again = log.reader("trainer")
    assert again.cursor == deliveries[1].cursor
    assert names(again.read(9)) == ["c"]
    reader.commit(deliveries[0].start)
    assert names(log.reader("trainer").read(9)) == list("abc")
    assert names(log.reader("other").read(9)) == list("abc")


def test_a_reader_may_register_before_the_first_record(log: Log) -> None:
    reader = log.reader("trainer")
    assert reader.read(9) == []
    reader.commit(reader.cursor)
    fill(log, "ab")
    assert names(reader.read(9)) == list("ab")
    assert names(log.reader("trainer").read(9)) == list("ab")


def test_two_writers_and_two_readers_share_a_log(log: Log) -> None:
    writers = {name: BufferedWriter(log.sink()) for name in "xy"}
    for index in range(60):
        for name, writer in writers.items():
            writer.write(make_record(f"{name}{index}"))
    for writer in writers.values():
        assert writer.close(PATIENCE)
    seen = names(log.reader("first").read(1000))
    for name in writers:
        assert [one for one in seen if one[0] == name] == [f"{name}{index}" for index in range(60)]
    assert len(seen) == 120
    second = log.reader("second")
    parts = []
    while part := second.read(7):
        parts += names(part)
    assert parts == seen


def test_retention_stays_behind_the_slowest_checkpoint_and_what_it_keeps(log: Log) -> None:
    fill(log, "abcdef")
    late = log.reader("late")
    assert retain(log.place) == 0
    fast, slow = log.reader("fast"), log.reader("slow")
    fast.read(9)
    fast.commit(fast.cursor)
    some = slow.read(4)
    slow.commit(some[3].cursor, keep_from=some[2].start)
    assert retain(log.place) == 2
    assert retain(log.place) == 0
    assert names(log.reader("new").read(9)) == list("cdef")
    slow.seek(some[2].start)
    assert slow.read(2) == some[2:4]
    slow.commit(some[3].cursor)
    assert retain(log.place) > 0
    left = names(log.reader("new").read(9))
    assert "c" not in left
    assert left[-2:] == list("ef")
    assert names(log.reader("slow").read(9)) == list("ef")
    before = late.cursor
    for _ in range(2):
        with pytest.raises(LOG_ERRORS, match="are gone"):
            late.read(1)
        assert late.cursor == before
    with pytest.raises(LOG_ERRORS, match="are gone"):
        slow.seek(some[0].start)


def test_a_retired_reader_holds_nothing_back(log: Log) -> None:
    fill(log, "abcd")
    gone, reader = log.reader("gone"), log.reader("trainer")
    gone.commit(gone.cursor)
    reader.read(3)
    reader.commit(reader.cursor)
    assert retain(log.place) == 0
    assert sorted(describe(log.place)["readers"]) == ["gone", "trainer"]
    assert forget_reader(log.place, "gone")
    assert not forget_reader(log.place, "gone")
    assert retain(log.place) > 0
    assert names(log.reader("trainer").read(9)) == ["d"]
    with pytest.raises(LOG_ERRORS, match="reader name"):
        forget_reader(log.place, "../gone")


def test_history_within_the_size_is_kept(log: Log) -> None:
    written = fill(log, (f"r{index:02d}" for index in range(40)))
    size = log.size()
    assert retain(log.place, 0) == 0
    reader = log.reader("trainer")
    middle = reader.read(30)[-1].cursor
    reader.commit(middle)
    assert retain(log.place, 2 * size) == 0
    assert 0 < retain(log.place, size // 2) < 30
    left = names(log.reader("new").read(99))
    assert left == written[-len(left) :]
    assert 10 < len(left) < 40
    retain(log.place, 0)
    assert names(log.reader("trainer").read(99)) == written[30:]


def test_a_log_that_is_not_there_is_named(log: Log) -> None:
    for ask in (describe, retain, lambda place: forget_reader(place, "trainer")):
        with pytest.raises(LOG_ERRORS, match="check the"):
            ask(log.place)


def test_cursors_beyond_the_end_are_refused(log: Log) -> None:
    fill(log, "ab")
    reader = log.reader("trainer")
    reader.read(9)
    with pytest.raises(LOG_ERRORS, match="another"):
        reader.seek(Cursor(reader.cursor.segment + 2, 0))


def test_a_killed_writer_loses_and_tears_nothing_acknowledged(log: Log) -> None:
    command = [sys.executable, "-c", ENDLESS, log.place]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        for _ in range(50):
            killed.stdout.readline()
        os.kill(killed.pid, signal.SIGKILL)
        acknowledged = 50 + killed.stdout.read().count("\n")
    # The next writer makes the rest of a dead one visible.
    log.sink().close()
    reader = log.reader("trainer")
    got = names(reader.read(100_000))
    assert got == [str(index) for index in range(len(got))]
    assert len(got) >= acknowledged
    assert reader.quarantine_reasons.keys() <= {"torn"}


@pytest.mark.parametrize(
    ("log", "fault"), [("spool", "full"), ("redis", "full"), ("redis", "down")], indirect=["log"]
)
def test_records_wait_out_a_failure_and_the_oldest_make_room(log: Log, fault: str) -> None:
    dropped: list[str] = []

    def on_drop(record: VerificationRecord) -> None:
        dropped.append(record.request_id)

    writer = BufferedWriter(log.sink(), 3, on_drop, backoff_s=0.001, max_backoff_s=0.01)
    assert [writer.write(make_record(name)) for name in "ab"] == [True] * 2
    assert writer.flush(PATIENCE)
    with failing(log, fault):
        assert [writer.write(make_record(name)) for name in "cdefghij"] == [True] * 8
        failures = int(writer.stats()["sink_failures"] or 0)
        wait_until(lambda: int(writer.stats()["sink_failures"] or 0) >= failures + 2)
        assert writer.dropped == 5
        assert writer.written == 2
    assert writer.flush(PATIENCE)
    assert dropped == list("cdefg")
    writer.write(make_record("k"))
    assert writer.close(PATIENCE)
    assert names(log.reader("trainer").read(99)) == list("abhijk")
    assert (writer.written, writer.dropped, writer.stats()["rejected"]) == (6, 5, 0)


def test_what_is_no_record_is_passed_over_and_counted_once(log: Log) -> None:
    good = encode(make_record("b"))
    bad = {
        "not_json": b"garbage",
        "nul_bytes": b"\0" * 40,
        "not_utf8": b"\xff\xfe",
        "schema_version": good.replace(b'"schema_version":1', b'"schema_version":2'),
        "missing_field": b'{"schema_version":1}',
        "inconsistent": good.replace(b'"block_size":4', b'"block_size":9'),
        "oversize": b"x" * 5000,
    }
    log.inject([encode(make_record("a")), *bad.values(), good])
    reader = log.reader("trainer", max_line_bytes=2000)
    begin = reader.cursor
    assert names(reader.read(99)) == list("ab")
    assert reader.quarantine_reasons == dict.fromkeys(bad, 1)
    reader.seek(begin)
    assert names(reader.read(99)) == list("ab")
    other = log.reader("other", max_line_bytes=2000)
    assert names(other.read(99)) == list("ab")
    assert reader.quarantined == other.quarantined == len(bad)
    state = describe(log.place)
    assert state["quarantine_reasons"] == dict.fromkeys(bad, 1)
    assert state["quarantined"] == len(bad)


def test_a_record_that_cannot_be_encoded_is_rejected_and_no_other(log: Log) -> None:
    writer = BufferedWriter(log.sink())
    for record in (make_record("a"), make_record("b", prompt_ids=[object()]), make_record("c")):
        assert writer.write(record)
    assert writer.close(PATIENCE)
    assert writer.stats()["rejected"] == 1
    assert names(log.reader("trainer").read(9)) == ["a", "c"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\n", "a b", "x" * 101, "a\0"])
def test_reader_names_are_plain(log: Log, name: str) -> None:
    with pytest.raises(LOG_ERRORS, match="reader name"):
        log.reader(name)


# The factory


def test_places(tmp_path: Path) -> None:
    for place in (str(tmp_path / "a"), tmp_path / "b", f"spool:{tmp_path / 'c'}"):
        writer = open_writer(place, spool_max_age_s=0.0)
        writer.write(make_record("x"))
        assert writer.close(PATIENCE)
        assert names(open_reader(place, "trainer").read(9)) == ["x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    assert is_stream("rediss://h/0?stream=s")


@pytest.mark.parametrize("place", ["kafka://host/topic", Path("redis://host/0?stream=x"), "redis:host"])
def test_what_is_no_place_makes_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for use in (open_writer, lambda place: open_reader(place, "trainer"), describe):
        with pytest.raises(LOG_ERRORS, match="redis://HOST:PORT/DB"):
            use(place)
    assert list(tmp_path.iterdir()) == []


def test_the_transports_import_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr

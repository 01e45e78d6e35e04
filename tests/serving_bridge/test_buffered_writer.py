from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from serving_bridge.records import RecordError, VerificationRecord
from serving_bridge.spool import SpoolReader, SpoolWriter
from serving_bridge.transport import BufferedWriter, LogWriter
from tests.serving_bridge.record_samples import make_record

PATIENCE = 20.0


class Sink:
    """Takes records unless told to be full; says when it fails and when it idles."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.full = threading.Event()
        self.failed = threading.Event()
        self.idled = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.refuse = "nothing"
        self.rolls = 0
        self.closed = False

    def write(self, record: VerificationRecord) -> bool:
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        if self.full.is_set():
            self.failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        if record.request_id == self.refuse:
            raise RecordError("unfit", "wrong_type")
        self.taken.append(record.request_id)
        return True

    def maybe_roll(self) -> bool:
        self.idled.set()
        return False

    def roll(self) -> bool:
        if self.full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        self.rolls += 1
        return True

    def close(self) -> None:
        self.closed = True


def send(writer: BufferedWriter, names: str) -> list[bool]:
    return [writer.write(make_record(name)) for name in names]


def test_records_reach_the_sink_in_order_and_close_drains() -> None:
    sink = Sink()
    writer = BufferedWriter(sink)
    log: LogWriter = writer
    assert log.write(make_record("a"))
    assert send(writer, "bcd") == [True] * 3
    assert writer.close(PATIENCE)
    assert sink.taken == list("abcd")
    assert sink.closed
    assert (writer.written, writer.dropped) == (4, 0)
    assert writer.close(PATIENCE)


def test_full_disk_is_buffered_then_drops_the_oldest_then_recovers() -> None:
    sink = Sink()
    sink.full.set()
    dropped: list[str] = []
    writer = BufferedWriter(sink, 3, lambda record: dropped.append(record.request_id), backoff_s=0.001)
    assert send(writer, "abc") == [True] * 3
    assert sink.failed.wait(PATIENCE)
    assert writer.dropped == 0
    assert send(writer, "defgh") == [True] * 5
    sink.failed.clear()
    assert sink.failed.wait(PATIENCE)
    assert "No space left" in str(writer.stats()["last_error"])
    sink.full.clear()
    assert writer.flush(PATIENCE)
    assert sink.taken[-3:] == list("fgh")
    assert sorted(sink.taken + dropped) == list("abcdefgh")
    assert len(dropped) == writer.dropped == 5
    assert writer.written == 3
    writer.close(PATIENCE)


def test_a_hanging_sink_never_blocks_serving() -> None:
    sink = Sink()
    sink.gate.clear()
    writer = BufferedWriter(sink, 2)
    assert send(writer, "a") == [True]
    assert sink.entered.wait(PATIENCE)
    assert not writer.flush(0.01)
    assert send(writer, "bcdef") == [True] * 5
    assert writer.stats()["buffered"] == 3
    assert writer.dropped == 3
    assert not writer.flush(0.01)
    assert not writer.close(0.01)
    assert writer.dropped == 5
    assert send(writer, "g") == [False]
    assert writer.dropped == 6
    sink.gate.set()
    writer._thread.join(PATIENCE)
    assert sink.taken == ["a"]
    assert sink.closed


def test_close_gives_up_on_a_full_disk_and_counts_the_rest() -> None:
    sink = Sink()
    sink.full.set()
    writer = BufferedWriter(sink, backoff_s=0.001, max_backoff_s=0.002)
    send(writer, "abc")
    assert not writer.flush(0.01)
    assert not writer.close(0.01)
    writer._thread.join(PATIENCE)
    assert not writer._thread.is_alive()
    assert (writer.written, writer.dropped) == (0, 3)
    assert sink.closed


def test_closing_cuts_a_long_backoff_short() -> None:
    sink = Sink()
    sink.full.set()
    writer = BufferedWriter(sink, backoff_s=3600, max_backoff_s=3600)
    send(writer, "a")
    assert sink.failed.wait(PATIENCE)
    sink.full.clear()
    assert writer.close(PATIENCE)
    assert sink.taken == ["a"]


def test_backoff_doubles_up_to_its_limit_and_starts_over() -> None:
    sink = Sink()
    sink.full.set()
    delays: list[float] = []

    def sleep(delay: float) -> None:
        delays.append(delay)
        if len(delays) == 5:
            sink.full.clear()

    writer = BufferedWriter(sink, backoff_s=1, max_backoff_s=6, sleep=sleep)
    send(writer, "a")
    assert writer.flush(PATIENCE)
    assert delays == [1, 2, 4, 6, 6]
    sink.full.set()
    delays[4:] = []
    send(writer, "b")
    assert writer.flush(PATIENCE)
    assert delays[4:] == [1]
    assert writer.stats()["sink_failures"] == 6
    writer.close(PATIENCE)


def test_a_record_the_sink_refuses_is_skipped_and_counted() -> None:
    sink = Sink()
    sink.refuse = "b"
    writer = BufferedWriter(sink)
    send(writer, "abc")
    assert writer.flush(PATIENCE)
    assert sink.taken == ["a", "c"]
    assert writer.stats() == {
        "capacity": 1024,
        "buffered": 0,
        "written": 2,
        "dropped": 0,
        "rejected": 1,
        "sink_failures": 0,
        "last_error": "RecordError: unfit",
    }
    writer.close(PATIENCE)


def test_idle_ticks_reach_the_sink_and_survive_its_errors() -> None:
    sink = Sink()
    writer = BufferedWriter(sink, idle_s=0.001)
    assert sink.idled.wait(PATIENCE)

    class Broken(Sink):
        def maybe_roll(self) -> bool:
            self.idled.set()
            raise OSError(errno.EIO, "Input/output error")

    broken = Broken()
    other = BufferedWriter(broken, idle_s=0.001)
    assert broken.idled.wait(PATIENCE)
    send(other, "a")
    assert other.flush(PATIENCE)
    assert broken.taken == ["a"]
    writer.close(PATIENCE)
    other.close(PATIENCE)


def test_flush_seals_and_reports_a_sink_that_cannot() -> None:
    sink = Sink()
    writer = BufferedWriter(sink)
    send(writer, "a")
    assert writer.flush(PATIENCE)
    assert sink.rolls == 1
    sink.full.set()
    assert not writer.flush(PATIENCE)
    writer.close(PATIENCE)


def test_a_faulty_drop_observer_does_not_reach_serving() -> None:
    sink = Sink()
    sink.gate.clear()

    def observer(_: VerificationRecord) -> None:
        raise RuntimeError("observer")

    writer = BufferedWriter(sink, 1, observer)
    assert send(writer, "abcd") == [True] * 4
    sink.gate.set()
    writer.close(PATIENCE)


def test_into_a_spool_by_age_and_by_flush(tmp_path: Path) -> None:
    now = [0.0]
    sealed = threading.Event()

    class Spool(SpoolWriter):
        def maybe_roll(self) -> bool:
            rolled = super().maybe_roll()
            if rolled:
                sealed.set()
            return rolled

    writer = BufferedWriter(Spool(tmp_path, max_age_s=60, clock=lambda: now[0]), idle_s=0.001)
    reader = SpoolReader(tmp_path, "trainer")
    send(writer, "a")
    assert writer.flush(PATIENCE)
    assert [d.record.request_id for d in reader.read(9)] == ["a"]
    send(writer, "b")
    while writer.written < 2:
        threading.Event().wait(0.001)
    assert reader.read(9) == []
    now[0] = 60
    assert sealed.wait(PATIENCE)
    assert [d.record.request_id for d in reader.read(9)] == ["b"]
    send(writer, "c")
    assert writer.close(PATIENCE)
    assert [d.record.request_id for d in reader.read(9)] == ["c"]


def test_capacity_must_be_positive() -> None:
    with pytest.raises(ValueError, match="capacity"):
        BufferedWriter(Sink(), 0)

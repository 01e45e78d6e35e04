from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from serving_bridge import spool_layout
from serving_bridge.records import RecordError, encode
from serving_bridge.spool import SpoolError, SpoolReader, SpoolWriter, describe, seal_orphans
from serving_bridge.transport import Cursor, Delivery, LogReader, LogWriter
from tests.serving_bridge.record_samples import make_record


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names(deliveries: list[Delivery]) -> list[str]:
    return [delivery.record.request_id for delivery in deliveries]


def fill(directory: Path, segments: int, per_segment: int = 2) -> list[str]:
    writer = SpoolWriter(directory, fsync=False)
    written = []
    for segment in range(segments):
        for index in range(per_segment):
            written.append(f"s{segment}-{index}")
            writer.write(make_record(written[-1]))
        writer.roll()
    writer.close()
    return written


def sealed(directory: Path) -> list[str]:
    return sorted(os.listdir(directory / "segments"))


def test_records_arrive_once_in_order_whatever_the_limit(tmp_path: Path) -> None:
    written = fill(tmp_path, 3)
    reader: LogReader = SpoolReader(tmp_path, "trainer")
    assert reader.read(0) == []
    got = reader.read(1) + reader.read(2) + reader.read(100)
    assert names(got) == written
    assert [d.record for d in got] == [make_record(name) for name in written]
    assert [d.cursor for d in got] == sorted(d.cursor for d in got)
    assert reader.read(100) == []
    fill(tmp_path, 1)
    assert names(reader.read(100)) == ["s0-0", "s0-1"]


def test_only_sealed_records_are_visible(tmp_path: Path) -> None:
    writer: LogWriter = SpoolWriter(tmp_path)
    reader = SpoolReader(tmp_path, "trainer")
    assert writer.write(make_record("a"))
    assert reader.read(10) == []
    writer.close()
    assert names(reader.read(10)) == ["a"]
    assert os.listdir(tmp_path / "open") == []
    assert not writer.write(make_record("late"))
    assert (writer.written, writer.dropped) == (1, 1)


def test_empty_writers_leave_no_segments(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    assert not writer.roll()
    assert not writer.maybe_roll()
    writer.close()
    assert sealed(tmp_path) == []


def test_size_seals_before_the_limit_is_passed(tmp_path: Path) -> None:
    line = len(encode(make_record("0"))) + 1
    writer = SpoolWriter(tmp_path, max_bytes=2 * line)
    for index in range(5):
        writer.write(make_record(str(index)))
    assert sealed(tmp_path) == ["000000000000.jsonl", "000000000001.jsonl"]
    assert [(tmp_path / "segments" / name).stat().st_size for name in sealed(tmp_path)] == [2 * line] * 2
    assert not writer.maybe_roll()
    writer.write(make_record("5"))
    assert writer.maybe_roll()
    assert names(SpoolReader(tmp_path, "r").read(9)) == list("012345")


def test_age_seals_without_a_new_record(tmp_path: Path) -> None:
    clock = Clock()
    writer = SpoolWriter(tmp_path, max_age_s=60, clock=clock)
    clock.now = 100
    writer.write(make_record("a"))
    clock.now = 159
    assert not writer.maybe_roll()
    clock.now = 160
    assert writer.maybe_roll()
    assert names(SpoolReader(tmp_path, "r").read(9)) == ["a"]


def test_seek_delivers_the_same_again(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    reader = SpoolReader(tmp_path, "trainer")
    begin = reader.cursor
    first = reader.read(100)
    for index, delivery in enumerate(first):
        reader.seek(delivery.cursor)
        assert reader.cursor == delivery.cursor
        assert reader.read(100) == first[index + 1 :]
        reader.seek(delivery.start)
        assert reader.read(1) == [delivery]
    reader.seek(begin)
    assert reader.read(100) == first


def test_lag_counts_sealed_unread_bytes(tmp_path: Path) -> None:
    fill(tmp_path, 2, per_segment=2)
    reader = SpoolReader(tmp_path, "trainer")
    total = reader.lag()
    assert total == sum((tmp_path / "segments" / name).stat().st_size for name in sealed(tmp_path))
    lags = []
    for _ in range(4):
        reader.read(1)
        lags.append(reader.lag())
    assert lags == [total * 3 // 4, total // 2, total // 4, 0]


def test_commit_survives_the_reader(tmp_path: Path) -> None:
    written = fill(tmp_path, 2)
    reader = SpoolReader(tmp_path, "trainer")
    deliveries = reader.read(3)
    reader.commit(deliveries[0].cursor)
    assert names(SpoolReader(tmp_path, "trainer").read(9)) == written[1:]
    assert names(SpoolReader(tmp_path, "other").read(9)) == written


def test_crash_inside_commit_leaves_the_old_cursor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 2)
    reader = SpoolReader(tmp_path, "trainer")
    old, new = reader.read(1)[0].cursor, reader.read(1)[0].cursor
    reader.commit(old)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(spool_layout.os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            reader.commit(new)
    assert SpoolReader(tmp_path, "trainer").cursor == old
    assert list(describe(tmp_path)["readers"]) == ["trainer"]
    reader.commit(new)
    assert SpoolReader(tmp_path, "trainer").cursor == new


@pytest.mark.parametrize("content", [b"", b"{", b'{"cursor":{"segment":"x"}}', b"\xff", b"[]"])
def test_corrupt_registration_is_named(tmp_path: Path, content: bytes) -> None:
    fill(tmp_path, 1)
    (tmp_path / "readers" / "trainer.json").write_bytes(content)
    with pytest.raises(SpoolError, match=r"trainer\.json"):
        SpoolReader(tmp_path, "trainer")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a\n", "a b", "x" * 101, "a\0"])
def test_reader_names_cannot_leave_the_spool(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpoolError, match="reader name"):
        SpoolReader(tmp_path, name)


def test_gaps_are_named_after_what_precedes_them_is_delivered(tmp_path: Path) -> None:
    written = fill(tmp_path, 5)
    for number in (2, 3):
        (tmp_path / "segments" / f"{number:012d}.jsonl").unlink()
    reader = SpoolReader(tmp_path, "trainer")
    assert names(reader.read(100)) == written[:4]
    before = reader.cursor
    for _ in range(2):
        with pytest.raises(SpoolError, match="segments 2 to 3 are gone"):
            reader.read(100)
        assert reader.cursor == before
    with pytest.raises(SpoolError, match="segments 3 to 3 are gone"):
        reader.seek(Cursor(3, 0))
    reader.seek(Cursor(4, 0))
    assert names(reader.read(100)) == written[8:]


def test_a_reader_that_fell_behind_retention_is_told(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    SpoolReader(tmp_path, "trainer").commit(Cursor(0, 0))
    (tmp_path / "segments" / "000000000000.jsonl").unlink()
    with pytest.raises(SpoolError, match="segments 0 to 0 are gone"):
        SpoolReader(tmp_path, "trainer").read(1)
    assert len(SpoolReader(tmp_path, "newcomer").read(100)) == 4


@pytest.mark.parametrize("cursor", [Cursor(1, 5), Cursor(2, 0), Cursor(7, 0)])
def test_cursors_of_another_spool_are_refused(tmp_path: Path, cursor: Cursor) -> None:
    fill(tmp_path, 1)
    reader = SpoolReader(tmp_path, "trainer")
    reader.seek(Cursor(1, 0))
    assert reader.read(1) == []
    with pytest.raises(SpoolError, match="another spool"):
        reader.seek(cursor)


@pytest.mark.parametrize("offset", [1, 10**6])
def test_cursors_inside_a_record_are_refused(tmp_path: Path, offset: int) -> None:
    fill(tmp_path, 1)
    reader = SpoolReader(tmp_path, "trainer")
    reader.seek(Cursor(0, offset))
    with pytest.raises(SpoolError, match="no record begins at byte"):
        reader.read(1)


def test_cursor_json() -> None:
    cursor = Cursor(3, 14)
    assert Cursor.from_json(cursor.to_json()) == cursor
    assert Cursor(1, 9) < Cursor(2, 0) < Cursor(2, 1)
    for bad in (
        {},
        {"segment": 1},
        {"segment": -1, "offset": 0},
        {"segment": 0, "offset": -1},
        [1, 2],
        None,
        "1",
    ):
        with pytest.raises(ValueError, match="not a cursor"):
            Cursor.from_json(bad)


def test_a_record_that_cannot_be_encoded_leaves_the_log_intact(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path)
    writer.write(make_record("a"))
    with pytest.raises(RecordError):
        writer.write(make_record(prompt_ids=[object()]))
    writer.write(make_record("b"))
    writer.close()
    assert names(SpoolReader(tmp_path, "r").read(9)) == ["a", "b"]


def test_a_partial_append_is_cut_off_before_the_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(tmp_path)
    writer.write(make_record("a"))
    real_write = os.write
    answers = iter([lambda fd, data: real_write(fd, data[:20])])

    def full_disk(fd: int, data: memoryview) -> int:
        for answer in answers:
            return answer(fd, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="No space"):
            writer.write(make_record("b"))
    writer.write(make_record("b"))
    writer.close()
    reader = SpoolReader(tmp_path, "r")
    assert names(reader.read(9)) == ["a", "b"]
    assert reader.quarantined == 0


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_failed_seal_is_retried_without_loss_or_repetition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    writer = SpoolWriter(tmp_path, max_bytes=1)
    writer.write(make_record("a"))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        for _ in range(2):
            with pytest.raises(OSError, match="Input/output"):
                writer.write(make_record("b"))
    writer.write(make_record("b"))
    writer.close()
    assert names(SpoolReader(tmp_path, "r").read(9)) == ["a", "b"]
    assert len(sealed(tmp_path)) == 2


def test_a_writer_survives_the_loss_of_its_directory(tmp_path: Path) -> None:
    writer = SpoolWriter(tmp_path / "spool")
    writer.write(make_record("a"))
    (tmp_path / "spool").rename(tmp_path / "moved")
    writer.roll()
    assert (writer.written, writer.dropped) == (1, 1)
    writer.write(make_record("b"))
    writer.close()
    assert names(SpoolReader(tmp_path / "spool", "r").read(9)) == ["b"]
    assert seal_orphans(tmp_path / "moved") == 1
    assert names(SpoolReader(tmp_path / "moved", "r").read(9)) == ["a"]


def test_live_writers_in_one_process_are_no_orphans(tmp_path: Path) -> None:
    clock = Clock()
    first = SpoolWriter(tmp_path, max_age_s=10, clock=clock)
    clock.now = 5
    first.write(make_record("a"))
    second = SpoolWriter(tmp_path)
    second.write(make_record("b"))
    clock.now = 10
    assert not first.maybe_roll()
    assert seal_orphans(tmp_path) == 0
    second.close()
    first.close()
    assert names(SpoolReader(tmp_path, "r").read(9)) == ["b", "a"]


def test_describe(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    writer = SpoolWriter(tmp_path)
    writer.write(make_record())
    reader = SpoolReader(tmp_path, "trainer")
    deliveries = reader.read(3)
    reader.commit(reader.cursor, keep_from=deliveries[0].start)
    state = describe(tmp_path)
    assert (state["segments"], state["first_segment"], state["last_segment"]) == (2, 0, 1)
    assert (state["open_files"], state["quarantined"]) == (1, 0)
    assert state["open_bytes"] == len(encode(make_record())) + 1
    assert state["readers"] == {
        "trainer": {
            "cursor": reader.cursor.to_json(),
            "keep_from": {"segment": 0, "offset": 0},
            "lag_bytes": reader.lag(),
        }
    }
    with pytest.raises(SpoolError, match="not a spool"):
        describe(tmp_path / "nowhere")

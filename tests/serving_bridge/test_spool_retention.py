from __future__ import annotations

from pathlib import Path

import pytest

from serving_bridge.spool import SpoolError, SpoolReader, SpoolWriter, describe, forget_reader, retain
from serving_bridge.transport import Cursor
from tests.serving_bridge.record_samples import make_record


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    """Six segments of two records."""
    writer = SpoolWriter(tmp_path, fsync=False)
    for index in range(12):
        writer.write(make_record(f"{index:02d}"))
        if index % 2:
            writer.roll()
    writer.close()
    return tmp_path


def test_nothing_goes_without_a_registered_reader(spool: Path) -> None:
    SpoolReader(spool, "unregistered").read(100)
    assert retain(spool) == []
    assert retain(spool, max_total_bytes=0) == []


def test_the_slower_checkpoint_holds_segments_back(spool: Path) -> None:
    fast, slow = SpoolReader(spool, "fast"), SpoolReader(spool, "slow")
    fast.commit(fast.read(100)[-1].cursor)
    checkpointed = slow.read(5)[-1].cursor
    slow.commit(checkpointed)
    slow.read(100)
    assert checkpointed.segment == 2
    assert retain(spool) == [0, 1]
    assert retain(spool) == []
    slow.seek(checkpointed)
    assert [d.record.request_id for d in slow.read(1)] == ["05"]
    slow.commit(slow.cursor)
    slow.read(100)
    slow.commit(slow.cursor)
    assert retain(spool) == [2, 3, 4]


def test_the_replay_buffer_holds_segments_back(spool: Path) -> None:
    reader = SpoolReader(spool, "trainer")
    deliveries = reader.read(100)
    reader.commit(reader.cursor, keep_from=deliveries[7].start)
    assert retain(spool) == [0, 1, 2]
    reader.seek(deliveries[7].start)
    assert reader.read(1) == [deliveries[7]]
    with pytest.raises(SpoolError, match=r"segment 0, but segments 0 to 2 are gone"):
        reader.seek(deliveries[0].start)
    reader.commit(deliveries[-1].cursor, keep_from=deliveries[9].cursor)
    assert retain(spool) == [3]


def test_history_within_the_size_is_kept(spool: Path) -> None:
    reader = SpoolReader(spool, "trainer")
    reader.read(100)
    reader.commit(reader.cursor)
    size = describe(spool)["sealed_bytes"] // 6
    assert retain(spool, max_total_bytes=6 * size) == []
    assert retain(spool, max_total_bytes=4 * size + 1) == [0, 1]
    assert retain(spool, max_total_bytes=0) == [2, 3, 4]


def test_numbering_continues_after_everything_was_read_and_deleted(spool: Path) -> None:
    reader = SpoolReader(spool, "trainer")
    reader.read(100)
    reader.commit(Cursor(6, 0))
    assert retain(spool) == [0, 1, 2, 3, 4]
    writer = SpoolWriter(spool)
    writer.write(make_record("new"))
    writer.close()
    assert [d.record.request_id for d in SpoolReader(spool, "trainer").read(9)] == ["new"]


def test_an_unreadable_registration_stops_retention(spool: Path) -> None:
    reader = SpoolReader(spool, "trainer")
    reader.read(100)
    reader.commit(reader.cursor)
    (spool / "readers" / "other.json").write_text("{}")
    with pytest.raises(SpoolError, match=r"other\.json"):
        retain(spool)
    assert describe_segments(spool) == 6


def describe_segments(spool: Path) -> int:
    return len(list((spool / "segments").iterdir()))


def test_a_retired_reader_can_be_forgotten(spool: Path) -> None:
    gone, reader = SpoolReader(spool, "gone"), SpoolReader(spool, "trainer")
    gone.commit(gone.cursor)
    reader.read(100)
    reader.commit(reader.cursor)
    assert retain(spool) == []
    assert forget_reader(spool, "gone")
    assert not forget_reader(spool, "gone")
    assert retain(spool) == [0, 1, 2, 3, 4]
    with pytest.raises(SpoolError, match="reader name"):
        forget_reader(spool, "../segments/000000000005")

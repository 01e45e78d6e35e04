from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving_bridge import spool_quarantine
from serving_bridge.records import encode
from serving_bridge.spool import SpoolReader, SpoolWriter, describe
from tests.serving_bridge.record_samples import make_record

GOOD = [encode(make_record(name)) for name in "abc"]
BAD = {
    "not_json": b"garbage",
    "nul_bytes": b"\0" * 40,
    "not_utf8": b"\xff\xfe",
    "schema_version": b'{"schema_version":7}',
    "missing_field": b'{"schema_version":1}',
    "wrong_type": GOOD[0].replace(b'"rounds":[', b'"rounds":[3,'),
    "inconsistent": GOOD[0].replace(b'"block_size":4', b'"block_size":9'),
    "oversize": b"x" * 5000,
    "torn": GOOD[0][:-30],
}
LIMIT = 2000


def write_segment(directory: Path, data: bytes, number: int = 0) -> None:
    (directory / "segments").mkdir(parents=True, exist_ok=True)
    (directory / "segments" / f"{number:012d}.jsonl").write_bytes(data)


def mixed_segment(directory: Path) -> None:
    lines = []
    for index, (kind, line) in enumerate(BAD.items()):
        lines += [GOOD[index % 3] + b"\n", line + (b"" if kind == "torn" else b"\n")]
    write_segment(directory, b"".join(lines))
    write_segment(directory, GOOD[0] + b"\n", number=1)


def entries(directory: Path) -> list[dict[str, Any]]:
    files = sorted((directory / "quarantine").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def test_every_kind_of_bad_line_is_kept_counted_and_passed_over(tmp_path: Path) -> None:
    mixed_segment(tmp_path)
    reader = SpoolReader(tmp_path, "trainer", max_line_bytes=LIMIT)
    deliveries = reader.read(100)
    assert [d.record.request_id for d in deliveries] == list("abcabcabca")
    assert reader.quarantined == len(BAD)
    assert reader.quarantine_reasons == dict.fromkeys(BAD, 1)
    kept = {entry["kind"]: entry for entry in entries(tmp_path)}
    assert list(kept) == list(BAD)
    segment = (tmp_path / "segments" / "000000000000.jsonl").read_bytes()
    for kind, entry in kept.items():
        line = base64.b64decode(entry["base64"]) if "base64" in entry else entry["text"].encode()
        assert BAD[kind].startswith(line)
        assert len(line) == min(len(BAD[kind]), LIMIT + 1)
        assert segment[entry["offset"] :].startswith(BAD[kind])
        assert entry["bytes"] == len(BAD[kind]) + (kind != "torn")
    assert kept["schema_version"]["reason"] == "schema version 7 is newer than 1"
    assert kept["missing_field"]["reason"] == "missing field request_id"
    assert "torn last line" in kept["torn"]["reason"]
    state = describe(tmp_path)
    assert state["quarantined"] == len(BAD)
    assert state["quarantine_reasons"] == dict.fromkeys(BAD, 1)


def test_meeting_a_bad_line_again_neither_repeats_nor_recounts_it(tmp_path: Path) -> None:
    mixed_segment(tmp_path)
    reader = SpoolReader(tmp_path, "trainer", max_line_bytes=LIMIT)
    begin = reader.cursor
    first = reader.read(100)
    reader.seek(begin)
    assert reader.read(100) == first
    assert reader.quarantined == len(BAD)
    again = SpoolReader(tmp_path, "other", max_line_bytes=LIMIT)
    assert again.read(100) == first
    assert again.quarantined == len(BAD)
    assert len(entries(tmp_path)) == len(BAD)


def test_an_entry_cut_short_by_a_crash_is_replaced(tmp_path: Path) -> None:
    write_segment(tmp_path, b"bad\n" * 3)
    SpoolReader(tmp_path, "a").read(1)
    file = tmp_path / "quarantine" / "000000000000.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    SpoolReader(tmp_path, "b").read(1)
    assert file.read_bytes() == whole


def test_quarantine_is_bounded_and_counting_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_quarantine, "MAX_LINES_PER_SEGMENT", 5)
    write_segment(tmp_path, b"\n" * 50)
    reader = SpoolReader(tmp_path, "trainer")
    assert reader.read(1) == []
    assert reader.quarantined == 50
    assert len(entries(tmp_path)) == 5


def test_reading_goes_on_without_or_with_an_unwritable_quarantine(tmp_path: Path) -> None:
    write_segment(tmp_path, b"bad\n" + GOOD[0] + b"\nbad\n")
    quiet = SpoolReader(tmp_path, "quiet", quarantine=False)
    assert len(quiet.read(9)) == 1
    assert quiet.quarantined == 2
    assert entries(tmp_path) == []
    reader = SpoolReader(tmp_path, "trainer")
    (tmp_path / "quarantine").rmdir()
    (tmp_path / "quarantine").write_text("in the way")
    assert len(reader.read(9)) == 1
    assert reader.quarantined == 2


def test_a_long_line_is_skipped_wherever_it_ends(tmp_path: Path) -> None:
    size = len(GOOD[0])
    write_segment(tmp_path, b"x" * 300_000 + b"\n" + GOOD[0] + b"\n" + b"y" * (size + 1))
    write_segment(tmp_path, GOOD[1] + b" \n" + GOOD[2], number=1)
    reader = SpoolReader(tmp_path, "trainer", max_line_bytes=size)
    assert [d.record.request_id for d in reader.read(9)] == ["a", "c"]
    assert reader.quarantine_reasons == {"oversize": 3}
    assert reader.lag() == 0


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.binary(max_size=60) | st.sampled_from([*GOOD, *BAD.values()]), max_size=8),
    newline_at_end=st.booleans(),
    limit=st.integers(1, 4),
)
def test_no_bytes_stop_the_reader(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], newline_at_end: bool, limit: int
) -> None:
    directory = tmp_path_factory.mktemp("fuzz")
    data = b"\n".join(lines) + (b"\n" if newline_at_end else b"")
    write_segment(directory, data)
    writer = SpoolWriter(directory, fsync=False)
    writer.write(make_record("after"))
    writer.close()
    reader = SpoolReader(directory, "fuzz", max_line_bytes=LIMIT)
    found = []
    while got := reader.read(limit):
        found += got
    physical = data.split(b"\n")
    if not physical[-1]:
        physical.pop()
    expected = [line for line in physical if line in GOOD]
    assert [encode(d.record) for d in found[:-1]] == expected
    assert found[-1].record == make_record("after")
    assert reader.quarantined == len(physical) - len(expected)
    assert reader.lag() == 0

"""Admission of verification records to online rounds: trigger, refusals, holding out, replay, ageing, state."""

from __future__ import annotations

import io
import json
import time as wall_time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules.packed_loader import PackedLoader, PackingSpec
from datamodules.streaming import (
    OFFLINE_ROUND,
    StreamingDataModule,
    StreamSpec,
    is_held_out,
    record_to_document,
)
from drafters.errors import UserError
from serving_bridge.records import VerificationRecord
from serving_bridge.spool import SpoolReader, SpoolWriter
from tests.lightning_modules.training_samples import (
    PROMPT_LENGTH,
    TARGET_ID,
    make_documents,
    make_record,
    write_spool,
)

SPEC = StreamSpec(
    trigger=4, passes=2, holdout_fraction=0.0, buffer_share=0.0, poll_s=3.0, idle_timeout_s=10.0
)
PACKING = PackingSpec(row_tokens=1, anchors_per_document=6, anchor_source="rounds", max_length=64)


class FakeTime:
    """A clock that only moves when somebody sleeps; `events` happen at the first sleep from their time on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Any]] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for event in [e for e in self.events if e[0] <= self.now]:
            self.events.remove(event)
            event[1]()


def make_stream(
    spool: Path,
    records: Sequence[VerificationRecord] = (),
    spec: StreamSpec = SPEC,
    time: FakeTime | None = None,
    **settings: Any,
) -> StreamingDataModule:
    write_spool(spool, records)
    time = time or FakeTime()
    fields: dict[str, Any] = {
        "target_id": TARGET_ID,
        "seed": 3,
        "clock": lambda: time.now,
        "sleep": time.sleep,
    }
    packing = settings.pop("packing", PACKING)
    return StreamingDataModule(SpoolReader(spool, "trainer"), spec, packing, **(fields | settings))


def records(*numbers: int, **changes: Any) -> list[VerificationRecord]:
    return [make_record(number, **changes) for number in numbers]


def names(documents: Sequence[Any]) -> list[str]:
    return [document.document_id for document in documents]


def next_round(data: StreamingDataModule) -> list[str]:
    assert data.collect()
    fresh = names(data.stream.fresh)
    data.finish_round()
    return fresh


def held(wanted: bool, count: int, fraction: float = 0.5) -> list[int]:
    found = [n for n in range(200) if is_held_out(f"conversation-{n}", fraction) is wanted]
    return found[:count]


def test_a_round_takes_the_oldest_records_in_order(tmp_path: Path) -> None:
    data = make_stream(tmp_path, records(*range(10)))
    assert not data.in_round
    assert next_round(data) == ["r0", "r1", "r2", "r3"]
    assert next_round(data) == ["r4", "r5", "r6", "r7"]
    assert not data.collect()
    assert data.stream.round_index == 2
    assert data.stream.counts == {"admitted": 8, "held_out": 0, "trained": 8}


def test_the_loader_visits_the_round_passes_times(tmp_path: Path) -> None:
    data = make_stream(tmp_path, records(*range(4)))
    loader = data.train_dataloader()
    assert isinstance(loader, PackedLoader)
    visited = [name for batch in loader for name in batch.document_names]
    assert sorted(visited) == sorted(2 * ["r0", "r1", "r2", "r3"])
    again = data.train_dataloader()
    assert isinstance(again, PackedLoader)
    assert [name for batch in again for name in batch.document_names] == visited


def test_another_round_is_shuffled_otherwise(tmp_path: Path) -> None:
    data = make_stream(tmp_path, records(*range(20)), replace(SPEC, trigger=10, passes=1))
    orders = []
    for first in (0, 10):
        loader = data.train_dataloader()
        assert isinstance(loader, PackedLoader)
        orders.append([int(name[1:]) - first for batch in loader for name in batch.document_names])
        data.finish_round()
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_an_incomplete_collection_changes_nothing(tmp_path: Path) -> None:
    data = make_stream(tmp_path, [*records(0, 1), *records(2, target_id="other@r#0")])
    before = json.dumps(data.state_dict())
    assert not data.collect()
    assert data.train_dataloader() == []
    assert json.dumps(data.state_dict()) == before
    write_spool(tmp_path, records(3, 4))
    assert next_round(data) == ["r0", "r1", "r3", "r4"]
    assert data.stream.counts["refused_other_target"] == 1


def test_waiting_ends_with_the_records_or_after_silence(tmp_path: Path) -> None:
    time = FakeTime()
    time.events = [
        (6.0, lambda: write_spool(tmp_path, records(2))),
        (14.0, lambda: write_spool(tmp_path, records(3))),
    ]
    data = make_stream(tmp_path, records(0, 1), time=time)
    assert data.collect(), "each record starts the idle time anew"
    assert time.now < 20
    data.finish_round()
    time.now = 100.0
    assert not data.collect()
    assert 110 < time.now < 115


def test_without_a_timeout_only_the_word_to_stop_ends_the_waiting(tmp_path: Path) -> None:
    time = FakeTime()
    stopped: list[bool] = []
    time.events = [(5000.0, lambda: stopped.append(True))]
    spec = replace(SPEC, idle_timeout_s=None)
    data = make_stream(tmp_path, records(0), spec, time=time, should_stop=lambda: bool(stopped))
    assert not data.collect()
    assert 5000 <= time.now < 5010


def test_what_was_logged_before_the_word_to_stop_is_read(tmp_path: Path) -> None:
    """The last records may be sealed between a look at the log and the question whether to go on."""
    asked = []

    def should_stop() -> bool:
        if len(asked) == 1:
            write_spool(tmp_path, records(3))
        asked.append(True)
        return len(asked) > 1

    data = make_stream(tmp_path, records(0, 1, 2), should_stop=should_stop)
    assert next_round(data) == ["r0", "r1", "r2", "r3"]


def test_records_of_another_target_are_refused(tmp_path: Path) -> None:
    data = make_stream(tmp_path, [*records(0, 1, target_id="other@r#0"), *records(*range(2, 6))])
    assert next_round(data) == ["r2", "r3", "r4", "r5"]
    assert data.stream.counts["refused_other_target"] == 2


def test_a_request_is_admitted_once(tmp_path: Path) -> None:
    spec = replace(SPEC, holdout_fraction=0.5, trigger=3)
    [kept] = held(True, 1)
    fresh = held(False, 6)
    log = [
        *records(kept, kept),
        *records(fresh[0], fresh[0], *fresh[1:3]),
        *records(fresh[1], kept, *fresh[3:6]),
    ]
    data = make_stream(tmp_path, log, spec)
    assert next_round(data) == [f"r{n}" for n in fresh[:3]]
    assert next_round(data) == [f"r{n}" for n in fresh[3:6]]
    assert names(data.stream.holdout) == [f"r{kept}"]
    assert data.stream.counts["refused_repeated"] == 4


def test_conversations_are_held_out_whole_and_for_ever(tmp_path: Path) -> None:
    keys = [f"conversation-{n}" for n in range(2000)]
    share = sum(is_held_out(key, 0.15) for key in keys) / len(keys)
    assert 0.12 < share < 0.18
    assert not any(is_held_out(key, 0.0) for key in keys)
    assert all(is_held_out(key, 0.4) for key in keys if is_held_out(key, 0.15))
    spec = replace(SPEC, holdout_fraction=0.5)
    [kept], trained = held(True, 1), held(False, 4)
    turns = [make_record(900 + i, conversation_key=f"conversation-{kept}") for i in range(3)]
    data = make_stream(tmp_path, [*turns, *records(*trained)], spec)
    assert next_round(data) == [f"r{n}" for n in trained]
    assert names(data.stream.holdout) == ["r900", "r901", "r902"]
    assert data.stream.counts["held_out"] == 3
    assert not {d.conversation_key for d in data.stream.holdout} & {
        d.conversation_key for _, d in data.stream.buffer
    }


def test_only_the_latest_held_out_records_are_kept(tmp_path: Path) -> None:
    spec = replace(SPEC, holdout_fraction=0.5, holdout_capacity=3)
    kept, trained = held(True, 5), held(False, 4)
    data = make_stream(tmp_path, [*records(*kept), *records(*trained)], spec)
    next_round(data)
    assert names(data.stream.holdout) == [f"r{n}" for n in kept[-3:]]


def test_stale_records_are_skipped(tmp_path: Path) -> None:
    spec = replace(SPEC, max_record_age_s=100.0)
    log = [
        *records(0, 1),
        make_record(2, time=2000.0),
        make_record(3, time=1899.0),
        make_record(4, time=1900.0),
    ]
    data = make_stream(tmp_path, [*log, make_record(5, time=1950.0)], spec)
    assert next_round(data) == ["r0", "r1", "r2", "r4"]
    assert data.stream.counts["refused_stale"] == 1
    # the newest time seen counts in later rounds too
    write_spool(tmp_path, [make_record(6, time=1850.0), *(make_record(n, time=1960.0) for n in (7, 8, 9))])
    assert next_round(data) == ["r5", "r7", "r8", "r9"]
    assert data.stream.counts["refused_stale"] == 2


def test_a_trainer_that_is_to_end_begins_no_round(tmp_path: Path) -> None:
    data = make_stream(tmp_path, records(0, 1, 2, 3))
    data.trainer = SimpleNamespace(should_stop=True)  # type: ignore[assignment]
    assert data.train_dataloader() == [] and data.stream.cursor == SpoolReader(tmp_path, "trainer").cursor
    data.trainer.should_stop = False  # type: ignore[union-attr]
    assert isinstance(data.train_dataloader(), PackedLoader)


def test_one_clock_that_is_wrong_makes_no_other_record_stale(tmp_path: Path) -> None:
    now = wall_time.time()
    spec = replace(SPEC, max_record_age_s=3600.0)
    log = [
        make_record(0, time=now + 1e8),
        make_record(1, time=now + 1e9, target_id="other@r1#ffffffffffff"),
        *(make_record(n, time=now - 60 * n) for n in (2, 3)),
        make_record(4, time=now - 7200),
        make_record(5, time=now),
    ]
    data = make_stream(tmp_path, log, spec)
    assert next_round(data) == ["r0", "r2", "r3", "r5"]
    assert data.stream.counts["refused_stale"] == 1
    # a time from the future that an older release kept is forgotten
    data.stream.newest_time = now + 1e8
    write_spool(tmp_path, [make_record(n, time=now) for n in (6, 7, 8, 9)])
    assert next_round(data) == ["r6", "r7", "r8", "r9"]


def test_records_that_give_no_block_are_refused(tmp_path: Path) -> None:
    one_token = make_record(0, output_ids=[5], rounds=[])
    long_prompt = make_record(1, prompt_ids=[1] * 63, output_ids=[2, 3], rounds=[])
    just_fits = make_record(2, prompt_ids=[1] * 62, output_ids=[2, 3, 4], rounds=[])
    data = make_stream(tmp_path, [one_token, long_prompt, just_fits, *records(3, 4, 5)])
    assert next_round(data) == ["r2", "r3", "r4", "r5"]
    assert data.stream.counts["refused_short"] == 2
    assert len(data.stream.buffer[0][1].token_ids) == 64


def test_a_round_of_records_without_rounds_still_trains(tmp_path: Path) -> None:
    data = make_stream(tmp_path, records(0, 1, 2, 3, rounds=[]))
    loader = data.train_dataloader()
    assert isinstance(loader, PackedLoader)
    assert all(batch.num_blocks == PACKING.anchors_per_document for batch in loader)


def test_record_becomes_the_served_document() -> None:
    record = make_record(3, domain="code")
    document = record_to_document(record)
    assert document.token_ids == [*record.prompt_ids, *record.output_ids]
    assert document.response_mask == [False] * PROMPT_LENGTH + [True] * len(record.output_ids)
    assert document.round_starts == [r.start for r in record.rounds]
    assert (document.document_id, document.conversation_key, document.domain) == (
        "r3",
        "conversation-3",
        "code",
    )
    assert record_to_document(make_record(3, rounds=[])).round_starts is None


def test_the_rounds_of_a_text_that_was_mostly_decoded_plainly_are_no_anchors() -> None:
    record = make_record(3)
    committed = 0
    for count, this in enumerate(record.rounds, start=1):
        committed += this.accepted + 1
        document = record_to_document(make_record(3, rounds=record.rounds[:count]))
        if 2 * min(committed, len(record.output_ids) - 1) < len(record.output_ids):
            assert document.round_starts is None
        else:
            assert document.round_starts == [r.start for r in record.rounds[:count]]
    assert record.rounds[0].accepted + 1 < len(record.output_ids) / 2 < committed, "both must occur"


def test_a_share_of_each_round_is_replayed(tmp_path: Path) -> None:
    spec = replace(SPEC, trigger=6, buffer_share=0.25, passes=1)
    data = make_stream(tmp_path, records(*range(18)), spec, offline=make_documents(5, first=70))
    seen = []
    for number in range(3):
        loader = data.train_dataloader()
        assert isinstance(loader, PackedLoader)
        visited = [name for batch in loader for name in batch.document_names]
        fresh = [f"r{n}" for n in range(6 * number, 6 * number + 6)]
        older = {*names(make_documents(5, first=70)), *(f"r{n}" for n in range(6 * number))}
        assert len(visited) == len(set(visited)) == 8
        assert set(fresh) < set(visited)
        assert set(visited) - set(fresh) <= older
        seen.append(sorted(set(visited) - set(fresh)))
        data.finish_round()
        assert not data.stream.replayed
    assert seen[0] != seen[1] != seen[2]


def test_an_empty_buffer_replays_nothing(tmp_path: Path) -> None:
    data = make_stream(tmp_path, records(*range(4)), replace(SPEC, buffer_share=0.5))
    assert data.collect()
    assert data.stream.replayed == []


def test_old_records_leave_the_buffer_and_offline_documents_stay(tmp_path: Path) -> None:
    """A round replays records that are at most `max_age_rounds` rounds older than itself."""
    spec = replace(SPEC, max_age_rounds=2)
    data = make_stream(tmp_path, records(*range(16)), spec, offline=make_documents(3, first=70))
    offline = [OFFLINE_ROUND] * 3
    for expected in ([0], [0, 1], [1, 2], [2, 3]):
        next_round(data)
        found = [number for number, _ in data.stream.buffer]
        assert found == offline + [number for number in expected for _ in range(4)]


def test_a_full_buffer_drops_the_oldest_records_first(tmp_path: Path) -> None:
    spec = replace(SPEC, buffer_capacity=6)
    data = make_stream(tmp_path, records(*range(8)), spec, offline=make_documents(9, first=70))
    assert len(data.stream.buffer) == 3
    next_round(data)
    next_round(data)
    assert [number for number, _ in data.stream.buffer] == [OFFLINE_ROUND] * 3 + [1] * 3
    assert names(d for _, d in data.stream.buffer[3:]) == ["r5", "r6", "r7"]


@pytest.mark.parametrize("capacity", [0, 1])
def test_tiny_buffers(tmp_path: Path, capacity: int) -> None:
    spec = replace(SPEC, buffer_capacity=capacity, buffer_share=0.5)
    data = make_stream(tmp_path, records(*range(8)), spec, offline=make_documents(4))
    next_round(data)
    next_round(data)
    assert names(d for _, d in data.stream.buffer) == ["r7"][:capacity]


def test_the_offline_share_is_drawn_from_all_offline_documents(tmp_path: Path) -> None:
    offline = make_documents(40, first=50)
    data = make_stream(tmp_path, spec=replace(SPEC, buffer_capacity=20), offline=offline)
    kept = [int(name[1:]) - 50 for name in names(d for _, d in data.stream.buffer)]
    assert len(set(kept)) == 10
    assert max(kept) > 20


def full_state(tmp_path: Path) -> StreamingDataModule:
    spec = replace(SPEC, holdout_fraction=0.4, buffer_share=0.4)
    data = make_stream(tmp_path, records(*range(40)), spec, offline=make_documents(3, first=70))
    next_round(data)
    assert data.collect()
    stream = data.stream
    assert stream.fresh and stream.replayed and stream.buffer and stream.holdout
    return data


def test_state_survives_a_weights_only_checkpoint_and_json(tmp_path: Path) -> None:
    data = full_state(tmp_path)
    buffer = io.BytesIO()
    torch.save(data.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert json.loads(json.dumps(loaded)) == loaded
    other = make_stream(tmp_path, spec=data.spec)
    other.load_state_dict(loaded)
    assert other.stream == data.stream
    assert other.in_round
    first, second = data.train_dataloader(), other.train_dataloader()
    assert isinstance(first, PackedLoader) and isinstance(second, PackedLoader)
    assert first.documents == second.documents
    for stream in (data, other):
        stream.finish_round()
    assert next_round(data) == next_round(other)
    assert other.stream == data.stream


def test_state_is_independent_of_what_happens_next(tmp_path: Path) -> None:
    data = full_state(tmp_path)
    state = data.state_dict()
    before = json.dumps(state)
    data.finish_round()
    next_round(data)
    assert json.dumps(state) == before


def test_state_of_another_target_is_refused(tmp_path: Path) -> None:
    state = full_state(tmp_path).state_dict()
    with pytest.raises(UserError, match="other@r#0"):
        make_stream(tmp_path, target_id="other@r#0").load_state_dict(state)


def test_the_restored_cursor_decides_and_not_the_readers_own(tmp_path: Path) -> None:
    data = make_stream(tmp_path, records(*range(12)))
    next_round(data)
    state = data.state_dict()
    next_round(data)
    data.commit()
    resumed = make_stream(tmp_path)
    assert resumed.reader.cursor == data.stream.cursor
    resumed.load_state_dict(state)
    assert next_round(resumed) == ["r4", "r5", "r6", "r7"]


def test_commit_registers_the_cursor_of_the_last_collection(tmp_path: Path) -> None:
    data = make_stream(tmp_path, records(*range(6)))
    next_round(data)
    data.commit()
    assert not data.collect()  # reads on, but keeps nothing
    data.commit()
    assert names(record_to_document(d.record) for d in SpoolReader(tmp_path, "trainer").read(9)) == [
        "r4",
        "r5",
    ]


def test_bad_lines_in_the_log_are_passed_over(tmp_path: Path) -> None:
    write_spool(tmp_path, records(0, 1))
    [segment] = (tmp_path / "segments").glob("*.jsonl")
    segment.write_bytes(b"garbage\n" + segment.read_bytes() + b'{"schema_version": 99}\n{"torn')
    writer = SpoolWriter(tmp_path, fsync=False)
    for record in records(2, 3):
        writer.write(record)
    writer.close()
    data = make_stream(tmp_path)
    assert next_round(data) == ["r0", "r1", "r2", "r3"]
    assert isinstance(data.reader, SpoolReader)
    assert data.reader.quarantined == 3

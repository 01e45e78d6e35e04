"""A survey counts what the next round would admit, and takes nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from datamodules.packed_loader import PackingSpec
from datamodules.streaming import StreamingDataModule, StreamSpec
from pipeline.config import OnlineConfig
from pipeline.survey import Survey, survey
from serving_bridge.spool import SpoolReader
from tests.lightning_modules.training_samples import TARGET_ID, make_record, write_spool

RULES: dict[str, Any] = {"holdout_fraction": 0.4, "max_record_age_s": 25.0}
ONLINE = OnlineConfig(max_length=14, **RULES)


def records() -> list[Any]:
    """Good ones of two domains, among others that are refused for each reason there is."""
    found = [make_record(n, time=100.0 + n, domain="math" if n % 3 else "code") for n in range(30)]
    found.insert(5, make_record(2, time=103.0))
    found.insert(9, make_record(500, time=104.0, target_id="other@r1#ffffffffffff"))
    found.insert(11, make_record(501, time=104.0, output_ids=[5], rounds=[]))
    found.append(make_record(502, time=90.0))
    return found


def stream(spool: Path, trigger: int) -> StreamingDataModule:
    spec = StreamSpec(trigger=trigger, idle_timeout_s=0.0, poll_s=0.0, **RULES)
    packing = PackingSpec(1, 4, "random", ONLINE.max_length)
    return StreamingDataModule(SpoolReader(spool, "trainer"), spec, packing, target_id=TARGET_ID, seed=0)


def look(spool: Path, data: StreamingDataModule | None = None, window: int = 100) -> Survey:
    reader = SpoolReader(spool, "trainer", quarantine=False)
    state = None if data is None else data.stream
    return survey(reader, state, ONLINE, target_id=TARGET_ID, window=window)


def test_survey_agrees_with_the_round_that_follows(tmp_path: Path) -> None:
    write_spool(tmp_path, records())
    found = look(tmp_path)
    assert found.refused == {
        "refused_repeated": 1,
        "refused_other_target": 1,
        "refused_short": 1,
        "refused_stale": 1,
    }
    assert found.training + found.held_out == 30 and found.training and found.held_out
    # one more would not come together, and all are taken
    assert not stream(tmp_path, found.training + 1).collect()
    data = stream(tmp_path, found.training)
    assert data.collect()
    window = data.stream.window
    assert window is not None
    assert window.since == found.since == 100.0
    kept = data.stream.holdout
    assert [d.document_id for d in found.recent][: len(kept)] == [d.document_id for d in kept]
    taken = Counter(d.domain for d in [*data.stream.fresh, *kept])
    assert window.domains == dict(sorted(taken.items()))
    assert found.domains["math"] + found.domains["code"] == 30


def test_survey_starts_where_the_last_round_ended_and_leaves_the_log_alone(tmp_path: Path) -> None:
    write_spool(tmp_path, records())
    everything = look(tmp_path)
    data = stream(tmp_path, 5)
    assert data.collect()
    data.finish_round()
    data.commit()
    cursor = SpoolReader(tmp_path, "trainer", quarantine=False).cursor
    for _ in range(2):
        rest = look(tmp_path, data)
        assert rest.training == everything.training - 5
        assert not {d.document_id for d in rest.recent} & {d.document_id for d in data.stream.holdout}
    assert SpoolReader(tmp_path, "trainer", quarantine=False).cursor == cursor
    assert not list((tmp_path / "quarantine").glob("*"))


def test_only_the_newest_held_out_documents_are_kept(tmp_path: Path) -> None:
    write_spool(tmp_path, records())
    everything, few = look(tmp_path), look(tmp_path, window=3)
    assert few.held_out == everything.held_out > 3
    assert [d.document_id for d in few.recent] == [d.document_id for d in everything.recent][-3:]
    assert max(len(d.token_ids) for d in everything.recent) <= ONLINE.max_length


@pytest.mark.parametrize("made", [True, False])
def test_empty_log_is_no_news(tmp_path: Path, made: bool) -> None:
    if made:
        write_spool(tmp_path, [])
    found = look(tmp_path)
    assert (found.training, found.held_out, found.since, len(found.recent)) == (0, 0, None, 0)

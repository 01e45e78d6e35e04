"""Killed with SIGKILL at any point and started again, online rounds over a frozen spool end where an uninterrupted run does.

Every record is trained on in exactly one round, every round is published, and all weights and states are equal bit for bit.
"""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.admission import is_held_out
from serving_bridge.spool_layout import SpoolLayout
from tests.lightning_modules.crash_worker import KILLED, NEVER, ONLINE, STREAM, run_online
from tests.lightning_modules.processes import in_process
from tests.lightning_modules.training_samples import make_record, write_spool
from tests.pipeline.test_resume_offline import assert_same

ROUNDS = ONLINE.max_rounds
assert ROUNDS is not None


def frozen_records() -> list[Any]:
    """Enough for all rounds and a half more, with records among them that must be refused."""
    records: list[Any] = []
    wanted = ROUNDS * STREAM.trigger + STREAM.trigger // 2
    number = 0
    while wanted:
        records.append(make_record(number))
        wanted -= not is_held_out(f"conversation-{number}", STREAM.holdout_fraction)
        number += 1
    records.insert(5, make_record(0))  # delivered twice
    records.insert(7, make_record(500, target_id="other@r1#ffffffffffff"))
    records.insert(9, make_record(501, output_ids=[5], rounds=[]))
    return records


def start(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_spool(directory / "spool", frozen_records())
    return directory


def publications(directory: Path) -> dict[int, list[dict[str, Any]]]:
    by_round = defaultdict(list)
    for line in (directory / "published.jsonl").read_text().splitlines():
        item = json.loads(line)
        by_round[item["round"]].append(item)
    return by_round


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = start(tmp_path_factory.mktemp("uninterrupted") / "run")
    assert in_process(run_online, directory, None) == 0
    return directory


def test_uninterrupted_rounds_partition_the_records(uninterrupted: Path) -> None:
    published = publications(uninterrupted)
    assert sorted(published) == list(range(ROUNDS))
    expected = [
        record.request_id
        for record in frozen_records()[:]
        if not is_held_out(record.conversation_key, STREAM.holdout_fraction)
        and record.request_id not in ("r500", "r501")
    ]
    expected = list(dict.fromkeys(expected))[: ROUNDS * STREAM.trigger]
    assert [name for number in range(ROUNDS) for name in published[number][0]["trained"]] == expected
    vocabularies = [
        json.loads((uninterrupted / f"vocabulary-{number}.json").read_text()) for number in range(ROUNDS)
    ]
    assert all(len(kept) < 32 for kept in vocabularies)
    tokens = {record.request_id: {*record.prompt_ids, *record.output_ids} for record in frozen_records()}
    for number, kept in enumerate(vocabularies):
        assert set().union(*(tokens[name] for name in published[number][0]["trained"])) <= set(kept)
    state = json.loads((uninterrupted / "stream.json").read_text())
    assert state["round_index"] == ROUNDS
    assert state["counts"]["trained"] == state["counts"]["admitted"] == len(expected)
    assert state["counts"]["refused_repeated"] == 1
    assert state["counts"]["refused_other_target"] == state["counts"]["refused_short"] == 1
    assert SpoolLayout(uninterrupted / "spool").load_reader("trainer").cursor.to_json() == state["cursor"]


# A round has 5 documents (one of them replayed), visited twice: 10 batches, 5 steps; a checkpoint every 2 steps.
CASES = {
    "collecting_the_first_round": [("collect", 0)],
    "collecting_a_later_round": [("collect", 1)],
    "before_the_first_checkpoint": [("batch_start", 3)],
    "right_after_a_checkpoint": [("batch_start", 5)],
    "twice_in_an_accumulation": [("batch_start", 6), ("batch_start", 6)],
    # a checkpoint is due at the last step of round 1
    "after_the_last_batch": [("batch_start", 20), ("finish_round", 1)],
    "between_checkpoint_and_commit": [("before_commit", 0)],
    "between_commit_and_publish": [("publish_start", 1)],
    "inside_publish": [("publish_middle", 1), ("publish_middle", 1)],
    "after_publish": [("publish_end", 0)],
    "publishing_the_last_round": [("publish_start", ROUNDS - 1)],
    "everywhere": [
        ("collect", 0),
        ("batch_start", 4),
        ("batch_start", 7),
        ("before_commit", 0),
        ("publish_start", 0),
        ("publish_middle", 0),
        ("collect", 1),
        ("batch_start", 16),
        ("publish_middle", 1),
        ("batch_start", 30),
        ("before_commit", 2),
        ("publish_middle", 2),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_lost_and_nothing_trained_twice(name: str, tmp_path: Path, uninterrupted: Path) -> None:
    directory = start(tmp_path / "run")
    for kill in CASES[name]:
        assert in_process(run_online, directory, kill) == KILLED, kill
    assert in_process(run_online, directory, None) == 0
    assert_same(
        torch.load(directory / "final.pt", weights_only=True),
        torch.load(uninterrupted / "final.pt", weights_only=True),
    )
    found, expected = (json.loads((d / "stream.json").read_text()) for d in (directory, uninterrupted))
    assert_same(found, expected)
    assert (directory / "settled.txt").read_text() == (uninterrupted / "settled.txt").read_text()
    published, once = publications(directory), publications(uninterrupted)
    assert sorted(published) == list(range(ROUNDS))
    for number, attempts in published.items():
        for attempt in attempts:
            assert attempt == once[number][0]


def test_the_end_of_a_round_is_safe_without_any_earlier_checkpoint(
    tmp_path: Path, uninterrupted: Path
) -> None:
    """Were the cursor committed first, the records of the round would be gone from the log and from all memory."""
    directory = start(tmp_path / "run")
    for kill in (("after_commit", 0), ("after_commit", 1), None):
        assert in_process(run_online, directory, kill, NEVER) == (KILLED if kill else 0)
    assert_same(
        torch.load(directory / "final.pt", weights_only=True),
        torch.load(uninterrupted / "final.pt", weights_only=True),
    )
    assert (directory / "settled.txt").read_text().split() == ["0", "1", "2"]


@pytest.mark.parametrize("batch", [13, 20], ids=["in_the_middle_of_a_round", "on_its_last_batch"])
def test_sigterm_ends_between_rounds(batch: int, tmp_path: Path, uninterrupted: Path) -> None:
    directory = start(tmp_path / "run")
    assert in_process(run_online, directory, ("batch_start", batch, signal.SIGTERM)) == 0
    assert json.loads((directory / "stream.json").read_text())["round_index"] == 2
    assert (directory / "settled.txt").read_text().split() == ["0", "1"]
    assert in_process(run_online, directory, None) == 0
    assert_same(
        torch.load(directory / "final.pt", weights_only=True),
        torch.load(uninterrupted / "final.pt", weights_only=True),
    )

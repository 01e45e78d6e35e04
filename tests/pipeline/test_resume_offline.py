"""Killed with SIGKILL and resumed, an offline run ends bit for bit where an uninterrupted one does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoint import drafter_digest
from tests.lightning_modules.crash_worker import KILLED, NEVER, run_offline
from tests.lightning_modules.processes import in_process

Kill = tuple[str, int]


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Equality in every bit and type, naming the first place that differs."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), f"{where} differs"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert found == expected, f"{where}: {found} instead of {expected}"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(frozen: tuple[tuple[str, Any], ...]) -> Path:
        directory = tmp_path_factory.mktemp("uninterrupted")
        assert in_process(run_offline, directory, dict(frozen), None) == 0
        return directory

    return lambda changes: run(tuple(changes.items()))


# Epochs of the data end after batches 6, 11, 17; checkpoints and validations come every 4 steps, of 11 in all.
CASES: dict[str, tuple[dict[str, Any], list[Kill]]] = {
    "before_the_first_checkpoint": ({}, [("batch_start", 3)]),
    "right_after_a_checkpoint": ({"precision": "bf16-mixed"}, [("batch_start", 5)]),
    "between_checkpoints_in_the_next_epoch": ({}, [("batch_start", 8)]),
    "twice": ({"max_minutes": 60.0}, [("batch_start", 7), ("batch_start", 10)]),
    "checkpoint_at_the_end_of_an_epoch": ({"checkpoint_every": 6}, [("batch_start", 7)]),
    "in_a_validation": ({}, [("validation_start", 8)]),
    "in_the_last_validation": ({"steps": 8}, [("validation_start", 8)]),
    "accumulating": ({"accumulate": 2}, [("batch_start", 14)]),
    # a resumed run must not take a checkpoint in the middle of its first step
    "accumulating_twice": ({"accumulate": 2}, [("batch_start", 10), ("batch_start", 10)]),
    "soft_labels_partly_kept": ({"objective": "osd", "vocabulary": 12}, [("batch_start", 8)]),
    "after_the_last_step": ({"validate_every": NEVER, "steps": 8}, [("train_end", 8)]),
}


@pytest.mark.parametrize("name", CASES)
def test_resume_is_bitwise(name: str, tmp_path: Path, uninterrupted: Any) -> None:
    changes, kills = CASES[name]
    expected = uninterrupted(changes)
    for kill in kills:
        assert in_process(run_offline, tmp_path, changes, kill) == KILLED
    assert in_process(run_offline, tmp_path, changes, None) == 0
    assert_same(
        torch.load(tmp_path / "final.pt", weights_only=True),
        torch.load(expected / "final.pt", weights_only=True),
    )
    assert drafter_digest(tmp_path / "drafter") == drafter_digest(expected / "drafter")
    assert json.loads((tmp_path / "history.json").read_text()) == json.loads(
        (expected / "history.json").read_text()
    )


def test_the_last_steps_are_measured_too(uninterrupted: Any) -> None:
    history = json.loads((uninterrupted({}) / "history.json").read_text())
    assert [step for step, _ in history] == [4, 8, 11]
    assert len({tau for _, tau in history}) > 1

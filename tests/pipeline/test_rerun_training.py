"""A drafter takes its place when training has succeeded: after an error, after a resumption, after an earlier run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from drafters.checkpoint import drafter_digest
from lightning_modules.callbacks.finite_guard import FiniteGuard
from pipeline.cli import main
from pipeline.fitting import export_on_success

SETTINGS = ["train", "tiny.yaml", "--set", "train.max_minutes=9"]


def succeed(*words: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    assert stop.value.code == 0


def break_down_at(step: int, patch: pytest.MonkeyPatch) -> None:
    check = FiniteGuard.on_before_backward

    def check_or_break(self: FiniteGuard, trainer: Any, *rest: Any) -> None:
        if trainer.global_step == step:
            raise ConnectionError("the machine is gone")
        check(self, trainer, *rest)

    patch.setattr(FiniteGuard, "on_before_backward", check_or_break)


@pytest.mark.parametrize("step", [2, 8], ids=["before_a_checkpoint", "after_one"])
def test_an_interrupted_run_replaces_the_drafter_when_it_is_resumed(
    step: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation and a checkpoint happen at step 6; the run ends at step 12."""
    drafter = run / "out" / "train" / "drafter"
    finished = drafter_digest(drafter)
    shutil.rmtree(drafter)
    shutil.copytree(run / "out" / "distill" / "drafter", drafter)
    earlier = drafter_digest(drafter)
    with monkeypatch.context() as patch:
        break_down_at(step, patch)
        with pytest.raises(ConnectionError):
            main(SETTINGS)
    assert drafter_digest(drafter) == earlier
    checkpoint = run / "out" / "train" / "last.ckpt"
    assert checkpoint.is_file() == (step > 6)
    succeed(*SETTINGS, *(["--resume"] if step > 6 else []))
    assert drafter_digest(drafter) == finished


def test_resuming_a_finished_run_keeps_its_drafter(run: Path) -> None:
    before = drafter_digest(run / "out" / "train" / "drafter")
    succeed(*SETTINGS, "--resume")
    assert drafter_digest(run / "out" / "train" / "drafter") == before


def test_a_fresh_run_takes_nothing_from_one_that_failed(tmp_path: Path) -> None:
    pending, checkpoint = tmp_path / ".drafter.best", tmp_path / "last.ckpt"
    pending.mkdir()
    (pending / "of").write_text("the failed run")
    checkpoint.touch()
    with export_on_success(tmp_path / "drafter", str(checkpoint)) as place:
        assert place == pending and (place / "of").exists() and checkpoint.exists()  # resumed
        shutil.rmtree(place)
    assert not (tmp_path / "drafter").exists()
    pending.mkdir()
    with export_on_success(tmp_path / "drafter", None) as place:
        assert not place.exists() and not checkpoint.exists()
        place.mkdir()
        (place / "of").write_text("this run")
    assert (tmp_path / "drafter" / "of").read_text() == "this run" and not pending.exists()

"""When checkpoints are taken, and that a new one never damages the old one before it is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.offline import OfflineDataModule
from datamodules.packed_loader import PackingSpec
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.callbacks.resume import AtomicCheckpointIO, RandomState
from pipeline.config import FitConfig
from pipeline.fitting import fit, loss_spec, optim_spec, stage_trainer
from tests.lightning_modules.training_samples import make_documents, make_drafter, make_target


@pytest.mark.parametrize("elsewhere", ["/dev/shm", None], ids=["other_file_system", "same_file_system"])
def test_the_old_checkpoint_is_replaced_and_not_overwritten(
    elsewhere: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever holds the old file open, or is killed half-way, has all of it."""
    if elsewhere is not None:
        if not os.access(elsewhere, os.W_OK):
            pytest.skip(f"no {elsewhere}")
        monkeypatch.setattr("tempfile.tempdir", elsewhere)
    path = tmp_path / "run" / "last.ckpt"
    files = AtomicCheckpointIO()
    files.save_checkpoint({"number": torch.arange(5)}, path)
    kept = tmp_path / "kept"
    os.link(path, kept)
    before = kept.read_bytes()
    files.save_checkpoint({"number": torch.arange(9)}, path)
    assert kept.read_bytes() == before
    assert files.load_checkpoint(path, weights_only=True)["number"].tolist() == list(range(9))
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    files = AtomicCheckpointIO()
    files.save_checkpoint({"number": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        files.save_checkpoint({"number": lambda: 2}, path)
    assert files.load_checkpoint(path, weights_only=True) == {"number": 1}
    files.save_checkpoint({"number": 3}, path)
    assert files.load_checkpoint(path, weights_only=True) == {"number": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_random_state_round_trip() -> None:
    torch.manual_seed(5)
    state = RandomState().state_dict()
    expected = torch.rand(3)
    torch.rand(10)
    RandomState().load_state_dict(state)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("settings", "steps", "batches"),
    [
        ({}, [4, 8], [4, 8]),
        ({"accumulate": 3}, [4, 8], [12, 24]),
        ({"accumulate": 2, "validate_every": 4}, [4, 8], [8, 16]),
        ({"accumulate": 2, "validate_every": 3, "checkpoint_every": 5}, [5, 10], [10, 20]),
        ({"checkpoint_every": 100}, [], []),
    ],
)
def test_checkpoints_are_taken_at_steps_only(
    settings: dict[str, Any],
    steps: list[int],
    batches: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[dict[str, Any]] = []
    monkeypatch.setattr(
        AtomicCheckpointIO, "save_checkpoint", lambda self, checkpoint, *_, **__: saved.append(checkpoint)
    )
    config = FitConfig(**{"steps": 10, "checkpoint_every": 4, "precision": "32-true", **settings})
    validation = make_documents(2) if "validate_every" in settings else []
    target = make_target()
    module = BlockTrainingModule(
        make_drafter(target), target, loss_spec(config.loss), optim_spec(config.optim, 10)
    )
    trainer = stage_trainer(tmp_path, config, logger=False, callbacks=[], validate=bool(validation))
    fit(trainer, module, OfflineDataModule(make_documents(5), validation, PackingSpec(30, 4), seed=1), None)
    progress = [c["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] for c in saved]
    assert [c["global_step"] for c in saved] == steps
    assert progress == batches

"""Exports happen when validation improves and at no other time, and their history survives a resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.identity import TargetIdentity
from lightning_modules.callbacks.export import ExportBest
from tests.lightning_modules.training_samples import make_drafter, make_head, make_target

IDENTITY = TargetIdentity("tiny", "r0", "0123456789abcdef")


class Run:
    """The part of a trainer and a module that the callback looks at; `step` marks the weights with the step number."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory / "drafter"
        self.module: Any = SimpleNamespace(drafter=make_drafter(make_target()))
        self.trainer: Any = SimpleNamespace(
            callback_metrics={}, sanity_checking=False, global_step=0, is_global_zero=True
        )
        self.export = ExportBest(self.directory, IDENTITY, "v1", **settings)

    def validate(self, step: int, tau: float) -> None:
        self.trainer.global_step = step
        self.trainer.callback_metrics["val/acceptance_length"] = torch.tensor(tau)
        self.mark(step)
        self.export.on_validation_end(self.trainer, self.module)

    def mark(self, step: int) -> None:
        with torch.no_grad():
            self.module.drafter.fc.weight.fill_(step)

    def end(self) -> None:
        self.export.on_fit_end(self.trainer, self.module)

    def exported(self) -> int | None:
        if not self.directory.exists():
            return None
        return int(load_drafter(self.directory).drafter.fc.weight[0, 0])


def test_only_an_improvement_is_exported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    found = []
    for step, tau in enumerate([1.2, 1.1, 1.2, 1.5, 1.4], start=1):
        run.validate(step, tau)
        found.append(run.exported())
    assert found == [1, 1, 1, 4, 4]
    run.mark(9)
    run.end()
    assert run.exported() == 4
    assert [step for step, _ in run.export.history] == [1, 2, 3, 4, 5]
    assert [tau for _, tau in run.export.history] == pytest.approx([1.2, 1.1, 1.2, 1.5, 1.4])


@pytest.mark.parametrize(("later", "kept"), [(1.25, 0), (1.35, 6)])
def test_the_drafter_that_came_in_may_be_the_best(
    later: float, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_modules.callbacks.export.BlockTrainingModule", SimpleNamespace)
    monkeypatch.setattr("lightning_modules.callbacks.export.OfflineDataModule", SimpleNamespace)
    run = Run(tmp_path, measure_start=True)
    run.trainer.datamodule = SimpleNamespace(val_documents=["a document"])
    run.module.measure = lambda documents: 1.3 if documents == ["a document"] else 0.0
    run.mark(0)
    run.export.on_train_start(run.trainer, run.module)
    run.validate(6, later)
    assert run.exported() == kept
    assert [step for step, _ in run.export.history] == [0, 6]
    run.export.on_train_start(run.trainer, run.module)  # a resumed run does not measure again
    assert len(run.export.history) == 2


def test_without_validation_the_end_is_exported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.export.on_validation_end(run.trainer, run.module)
    assert run.exported() is None
    run.mark(7)
    run.end()
    assert run.exported() == 7


def test_a_validation_that_measures_nothing_counts_as_none(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.validate(1, float("nan"))
    assert run.exported() is None
    run.mark(2)
    run.end()
    assert run.exported() == 2


def test_sanity_checks_and_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.sanity_checking = True
    run.validate(1, 2.0)
    run.trainer.sanity_checking = False
    run.trainer.is_global_zero = False
    run.validate(2, 1.5)
    assert run.exported() is None
    assert run.export.best == 1.5


def test_a_resumed_run_remembers_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.validate(1, 1.5)
    state = run.export.state_dict()
    resumed = Run(tmp_path)
    resumed.export.load_state_dict(state)
    resumed.validate(2, 1.4)
    assert resumed.exported() == 1
    resumed.validate(3, 1.6)
    assert resumed.exported() == 3
    assert [step for step, _ in resumed.export.history] == [1, 2, 3]


def test_the_export_is_a_whole_serving_checkpoint(tmp_path: Path) -> None:
    head = make_head(make_target())
    run = Run(tmp_path, length_head=head, extra={"note": "x"})
    run.validate(1, 1.5)
    loaded = load_drafter(run.directory)
    assert (loaded.drafter_version, loaded.identity, loaded.manifest["note"]) == ("v1", IDENTITY, "x")
    assert loaded.length_head is not None
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.length_head.state_dict()[name], tensor)
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


def test_weights_that_are_not_finite_leave_the_earlier_export(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.validate(1, 1.5)
    with torch.no_grad():
        run.module.drafter.norm.weight[0] = float("inf")
    run.trainer.callback_metrics["val/acceptance_length"] = torch.tensor(1.9)
    with pytest.raises(UserError, match=r"norm\.weight is not finite"):
        run.export.on_validation_end(run.trainer, run.module)
    assert run.exported() == 1

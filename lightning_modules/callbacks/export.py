"""Serving checkpoints written from a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from datamodules.offline import OfflineDataModule
from drafters.acceptance_head import AcceptanceHead
from drafters.checkpoint import save_drafter, serving_tensors
from drafters.fill import Drafter
from drafters.identity import TargetIdentity
from drafters.length_head import LengthHead
from lightning_modules.block_training import BlockTrainingModule


class ExportBest(L.Callback):
    """Writes a serving checkpoint whenever validation τ reaches a new best, and at the end if it never was a number.

    Args:
        directory: the serving checkpoint; replaced as a whole.
        identity: of the target.
        drafter_version: written into the manifest.
        measure_start: the drafter as it came is the first candidate, so that a stage never hands on a worse one.
        length_head, acceptance_head: exported beside the drafter.
        extra: further manifest entries.
    """

    MONITOR = "val/acceptance_length"

    def __init__(
        self,
        directory: Path,
        identity: TargetIdentity,
        drafter_version: str,
        *,
        measure_start: bool = False,
        length_head: LengthHead | None = None,
        acceptance_head: AcceptanceHead | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.drafter_version = drafter_version
        self.measure_start = measure_start
        self.length_head = length_head
        self.acceptance_head = acceptance_head
        self.extra = extra
        self.best = float("-inf")
        self.history: list[tuple[int, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.measure_start and trainer.global_step == 0 and not self.history:
            self._measure(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        value = trainer.callback_metrics.get(self.MONITOR)
        if value is None or trainer.sanity_checking:
            return
        self._consider(trainer, pl_module, float(value))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # not on_train_end: that is left out when a run resumes with all its steps done
        if self.history and self.history[-1][0] < trainer.global_step:
            # stopped by time between two validations
            self._measure(trainer, pl_module)
        if self.best == float("-inf"):
            self._export(trainer, pl_module)

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(pl_module, BlockTrainingModule) and isinstance(datamodule, OfflineDataModule)
        if datamodule.val_documents:
            self._consider(trainer, pl_module, pl_module.measure(datamodule.val_documents))

    def _consider(self, trainer: L.Trainer, pl_module: L.LightningModule, value: float) -> None:
        self.history.append((trainer.global_step, value))
        if value > self.best:
            self.best = value
            self._export(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "history": [list(item) for item in self.history]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = state_dict["best"]
        self.history = [(int(step), float(value)) for step, value in state_dict["history"]]

    def _export(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        drafter = pl_module.drafter
        assert isinstance(drafter, Drafter)
        tensors = serving_tensors(drafter)
        if trainer.is_global_zero:
            save_drafter(
                self.directory,
                drafter,
                identity=self.identity,
                drafter_version=self.drafter_version,
                length_head=self.length_head,
                acceptance_head=self.acceptance_head,
                extra=self.extra,
                tensors=tensors,
            )

"""Checkpoints to resume from: what they hold beyond Lightning's own, when they are taken, how they reach the disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint


class RandomState(L.Callback):
    """Keeps torch's CPU random state in the checkpoint, so that a resumed run draws what the uninterrupted one would."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["torch"])


class StepCheckpoint(Checkpoint):
    """Replaces one checkpoint every so many optimizer steps, only at moments from which resuming is exact.

    Never between the batches of one accumulated step, whose gradients no checkpoint holds. Behind a validation that is due
    at that step, as a resumed run would neither repeat it nor know its result. And not at the end of an epoch: Lightning would
    begin the epoch anew there without having ended it (online rounds are saved when they are finished).

    Args:
        path: the checkpoint.
        every: optimizer steps between two.
    """

    def __init__(self, path: Path, every: int) -> None:
        self.path = path
        self.every = every
        self._seen_step = 0
        self._awaits_validation = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seen_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        due = step != self._seen_step and step % self.every == 0
        self._seen_step = step
        self._awaits_validation = due and _validation_follows(trainer)
        if due and not self._awaits_validation and not _epoch_ends(trainer):
            trainer.save_checkpoint(self.path, weights_only=False)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._awaits_validation:
            self._awaits_validation = False
            trainer.save_checkpoint(self.path, weights_only=False)


def _validation_follows(trainer: L.Trainer) -> bool:
    every = trainer.val_check_batch
    if not trainer.enable_validation or not isinstance(every, int):
        return False
    return trainer.should_stop or (trainer.fit_loop.total_batch_idx + 1) % every == 0


def _epoch_ends(trainer: L.Trainer) -> bool:
    return trainer.is_last_batch and trainer.max_steps < 0


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the old checkpoint and replaces it once the new one is on disk.

    Lightning's own goes through the system's temporary directory; where that is another file system its last step is a copy
    onto the only checkpoint there is, which a kill can leave in halves.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as handle:
            torch.save(checkpoint, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

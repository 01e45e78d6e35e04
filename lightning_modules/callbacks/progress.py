"""One status line for training: a rich bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L


class PlainProgress(L.Callback):
    """Prints step, loss, acceptance and τ every few seconds when there is no terminal to draw a bar on."""

    def __init__(self, say: Callable[[str], object], every_s: float = 15.0) -> None:
        self.say = say
        self.every_s = every_s
        self._last = time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() - self._last < self.every_s:
            return
        self._last = time.monotonic()
        shown = ("train/loss", "train/block_acceptance", "train/length_loss", "val/acceptance_length")
        metrics = trainer.callback_metrics
        parts = [f"{name.split('/')[1]} {float(metrics[name]):.3f}" for name in shown if name in metrics]
        limit = f"/{trainer.max_steps}" if trainer.max_steps > 0 else ""
        self.say(f"step {trainer.global_step}{limit}  " + "  ".join(parts))

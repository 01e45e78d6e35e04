"""The end of an online round: checkpoint, then hand the new drafter to whoever publishes it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import lightning as L
import torch

from datamodules.streaming import StreamingDataModule
from lightning_modules.opd import OPDModule


class Publisher(Protocol):
    """Registers, gates and swaps; knows the registry and the servers so that nothing here has to."""

    @property
    def published_rounds(self) -> int:
        """Rounds whose outcome (champion, refused, rolled back) is settled."""
        ...

    def publish(self, module: OPDModule, datamodule: StreamingDataModule, round_index: int) -> None:
        """Settle the outcome of a finished round, or put it off when the process is to end.

        Called again after a crash and after being put off, so it must be repeatable.
        """
        ...


class PublishRounds(L.Callback):
    """One Lightning epoch is one round: checkpoint, commit the log's cursor, publish the drafter.

    The order makes a kill harmless: before the checkpoint the round is trained again from the same records; after
    it the publisher, asked again at the next start, settles the round.
    """

    def __init__(self, publisher: Publisher, checkpoint: Path) -> None:
        self.publisher = publisher
        self.checkpoint = checkpoint

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # not on_train_start: Lightning asks for the next round's batches before that, which waits for its records,
        # and skips it altogether when the last round is done
        module, datamodule = _parts(trainer, pl_module)
        done = datamodule.stream.round_index
        if self.publisher.published_rounds < done:
            self._publish(module, datamodule, done - 1)
            if self.publisher.published_rounds < done:
                # put off: the process is to end, and another round must not come before this one
                trainer.should_stop = True

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module, datamodule = _parts(trainer, pl_module)
        if not datamodule.in_round:
            return
        finished = datamodule.stream.round_index
        datamodule.finish_round()
        trainer.save_checkpoint(self.checkpoint, weights_only=False)
        datamodule.commit()
        self._publish(module, datamodule, finished)

    def _publish(self, module: OPDModule, datamodule: StreamingDataModule, round_index: int) -> None:
        # publishing builds models, which draws random numbers, and is not repeated once it is settled: training must
        # not depend on it
        with torch.random.fork_rng(devices=[]):
            self.publisher.publish(module, datamodule, round_index)


def _parts(trainer: L.Trainer, pl_module: L.LightningModule) -> tuple[OPDModule, StreamingDataModule]:
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(pl_module, OPDModule) and isinstance(datamodule, StreamingDataModule)
    return pl_module, datamodule

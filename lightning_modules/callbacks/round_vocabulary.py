"""The part of the vocabulary that an online round's loss sees, made of the round's own documents."""

from __future__ import annotations

from typing import Any

import lightning as L

from datamodules.streaming import StreamingDataModule
from drafters.training_vocabulary import TrainingVocabulary
from lightning_modules.opd import OPDModule


class RoundVocabulary(L.Callback):
    """At the first batch of a round, or of what is left of it after a resume, tells the module which tokens occur in it.

    Args:
        size: tokens in all; filled up with common ones.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._round: int | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(pl_module, OPDModule) and isinstance(datamodule, StreamingDataModule)
        stream = datamodule.stream
        if stream.round_index == self._round:
            return
        self._round = stream.round_index
        vocab_size = pl_module.target.config.vocab_size
        if self.size < vocab_size:
            documents = [*stream.fresh, *stream.replayed]
            pl_module.use_vocabulary(TrainingVocabulary.of(documents, vocab_size, self.size))

"""Offline training data: documents that are complete before training starts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import lightning as L

from datamodules.packed_loader import PackedLoader, PackingSpec
from drafters.errors import UserError
from drafters.packing import Document
from drafters.replay import REPLAY_TOKENS, iterate_packs


class ReplayLoader:
    """Validation packs of whole documents; each rank takes every `world_size`-th pack.

    Ranks left without one get an empty pack, so that all take equally many steps.
    """

    def __init__(self, documents: Sequence[Document], rank: int = 0, world_size: int = 1) -> None:
        packs = list(iterate_packs(documents, REPLAY_TOKENS))
        missing = -len(packs) % world_size
        self.packs = [*packs, *([] for _ in range(missing))][rank::world_size]

    def __len__(self) -> int:
        return len(self.packs)

    def __iter__(self) -> Iterator[list[Document]]:
        return iter(self.packs)


class OtherTrainingData(UserError):
    """A checkpoint was written while training on something else."""


class OfflineDataModule(L.LightningDataModule):
    """Packed training batches and validation documents for replay τ.

    Args:
        train_documents: documents to train on.
        val_documents: held-out documents; empty switches validation off.
        packing: how documents are packed and anchored.
        seed: order and anchors derive from it.
    """

    def __init__(
        self,
        train_documents: Sequence[Document],
        val_documents: Sequence[Document],
        packing: PackingSpec,
        *,
        seed: int,
    ) -> None:
        super().__init__()
        self.train_documents = train_documents
        self.val_documents = val_documents
        self.packing = packing
        self.seed = seed

    def state_dict(self) -> dict[str, Any]:
        """What the batches are made from, and for how many processes; their position is the loader's own state."""
        return {"training_data": self._fingerprint, "world_size": self._place()[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that a resumed run goes on with the batches that it began with.

        Raises:
            OtherTrainingData: when they would be others.
        """
        if state_dict["training_data"] != self._fingerprint:
            raise OtherTrainingData(
                "the training documents, their packing or the seed changed since it was written, so it cannot be continued"
            )

    @cached_property
    def _fingerprint(self) -> str:
        # without round starts: they are replayed at every start, and ties may fall differently on another machine
        digest = hashlib.sha256(repr((self.packing, self.seed)).encode())
        for d in self.train_documents:
            digest.update(repr((d.document_id, d.token_ids, d.response_mask)).encode())
        return digest.hexdigest()

    def _place(self) -> tuple[int, int]:
        trainer = self.trainer
        return (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)

    def train_dataloader(self) -> PackedLoader:
        """As many batches as the trainer's steps need, in one go; a single epoch if it counts no steps."""
        rank, world_size = self._place()
        trainer = self.trainer
        steps = trainer.max_steps if trainer is not None else -1
        return PackedLoader(
            self.train_documents,
            self.packing,
            seed=self.seed,
            num_batches=steps * trainer.accumulate_grad_batches
            if trainer is not None and steps > 0
            else None,
            rank=rank,
            world_size=world_size,
        )

    def val_dataloader(self) -> ReplayLoader | list[ReplayLoader]:
        rank, world_size = self._place()
        return ReplayLoader(self.val_documents, rank, world_size) if self.val_documents else []

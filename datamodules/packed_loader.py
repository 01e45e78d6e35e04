"""Batches as a pure function of (seed, epoch, index), so that resuming needs two integers.

No worker processes, no hidden random state: the order of documents and the anchors of each batch are derived from the seed,
hence a run that is killed and resumed sees the same batches as one that was not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafters.errors import UserError
from drafters.packing import AnchorSource, Document, PackedBatch, anchor_candidates, pack_documents
from drafters.replay import iterate_packs


@dataclass(frozen=True)
class PackingSpec:
    """How documents become batches.

    Attributes:
        row_tokens: documents are laid end to end up to this many tokens; 1 gives one document a batch.
        anchors_per_document: blocks trained per document and visit.
        anchor_source: `random` positions, or `rounds` where serving began a round.
        max_length: longer documents are cut.
    """

    row_tokens: int = 2048
    anchors_per_document: int = 64
    anchor_source: AnchorSource = "random"
    max_length: int = 2048


def derived_generator(*parts: int) -> torch.Generator:
    """A generator seeded by the hash of integers: nearby parts give unrelated streams."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class PackedLoader:
    """Iterates packed batches; Lightning saves and restores its position.

    Args:
        documents: training documents; those without a possible anchor are left out.
        spec: packing.
        seed: everything random derives from it.
        passes: times every document is visited in one epoch, each pass in another order.
        epoch: first epoch.
        num_batches: length of one iteration, which runs on from epoch to epoch; None ends it with the epoch. Epochs need not
            have equally many batches, which Lightning would expect of its own.
        rank, world_size: each rank takes every `world_size`-th batch of an epoch; all ranks take equally many.

    Raises:
        UserError: when no document has an anchor.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        spec: PackingSpec,
        *,
        seed: int,
        passes: int = 1,
        epoch: int = 0,
        num_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        cut = [document.truncated(spec.max_length) for document in documents]
        self.documents = [d for d in cut if anchor_candidates(d, spec.anchor_source)]
        if not self.documents:
            raise UserError(
                f"data: none of the {len(documents)} documents has two response tokens in a row "
                f"within {spec.max_length} tokens"
            )
        self.spec = spec
        self.seed = seed
        self.passes = passes
        self.epoch = epoch
        self.next_batch = 0
        self.num_batches = num_batches
        self.rank = rank
        self.world_size = world_size

    def plan(self, epoch: int) -> list[list[int]]:
        """Document indices of each batch of an epoch, for all ranks together."""
        batches: list[list[int]] = []
        for sweep in range(self.passes):
            order = torch.randperm(
                len(self.documents), generator=derived_generator(self.seed, epoch, sweep)
            ).tolist()
            for pack in iterate_packs([self.documents[i] for i in order], self.spec.row_tokens):
                batches.append(order[: len(pack)])
                order = order[len(pack) :]
        return batches

    def _per_rank(self, num_batches: int) -> int:
        return max(1, num_batches // self.world_size)

    def __len__(self) -> int:
        return self.num_batches or self._per_rank(len(self.plan(self.epoch)))

    def __iter__(self) -> Iterator[PackedBatch]:
        while True:
            plan = self.plan(self.epoch)
            while self.next_batch < self._per_rank(len(plan)):
                index = (self.next_batch * self.world_size + self.rank) % len(plan)
                self.next_batch += 1
                yield pack_documents(
                    [self.documents[i] for i in plan[index]],
                    anchors_per_document=self.spec.anchors_per_document,
                    anchor_source=self.spec.anchor_source,
                    generator=derived_generator(self.seed, self.epoch, 1_000_000 + index),
                )
            self.epoch += 1
            self.next_batch = 0
            if self.num_batches is None:
                return

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from."""
        return {"epoch": self.epoch, "next_batch": self.next_batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.epoch = state_dict["epoch"]
        self.next_batch = state_dict["next_batch"]

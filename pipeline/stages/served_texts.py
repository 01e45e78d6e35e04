"""Texts that were served, or held out, and a drafter's blocks at every token of them: what policies are judged on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from datamodules.streaming import record_to_document
from drafters.checkpoint import LoadedDrafter
from drafters.errors import UserError
from drafters.packing import Document
from pipeline.block_traces import BlockTrace, trace_documents
from pipeline.models import load_drafter_for
from pipeline.stages.context import Stage
from pipeline.stages.evaluate import heldout_documents, spread
from serving_bridge.records import VerificationRecord
from serving_bridge.transports import LogPlace, open_reader

Item = TypeVar("Item")

_READ = 256


def sample(items: Iterable[Item], count: int, seed: int) -> list[Item]:
    """`count` of them, any as likely as any other, in their order; no more than these are held in memory."""
    generator = random.Random(seed)
    kept: list[tuple[int, Item]] = []
    for place, item in enumerate(items):
        if place < count:
            kept.append((place, item))
        elif (slot := generator.randrange(place + 1)) < count:
            kept[slot] = place, item
    return [item for _, item in sorted(kept, key=itemgetter(0))]


def greedy_records(log: LogPlace) -> Iterator[VerificationRecord]:
    """Greedy records of the log; nothing is committed, so no reader is registered and none is held up."""
    reader = open_reader(log, "tune-policy", quarantine=False)
    while deliveries := reader.read(_READ):
        for delivery in deliveries:
            if delivery.record.sampling.temperature == 0:
                yield delivery.record


def served_documents(log: LogPlace, target_id: str, max_length: int) -> Iterator[Document]:
    """Greedy texts of the log that this target wrote."""
    for record in greedy_records(log):
        if record.target_id == target_id:
            yield record_to_document(record).truncated(max_length)


def texts_and_drafter(
    stage: Stage, drafter: Path, records: LogPlace | None, max_documents: int
) -> tuple[list[Document], LoadedDrafter]:
    """Texts with an anchor, at most so many, and the drafter of this checkpoint.

    Of the held-out documents they are taken evenly, of a log (`records`) at random by the run's seed.

    Raises:
        UserError: without such a text, or when the checkpoint is not for this target.
    """
    target, config = stage.bundle.target, stage.config
    if records is None:
        documents = spread([d for d in heldout_documents(stage) if d.anchor_positions()], max_documents)
    else:
        served = served_documents(records, target.identity.target_id, config.data.max_length)
        documents = sample((d for d in served if d.anchor_positions()), max_documents, config.seed)
    if not documents:
        raise UserError(f"--records {records}: no greedy text of this target")
    return documents, load_drafter_for(drafter, stage.bundle, dtype=target.dtype)


def replayed(stage: Stage, loaded: LoadedDrafter, documents: Sequence[Document]) -> list[BlockTrace]:
    """Traces of the documents, timed as `replay`."""
    with stage.result.section("replay"):
        return list(trace_documents(loaded, stage.bundle.target, documents))

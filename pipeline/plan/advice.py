"""Whether a step fits, and which single change would make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.plan.devices import Device
from pipeline.plan.memory import Memory, memory_of
from pipeline.plan.models import Models
from pipeline.plan.step import Stage, Step
from pipeline.plan.strategy import Strategy

USABLE = 0.92
"""Share of a device's memory that a step may fill; the rest is for the runtime, its libraries, and fragmentation."""

FEWEST_ANCHORS = 8
MOST_GPUS = 64


def fits_on(memory: Memory, device: Device) -> bool:
    """Whether the peak leaves the device what the runtime needs."""
    return memory.peak <= USABLE * device.memory_bytes


def single_changes(
    stage: Stage, step: Step, models: Models, strategy: Strategy, device: Device
) -> Iterator[str]:
    """Single changes with which it would fit, the least of each kind; or that there is none."""
    found: set[str] = set()
    for kind, text, changed, other in _changes(stage, step, strategy):
        if kind in found:
            continue
        memory = memory_of(changed, models, other)
        if fits_on(memory, device):
            found.add(kind)
            yield f"{text}: {memory.peak / 2**30:.1f} GiB"
    if not found:
        yield (
            f"no single change up to {MOST_GPUS} GPUs: combine several, beginning with the largest components, or choose "
            "smaller models"
        )


def _changes(stage: Stage, step: Step, strategy: Strategy) -> Iterator[tuple[str, str, Step, Strategy]]:
    """Kind, wording, step and strategy of single changes, each kind from its least on, sizes in powers of two."""
    if step.cache_bytes:
        yield "cache", f"{stage}.feature_cache_mib=0", replace(step, cache_bytes=0), strategy
    for anchors in _halves(step.anchors, FEWEST_ANCHORS):
        yield "anchors", f"{stage}.anchors_per_document={anchors}", replace(step, anchors=anchors), strategy
    for documents in _halves(step.documents, 1):
        text = f"data.row_tokens={documents * step.document_tokens}"
        yield "row", text, replace(step, documents=documents), strategy
    if not step.freeze_mlp:
        yield "mlp", "drafter.freeze_mlp=true", replace(step, freeze_mlp=True), strategy
    gpus = 2
    while gpus <= MOST_GPUS:
        if gpus > strategy.gpus or (gpus == strategy.gpus and not strategy.shards):
            text = f"FSDP2 over {gpus} GPUs"
            yield "shard", text, step, replace(strategy, gpus=gpus, shards=True)
        gpus *= 2
    if not strategy.serves_features:
        yield "server", "target on a feature server", step, replace(strategy, serves_features=True)


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value

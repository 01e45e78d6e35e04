"""Memory of the block loss: chunks of logits, and gradients formed in the forward.

R slots of a chunk, V vocabulary that the loss sees, H hidden, h bytes of an element of the head.
"""

from __future__ import annotations

from pipeline.plan.activations import FLOAT
from pipeline.plan.models import Models
from pipeline.plan.step import Step


def head_bytes(step: Step) -> int:
    """h: DFlash multiplies by the target's head as it is, D3D by its own, cast."""
    return step.product_bytes if step.family == "d3d" else step.target_bytes


def chunk_rows(step: Step) -> int:
    """Slots of one chunk: whole blocks whose fp32 logits fit into the loss's buffer, one at the least."""
    from drafters.block_loss import CHUNK_BYTES

    counted = step.block_size - 1
    rows = max(step.block_size, CHUNK_BYTES // (FLOAT * step.loss_vocabulary))
    return min(step.blocks, max(1, rows // counted)) * counted


def chunks(step: Step) -> int:
    """Chunks of slots and, for D3D, of next tokens."""
    rows = chunk_rows(step)
    return -(-step.counted_slots // rows) + -(-step.next_tokens // rows)


def loss_bytes(step: Step, models: Models) -> int:
    """The largest that the loss holds at a time."""
    vocabulary, hidden = step.loss_vocabulary, models.drafter_shape.hidden
    head = head_bytes(step)
    chunk = chunk_rows(step) * vocabulary * _bytes_per_logit(step, head)
    if step.teacher and not _whole_distribution(step):
        chunk += _moment_rows() * vocabulary * (head if step.objective == "ce" else 2 * head + 2 * FLOAT)
    # accumulated in fp32, and divided by the sum of weights
    states = 2 * step.slots * hidden * FLOAT
    if step.family == "dflash":
        return chunk + states
    # next tokens are blocks of two slots, gathered from the documents' rows
    states += 5 * step.next_tokens * hidden * FLOAT
    # fp32 sum, product of a chunk, its cast; that of the blocks waits while next tokens form their own
    table = vocabulary * hidden
    return chunk + states + table * (FLOAT + (3 if step.next_tokens else 2) * head)


def _whole_distribution(step: Step) -> bool:
    return step.objective == "opd" or (step.objective == "osd" and step.family == "d3d")


def _moment_rows() -> int:
    from drafters.teacher import CHUNK_ROWS

    return CHUNK_ROWS


def _bytes_per_logit(step: Step, head: int) -> int:
    """Bytes of all [R, V] tensors that are there at once, per entry.

    Labels alone: logits (h), q (4), its cast. Whole distributions: logits (h), the teacher's by position and by slot, the
    drafter's in fp32, log q, q, the terms of the divergence (4 each), two masks, the cast. A trained head: the weighted gradient
    and its cast.
    """
    cast = head if head < FLOAT else 0
    entry = head + cast + (6 * FLOAT + 2 if _whole_distribution(step) else FLOAT)
    return entry + (FLOAT + cast if step.family == "d3d" else 0)

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
    """Slots of one chunk of blocks: whole blocks whose logits fit into the loss's buffer, one at the least, chunks alike."""
    counted = step.block_size - 1
    most = max(1, _buffer_rows(step, step.block_size) // counted)
    return -(-step.blocks // -(-step.blocks // most)) * counted


def _buffer_rows(step: Step, block_size: int) -> int:
    from drafters.block_loss import LOGITS_BYTES

    return max(block_size, LOGITS_BYTES // (head_bytes(step) * step.loss_vocabulary))


def chunks(step: Step) -> int:
    """Chunks of slots and, for D3D, of next tokens."""
    next_tokens = -(-step.next_tokens // _buffer_rows(step, 2))
    return -(-step.counted_slots // chunk_rows(step)) + next_tokens


def loss_bytes(step: Step, models: Models) -> int:
    """The largest that the loss holds at a time."""
    vocabulary, hidden = step.loss_vocabulary, models.drafter_shape.hidden
    head = head_bytes(step)
    # blocks and next tokens have chunks of their own, one after the other
    rows = max(chunk_rows(step), min(step.next_tokens, _buffer_rows(step, 2)))
    chunk = rows * vocabulary * _bytes_per_logit(step, head)
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
    """Bytes of all [R, V] tensors that are there at once, per entry; on CPUs the fp32 ones are made for fewer rows at a time.

    Labels alone: logits (h), their fp32 cast, q (4). Whole distributions: logits (h), the teacher's by position (h), both in
    fp32, and q, for `opd`; for `osd` log q, p, and two terms of the divergence.
    """
    cast = FLOAT if head < FLOAT else 0
    if not _whole_distribution(step):
        return head + cast + FLOAT
    return 2 * head + cast + FLOAT * (2 if step.objective == "opd" else 5)

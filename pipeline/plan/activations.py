"""Bytes that autograd keeps between the forward and the backward of a drafter, tensor by tensor.

Counted from the modules as they are written, and checked against what autograd really saves. f = bytes of an fp32 element = 4,
p = bytes of an element in products (2 under autocast, else 4). Under autocast every product has its own cast of its input, and
the norms of queries and keys keep an fp32 copy of what they are given.

T document tokens, R block slots, H hidden, I intermediate, K/G attention/key-value heads, D head size.
"""

from __future__ import annotations

from pipeline.plan.architecture import Architecture
from pipeline.plan.step import Step

FLOAT = 4
INDEX = 8


def dflash_activations(step: Step, target: Architecture, *, layers: int, context_layers: int) -> int:
    """Bytes kept for the backward of a DFlash drafter, features included in the format of the products.

    Context: features, `fc` and its norm once; a key norm in every layer. Slots: `_layer_rows` and the attention's operands, in
    which the query heads that share keys are further rows of one head, of the mask too.
    """
    p, hidden = step.product_bytes, target.hidden
    tokens, slots = step.tokens, step.slots
    context = tokens * (context_layers * hidden * p + _norm(hidden, step, source=True))
    context += 0 if step.mixed else tokens * hidden * FLOAT  # shared by all layers' projections
    context += layers * tokens * (_head_norm(target.kv_heads, target.head_dim, step))
    context += layers * tokens * (2 * hidden * p if step.mixed else 0)
    rows = slots * _layer_rows(step, target, qk_norm=True)
    keys_values = 2 * step.block_keys * target.kv_width * p
    mask = step.block_pairs * target.heads // target.kv_heads * p
    attended = slots * target.query_width * p + slots * target.heads * FLOAT
    rotary = 2 * (tokens + slots) * target.head_dim * FLOAT
    # the embeddings of the slots need no gradient, so the first norm keeps neither them nor its scale
    first = slots * (hidden + 1) * FLOAT
    return (
        context
        + layers * (rows + keys_values + mask + attended)
        + rotary
        + _final_norm(step, target, slots)
        - first
    )


def d3d_activations(step: Step, lm: Architecture) -> int:
    """Bytes kept for the backward of a D3D drafter: documents and blocks are rows alike.

    Keys and values are kept for all rows, and once more for each document's blocks, but not repeated for query heads.
    """
    p, rows = step.product_bytes, step.tokens + step.slots
    layer = rows * _layer_rows(step, lm, qk_norm=lm.qk_norm)
    layer += rows * 2 * lm.kv_width * p + 2 * step.block_keys * lm.kv_width * p
    layer += rows * lm.query_width * p + rows * lm.heads * FLOAT
    layer += step.block_pairs * p
    rotary = 2 * rows * lm.head_dim * FLOAT
    return lm.layers * layer + rotary + rows * INDEX + _final_norm(step, lm, rows)


def _layer_rows(step: Step, arch: Architecture, *, qk_norm: bool) -> int:
    """Bytes of one row in one layer, but for the operands of attention other than the query.

    Two norms and the casts of their outputs (three products read the first, two the second); query and own key with their
    norms; the input of the output projection; four of the MLP: gate, its activation, up, their product.
    """
    p, hidden = step.product_bytes, arch.hidden
    mlp_trains = not step.freeze_mlp
    norms = 2 * _norm(hidden, step, source=False)
    outputs = hidden * (3 * p if step.mixed else FLOAT)
    outputs += hidden * mlp_trains * (2 * p if step.mixed else FLOAT)
    query = 2 * arch.query_width * p  # rotated, and what the output projection reads
    if qk_norm:
        query += _head_norm(arch.heads, arch.head_dim, step) + _head_norm(arch.kv_heads, arch.head_dim, step)
    return norms + outputs + query + (3 + mlp_trains) * arch.intermediate * p


def _norm(width: int, step: Step, *, source: bool) -> int:
    """An RMSNorm of one row: input, normalised input, scale; `source`: its input comes from a product."""
    normalised = step.product_bytes if source else FLOAT
    return width * (FLOAT + normalised) + FLOAT


def _head_norm(heads: int, head_dim: int, step: Step) -> int:
    """An RMSNorm of every head of one row."""
    return heads * _norm(head_dim, step, source=True)


def _final_norm(step: Step, arch: Architecture, rows: int) -> int:
    return rows * _norm(arch.hidden, step, source=False)

"""Tensors that come and go: of the target's forward, and of the drafter's backward. Estimates, meant to be a little too large.

T document tokens, H hidden, n captured layers.
"""

from __future__ import annotations

from pipeline.plan.activations import FLOAT
from pipeline.plan.models import Models
from pipeline.plan.step import Step


def features_bytes(step: Step, models: Models) -> int:
    """What a step keeps of the target's forward: final states, and for DFlash the captured ones, T·(n+1)·H elements."""
    layers = 1 + (models.context_layers if step.family == "dflash" else 0)
    return step.tokens * layers * models.target.hidden * step.target_bytes


def target_forward_bytes(step: Step, models: Models) -> int:
    """The target's forward, beyond the features that are left of it.

    Captured states before they are put side by side, and the larger of the features and of the mask of a row with the tensors of
    the widest layer. Attention: four tensors of the queries' width and four of the keys'. MLP: three of its width, of all experts
    that tokens pass through. Both beside the residual stream, its norm, and two fp32 tensors inside the norm.
    """
    arch, tokens, size = models.target, step.tokens, step.target_bytes
    attention = 4 * (arch.query_width * (2 if arch.gated_attention else 1) + arch.kv_width)
    mlp = 3 * arch.intermediate
    if arch.experts is not None:
        routed = arch.experts.active * (3 * arch.experts.intermediate + arch.hidden)
        mlp = routed if all(arch.sparse) else max(mlp, routed)
    linear = 0 if arch.linear is None else 2 * arch.linear.projection_width + 8 * arch.linear.value_width
    layer = tokens * (size * (2 * arch.hidden + max(attention, mlp, linear)) + 2 * arch.hidden * FLOAT)
    mask = tokens * tokens * (1 + size)
    captured = models.context_layers * tokens * arch.hidden * size
    return captured + max(0, mask + layer - features_bytes(step, models))


def backward_bytes(step: Step, models: Models) -> int:
    """The backward of one drafter layer beside what was kept for it, with the layer's gradients.

    Three fp32 tensors of the residual stream; of the MLP three of its width, or of attention four fp32 ones of the queries' width
    and the gradients of all keys and values in the format of products and in fp32.
    """
    arch, p = models.drafter_shape, step.product_bytes
    rows = step.slots + (step.tokens if step.family == "d3d" else 0)
    keys_values = 2 * step.block_keys * arch.kv_width * (p + FLOAT)
    attention = rows * 4 * arch.query_width * FLOAT + keys_values
    mlp = rows * 3 * arch.intermediate * p
    return rows * 3 * arch.hidden * FLOAT + max(attention, mlp) + models.drafter.largest_layer * FLOAT

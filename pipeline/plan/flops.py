"""Floating-point operations of one batch, by component: a product of [a, b] and [b, c] counts 2·a·b·c.

T document tokens, R block slots, H hidden, V vocabulary that the loss sees, K·D width of all query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.architecture import Architecture
from pipeline.plan.models import Models
from pipeline.plan.step import Step

DELTA_CHUNK = 64
"""Tokens that Gated DeltaNet's chunked form takes at a time."""

BACKWARD = 2
"""Products in the backward of a product: one for its input, one for its weight."""

ATTENTION_BACKWARD = 2.5
"""FLOPs in the backward of fused attention per FLOP of its forward: four products to two, and the scores anew."""


@dataclass(frozen=True)
class DrafterFlops:
    """FLOPs of a drafter's pass over a batch.

    Attributes:
        products: forward of all weight products.
        attention: forward of attention's own two products, masked pairs included.
        products_backward: backward of the weight products.
    """

    products: int
    attention: int
    products_backward: int

    @property
    def forward(self) -> int:
        """FLOPs of the forward."""
        return self.products + self.attention

    def backward(self, attention_factor: float = ATTENTION_BACKWARD) -> float:
        """FLOPs of the backward; `attention_factor` is 2 where the scores are kept in place of computed anew."""
        return self.products_backward + attention_factor * self.attention


def target_flops(step: Step, models: Models) -> int:
    """FLOPs of the target's forward, without its head.

    2·T·(active matrices), and 4·T²·K·D in each layer of softmax attention: documents of a row are told apart by a mask. From a
    feature cache documents run alone, which takes less. Linear attention is an estimate of its chunked form.
    """
    if not step.runs_target:
        return 0
    size, arch, tokens = models.target_size, models.target, step.tokens
    products = 2 * tokens * (size.matrices - size.idle_matrices)
    attention = 4 * tokens * tokens * arch.query_width * sum(arch.full_attention)
    return products + attention + tokens * delta_flops(arch) * (arch.layers - sum(arch.full_attention))


def delta_flops(arch: Architecture) -> int:
    """FLOPs per token and layer of Gated DeltaNet's rule: products inside a chunk, and with the state."""
    if arch.linear is None:
        return 0
    linear = arch.linear
    inside = DELTA_CHUNK * (3 * linear.key_dim + 2 * linear.value_dim)
    state = 3 * linear.key_dim * linear.value_dim
    taps = (2 * linear.key_width + linear.value_width) * linear.kernel
    return 2 * (linear.value_heads * (inside + state) + taps)


def drafter_flops(step: Step, models: Models) -> DrafterFlops:
    """FLOPs of the drafter over a batch.

    DFlash: `fc` 2·T·n·H² (its input needs no gradient), context projections 2·T·weights, slots 2·R·weights, attention
    4·pairs·K·D a layer. D3D: 2·(T+R)·weights; attention over documents 4·D·S²·K·D, causal but counted whole, and over blocks.
    Frozen MLPs have half a backward.
    """
    width = models.drafter_shape.query_width
    frozen = models.drafter.mlp_matrices * step.freeze_mlp
    if models.dflash is not None:
        size = models.dflash
        fc = 2 * step.tokens * size.fc
        context = 2 * step.tokens * size.context_matrices
        slots = 2 * step.slots * (size.matrices - size.fc)
        backward = fc + BACKWARD * (context + slots) - 2 * step.slots * frozen
        return DrafterFlops(fc + context + slots, size.layers * 4 * step.block_pairs * width, backward)
    rows = step.tokens + step.slots
    products = 2 * rows * models.drafter.matrices
    pairs = step.documents * step.document_tokens**2 + step.block_pairs
    backward = BACKWARD * products - 2 * rows * frozen
    return DrafterFlops(products, models.drafter_layers * 4 * pairs * width, backward)


def loss_flops(step: Step, models: Models) -> int:
    """FLOPs of the head in the loss, forward and backward together, in closed form without recompute.

    Every counted row: 2·H·V for its logits and 2·H·V for d(loss)/d(hidden); a trained head (D3D) 2·H·V for its own gradient.
    Every distinct position of the teacher: 2·H·V for its logits; `osd` over a frozen head forms Σ p·W besides.
    """
    trained_head = step.family == "d3d"
    product = 2 * models.drafter_shape.hidden * step.loss_vocabulary
    teacher_product = 2 * models.target.hidden * step.loss_vocabulary
    rows = step.counted_slots + step.next_tokens
    total = rows * product * (3 if trained_head else 2)
    if step.teacher:
        moments = step.objective == "osd" and not trained_head
        total += step.teacher_positions * teacher_product * (2 if moments else 1)
        if step.objective == "osd":
            total += step.next_tokens * teacher_product
    return total


def length_head_flops(step: Step, models: Models) -> int:
    """FLOPs of the length head: forward, and the gradient of its weights; its input needs none."""
    return 4 * step.slots * models.length_head(step)

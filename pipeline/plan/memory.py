"""Memory of one training step on one GPU, by component, in bytes.

P parameters of the drafter, P_t those that get a gradient, T document tokens, H hidden, C = n·H width of the captured features.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from pipeline.plan.activations import FLOAT, d3d_activations, dflash_activations
from pipeline.plan.loss_memory import loss_bytes
from pipeline.plan.models import Models
from pipeline.plan.passing import backward_bytes, features_bytes, target_forward_bytes
from pipeline.plan.step import Step
from pipeline.plan.strategy import Strategy

ADAMW_MOMENTS = 8
"""Bytes per parameter of AdamW's two moments in fp32."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU.

    Attributes:
        target_weights: all, a share of them, or the embedding and head alone where the target is elsewhere.
        target_forward: passing tensors of the target's forward beside the features; no keys and values are kept.
        features: the target's states of the batch: T·(C+H), H alone for D3D.
        master_weights: 4·P.
        gradients: 4·P_t.
        moments: 8·P_t.
        ddp_buckets: DDP's copy of the gradients.
        gathered: whole layers that FSDP2 puts together, the next one already under way.
        weight_casts: the drafter's weights in bfloat16, as autocast hands them to the products, kept for the backward.
        activations: what the backward of the drafter needs.
        drafter_backward: passing tensors of a layer's backward, and that layer's gradients.
        loss: one chunk of logits with what is computed of it, gradients of hidden states, of a trained head.
        feature_cache: as configured.
        length_head: its weights, gradients, moments and activations.
        gradients_stay: gradients of earlier batches are there throughout (`accumulate` > 1).
    """

    target_weights: int
    target_forward: int
    features: int
    master_weights: int
    gradients: int
    moments: int
    ddp_buckets: int
    gathered: int
    weight_casts: int
    activations: int
    drafter_backward: int
    loss: int
    feature_cache: int
    length_head: int
    gradients_stay: bool

    def components(self) -> dict[str, int]:
        """Every component by its name; their sum is more than the peak, as not all are there at once."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "gradients_stay"}

    @property
    def resident(self) -> int:
        """What is there from step to step."""
        kept = self.target_weights + self.master_weights + self.moments + self.ddp_buckets
        kept += self.feature_cache + self.length_head
        return kept + self.gathered + (self.gradients if self.gradients_stay else 0)

    @property
    def peak(self) -> int:
        """Resident memory and the largest of the phases target, loss, backward.

        In the backward activations and casts go as gradients come, layer by layer; layers being alike, the sum is never more than
        the larger of the two. The optimizer works in place.
        """
        new_gradients = 0 if self.gradients_stay else self.gradients
        kept = self.weight_casts + self.activations + max(self.loss, self.drafter_backward)
        return self.resident + self.features + max(self.target_forward, kept, new_gradients)


def memory_of(step: Step, models: Models, strategy: Strategy) -> Memory:
    """Bytes on each GPU of a strategy."""
    shares = strategy.gpus if strategy.shards else 1
    trained = models.trained(step)
    drafter = models.drafter
    tables = 0 if models.lm is None else models.lm.vocab * models.lm.hidden
    here = not strategy.serves_features
    if models.dflash is not None:
        activations = dflash_activations(
            step, models.target, layers=models.drafter_layers, context_layers=models.context_layers
        )
    else:
        activations = d3d_activations(step, models.drafter_shape)
    return Memory(
        target_weights=_target_weights(step, models, strategy),
        target_forward=target_forward_bytes(step, models) if here and step.runs_target else 0,
        features=features_bytes(step, models) if step.runs_target else 0,
        master_weights=_share(FLOAT * drafter.total, shares),
        gradients=_share(FLOAT * trained, shares),
        moments=_share(ADAMW_MOMENTS * trained, shares),
        ddp_buckets=FLOAT * trained if strategy.gpus > 1 and not strategy.shards else 0,
        gathered=_gathered(step, models, strategy, tables),
        # FSDP2 casts what it gathers
        weight_casts=2 * (drafter.matrices + tables) if step.mixed and not strategy.shards else 0,
        activations=activations,
        drafter_backward=backward_bytes(step, models),
        loss=loss_bytes(step, models),
        feature_cache=step.cache_bytes,
        length_head=models.length_head(step) * (2 * FLOAT + ADAMW_MOMENTS)
        + step.slots * 2 * (step.length_head_width or 0) * FLOAT,
        gradients_stay=step.accumulate > 1,
    )


def _share(whole: int, shares: int) -> int:
    return -(-whole // shares)


def _target_weights(step: Step, models: Models, strategy: Strategy) -> int:
    """All of them, as validation needs them too; elsewhere run, DFlash keeps embedding and head, a D3D teacher its head."""
    kept_head = (
        models.target.hidden * step.loss_vocabulary if step.loss_vocabulary < models.target.vocab else 0
    )
    size = models.target_size
    if not strategy.serves_features:
        whole = size.total
    elif step.family == "dflash":
        whole = size.embedding + size.head
    else:
        whole = models.head_elements if step.teacher else 0
    shares = strategy.gpus if strategy.shards and not strategy.serves_features else 1
    return (_share(whole, shares) + kept_head) * step.target_bytes


def _gathered(step: Step, models: Models, strategy: Strategy, tables: int) -> int:
    """Two whole layers of what is sharded, its embedding and head, and the gradient of a drafter's layer."""
    if not strategy.shards:
        return 0
    drafter = (3 * models.drafter.largest_layer + tables) * step.product_bytes
    if strategy.serves_features:
        return drafter
    size = models.target_size
    return drafter + (2 * size.largest_layer + size.embedding + size.head) * step.target_bytes

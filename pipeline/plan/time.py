"""Time of one optimizer step on one GPU, by component: the slower of computing and moving bytes, component after component.

Nothing overlaps from one component to the next; launches of kernels, the loader and the logger are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.activations import FLOAT
from pipeline.plan.architecture import Architecture
from pipeline.plan.devices import Device
from pipeline.plan.flops import (
    drafter_flops,
    length_head_flops,
    loss_flops,
    target_flops,
)
from pipeline.plan.loss_memory import chunks, head_bytes
from pipeline.plan.memory import Memory
from pipeline.plan.models import Models
from pipeline.plan.sizes import ModelSize
from pipeline.plan.step import Step
from pipeline.plan.strategy import Strategy

OPTIMIZER_BYTES = 40
"""Per trained parameter: fused AdamW reads weight, gradient and two moments and writes three of them (28), the norm of the
gradient reads it (4), clipping reads and writes it (8)."""

LABEL_PASSES = 8
"""fp32 bytes per logit that labels move: softmax written and read once more."""

DISTRIBUTION_PASSES = 160
"""fp32 bytes per logit of a whole distribution: about forty passes over softmaxes, ratio, clipping and gradient."""

MOMENT_PASSES = 40
"""fp32 bytes per logit of the teacher's moments."""


@dataclass(frozen=True)
class Component:
    """Work of one optimizer step: `flops` FLOP, `moved` bytes to and from memory or over a link, `seconds`."""

    name: str
    flops: float
    moved: float
    seconds: float


def time_of(
    step: Step, models: Models, strategy: Strategy, memory: Memory, device: Device
) -> list[Component]:
    """Components in the order of a step; `accumulate` batches are counted, the optimizer and DDP's sum once."""
    drafter = drafter_flops(step, models)
    half_target, half = step.target_bytes == 2, step.mixed
    trained, total = models.trained(step), models.drafter.total
    # mixed: read in fp32, cast, read again
    weights = total * (FLOAT + 2 * step.product_bytes if step.mixed else FLOAT)
    # cast gradients are written, read, and written in fp32
    gradients = trained * (FLOAT + 2 * step.product_bytes if step.mixed else FLOAT)
    head_moved = float(loss_moved(step, models))
    work = [
        ("drafter forward", drafter.forward, weights + 2 * memory.activations, half),
        (
            "drafter backward",
            drafter.backward(),
            models.drafter.matrices * step.product_bytes + gradients + 2 * memory.activations,
            half,
        ),
        ("loss head", loss_flops(step, models), head_moved, head_bytes(step) == 2),
        ("length head", length_head_flops(step, models), FLOAT * 2 * models.length_head(step), half),
    ]
    if not strategy.serves_features:
        work.insert(
            0, ("target forward", target_flops(step, models), target_moved(step, models), half_target)
        )
    components = [
        Component(
            name,
            step.accumulate * flops,
            step.accumulate * moved,
            step.accumulate * device.seconds(flops, moved, half=half_products),
        )
        for name, flops, moved, half_products in work
        if flops
    ]
    updated = OPTIMIZER_BYTES * trained / (strategy.gpus if strategy.shards else 1)
    components.append(Component("optimizer", 0, updated, device.seconds(0, updated, half=False)))
    exchanged = exchange_bytes(step, models, strategy)
    if exchanged:
        components.append(Component("GPU exchange", 0, exchanged, exchanged / device.link_bandwidth))
    received = received_bytes(step, models, strategy)
    if received:
        components.append(Component("features received", 0, received, received / device.network_bandwidth))
    return components


def target_moved(step: Step, models: Models) -> float:
    """Bytes of the target's forward."""
    return forward_moved(models.target, models.target_size, step.tokens, step.target_bytes)


def forward_moved(arch: Architecture, size: ModelSize, tokens: int, element_bytes: int) -> float:
    """Bytes of a forward without head and cache: the weights that any token needs, and each layer's tensors written and read.

    T tokens that choose k of E experts at random leave out E·(1 - k/E)^T of them.
    """
    touched: float = size.matrices
    width = arch.intermediate
    if arch.experts is not None:
        experts = arch.experts
        unmet_share = (1 - experts.active / experts.held) ** tokens
        touched -= unmet_share * size.idle_matrices * experts.held / max(1, experts.held - experts.active)
        width = experts.active * experts.intermediate
    return element_bytes * (touched + 2 * tokens * arch.layers * layer_elements(arch, width))


def layer_elements(arch: Architecture, intermediate: int) -> int:
    """Elements of the tensors of a token in a layer."""
    return 6 * arch.hidden + 3 * arch.query_width + 4 * arch.kv_width + 4 * intermediate


def loss_moved(step: Step, models: Models) -> int:
    """Bytes of the loss: the head is read twice for every chunk, a trained head's gradient is added to; passes over logits."""
    head, vocabulary = head_bytes(step), step.loss_vocabulary
    table = vocabulary * models.drafter_shape.hidden
    count = chunks(step)
    trained = step.family == "d3d"
    moved = count * table * (2 * head + (2 * FLOAT + 2 * head if trained else 0))
    rows = step.counted_slots + step.next_tokens
    whole = step.objective == "opd" or (step.objective == "osd" and trained)
    moved += rows * vocabulary * (5 * head + (DISTRIBUTION_PASSES if whole else LABEL_PASSES))
    if step.teacher:
        soft = step.objective == "osd" and not trained
        products = 2 if soft else 1
        moved += products * count * vocabulary * models.target.hidden * step.target_bytes
        moved += step.teacher_positions * vocabulary * (2 * head + (MOMENT_PASSES if soft else 0))
    return moved


def exchange_bytes(step: Step, models: Models, strategy: Strategy) -> float:
    """Bytes that each GPU sends to others in a step.

    DDP: the gradients are summed in a ring, 2·(n-1)/n of them, after the last batch. FSDP2, every batch: weights of the drafter
    are gathered in forward and backward, its gradients reduced, weights of the target gathered; (n-1)/n of each.
    """
    n = strategy.gpus
    if n == 1:
        return 0
    others = (n - 1) / n
    trained = models.trained(step)
    if not strategy.shards:
        return 2 * others * FLOAT * trained
    moved = 2 * models.drafter.total * step.product_bytes + FLOAT * trained
    if not strategy.serves_features and step.runs_target:
        moved += models.target_size.total * step.target_bytes
    return step.accumulate * others * moved


def received_bytes(step: Step, models: Models, strategy: Strategy) -> int:
    """Bytes of states that each GPU receives from a feature server in a step."""
    if not strategy.serves_features or not step.runs_target:
        return 0
    layers = (models.context_layers if step.family == "dflash" else 0) + step.teacher
    return step.accumulate * step.tokens * layers * models.target.hidden * step.target_bytes

"""What a step must cost at least: its matrix products and its memory traffic, against what this machine can do.

Products counted: the drafter's over context tokens T and block slots R₀ = N·B, forward and backward (twice the forward; the
features need no gradient, so `fc` only once), scores of the keys a slot may see; the head's over the R counted slots forward and
for d(hidden), and once more over the P distinct teacher positions for OPD. Bytes counted: every weight and the head read once per
product, logits written and read four times per chunk pass, AdamW's 28 bytes a weight.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from contest.problem import Shape


@dataclass(frozen=True)
class Machine:
    """Measured peaks for each second of CPU time: products in FLOP, memory in bytes (read plus written).

    Per CPU-second, so that other load on the machine, which stretches wall time, does not raise the floor.
    """

    flops: float
    bandwidth: float


def distinct_positions(shape: Shape, anchors_N: torch.Tensor) -> int:
    """Target positions that some counted slot is predicted from."""
    return (anchors_N[:, None] + torch.arange(shape.block - 1)).unique().numel()


def drafter_weights(shape: Shape) -> tuple[int, int, int]:
    """Weights that context tokens pass beside `fc`, that slots pass, and of `fc`."""
    h, width, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    key_value = shape.layers * 2 * h * kv
    slots = key_value + shape.layers * (2 * h * width + 3 * h * shape.intermediate)
    return key_value, slots, shape.context_layers * h * h


def parts(shape: Shape, anchors_N: torch.Tensor, *, opd: bool, half: bool) -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of drafter, head and optimizer."""
    key_value, slots, fc = drafter_weights(shape)
    rows = shape.anchors * shape.block
    visible = float((anchors_N * shape.block + shape.block**2).sum())
    scores = 2 * 2 * visible * shape.heads * shape.head_dim * shape.layers
    # forward 2 FLOP a weight and row, backward 4; the features' gradient is not needed
    drafter = 6 * (key_value * shape.length + slots * rows) + 4 * fc * shape.length + 3 * scores
    size = 2 if half else 4
    head_rows = 2 * shape.counted + (distinct_positions(shape, anchors_N) if opd else 0)
    head = 2.0 * head_rows * shape.hidden * shape.vocab
    weights = slots + fc
    logits = shape.counted * shape.vocab * 4
    passes = 3 if opd else 2
    return {
        "drafter": (drafter, 3.0 * weights * size),
        "head": (head, passes * shape.hidden * shape.vocab * size + 4.0 * logits * (2 if opd else 1)),
        "optimizer": (12.0 * weights, 28.0 * weights),
    }


def floor_seconds(shape: Shape, anchors_N: torch.Tensor, machine: Machine, *, opd: bool, half: bool) -> float:
    """CPU-seconds that no implementation of this step gets below on this machine."""
    return sum(
        max(flops / machine.flops, moved / machine.bandwidth)
        for flops, moved in parts(shape, anchors_N, opd=opd, half=half).values()
    )


def measure_machine(shape: Shape, dtype: torch.dtype, threads: int) -> Machine:
    """The best of a few products of the head's shape, and of a few copies."""
    torch.set_num_threads(threads)
    left = torch.randn(shape.counted, shape.hidden).to(dtype)
    right = torch.randn(shape.vocab, shape.hidden).to(dtype)
    source, sink = torch.ones(64 * 2**20), torch.empty(64 * 2**20)
    best_product = best_copy = float("inf")
    output = torch.empty(shape.counted, shape.vocab, dtype=dtype)
    for _ in range(6):
        started = time.process_time()
        torch.mm(left, right.T, out=output)
        best_product = min(best_product, time.process_time() - started)
        started = time.process_time()
        sink.copy_(source)
        best_copy = min(best_copy, time.process_time() - started)
    flops = 2 * shape.counted * shape.hidden * shape.vocab / best_product
    return Machine(flops, 2 * source.nbytes / best_copy)

"""Accelerators by name, and this machine's CPU measured."""

from __future__ import annotations

from dataclasses import dataclass

from drafters.errors import UserError

MIB = 2**20


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        name: as `--device` takes it.
        bf16_flops, fp32_flops: dense matrix products per second at their peak, FLOP/s.
        bandwidth: of its memory, bytes/s.
        memory_bytes: as the driver reports it.
        link_bandwidth: to the other GPUs of its node, bytes/s in one direction.
        network_bandwidth: to another machine, bytes/s.
        efficiency: share of the peak that matrix products of a training step reach.
    """

    name: str
    bf16_flops: float
    fp32_flops: float
    bandwidth: float
    memory_bytes: int
    link_bandwidth: float
    network_bandwidth: float = 50e9  # 400 Gbit/s
    efficiency: float = 0.5

    def seconds(self, flops: float, moved: float, *, half: bool) -> float:
        """max(FLOPs / (peak·efficiency), bytes / bandwidth): the slower of computing and moving, which overlap."""
        peak = self.bf16_flops if half else self.fp32_flops
        return max(flops / (peak * self.efficiency), moved / self.bandwidth)


# NVIDIA's data sheets, SXM: bfloat16 without sparsity, fp32 without TF32, as PyTorch multiplies by default
GPUS = {
    "h200": Device("h200", 989e12, 67e12, 4.8e12, 143_771 * MIB, 450e9),
    "h100": Device("h100", 989e12, 67e12, 3.35e12, 81_559 * MIB, 450e9),
    "a100": Device("a100", 312e12, 19.5e12, 2.039e12, 81_920 * MIB, 300e9),
}
DEVICES = (*GPUS, "cpu")


def find_device(name: str) -> Device:
    """A GPU of the table, or `cpu`: this machine's, measured in about a second.

    Raises:
        UserError: naming the devices there are.
    """
    if name == "cpu":
        return measure_cpu()
    if name not in GPUS:
        raise UserError(f"--device: {name} is unknown; use one of {', '.join(DEVICES)}")
    return GPUS[name]


def measure_cpu() -> Device:
    """This machine's CPU on torch's threads: products of both formats and a copy, each the fastest of a few.

    The peak is a measured one, of products large enough to be efficient; smaller ones of a step reach less.
    """
    import time

    import psutil
    import torch
    from torch.nn.functional import linear

    def fastest(rounds: int, dtype: torch.dtype) -> float:
        rows, inputs, outputs = 512, 768, 3072
        left, right = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
        shortest = float("inf")
        for _ in range(rounds):
            before = time.perf_counter()
            linear(left, right)
            shortest = min(shortest, time.perf_counter() - before)
        return 2 * rows * inputs * outputs / shortest

    source = torch.ones(32 * MIB)
    target = torch.empty_like(source)
    copy = float("inf")
    for _ in range(4):
        before = time.perf_counter()
        target.copy_(source)
        copy = min(copy, time.perf_counter() - before)
    return Device(
        name="cpu",
        bf16_flops=fastest(5, torch.bfloat16),
        fp32_flops=fastest(5, torch.float32),
        bandwidth=2 * source.nbytes / copy,
        memory_bytes=psutil.virtual_memory().total,
        link_bandwidth=2 * source.nbytes / copy,
        network_bandwidth=1.25e9,  # 10 Gbit/s
        efficiency=0.8,
    )

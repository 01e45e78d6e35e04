"""What this machine's CPU is good at: the number format that it multiplies faster, memory that it is given back."""

from __future__ import annotations

import ctypes
import sys
import time
from functools import cache

from pipeline import ranks

PROBE_SHAPE = (256, 512, 4096)  # rows, inputs, outputs: about a batch through a small model's projection
PROBE_ROUNDS = 5
PROBE_SECONDS = 0.5
WORTHWHILE = 1.2  # below this the casts of mixed precision eat the gain


@cache
def faster_bfloat16(threads: int) -> float:
    """How many times faster this CPU multiplies matrices in bfloat16 than in float32, on `threads` threads.

    Takes the shortest of a few alternating runs, so that other load on the machine sways it little. CPUs without
    bfloat16 instructions give less than 1. No random numbers are drawn: a resumed run must see the same ones.
    """
    import torch
    from torch.nn.functional import linear

    rows, inputs, outputs = PROBE_SHAPE
    shortest = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    operands = {
        dtype: (torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype))
        for dtype in shortest
    }
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        started = time.perf_counter()
        for _ in range(PROBE_ROUNDS):
            for dtype, (left, right) in operands.items():
                before = time.perf_counter()
                linear(left, right)
                shortest[dtype] = min(shortest[dtype], time.perf_counter() - before)
            if time.perf_counter() - started > PROBE_SECONDS:
                break
    finally:
        torch.set_num_threads(threads_before)
    return shortest[torch.float32] / shortest[torch.bfloat16]


def resolve_dtype(setting: str) -> str:
    """`float32` or `bfloat16` as configured; `auto` is bfloat16 where the device multiplies it faster.

    On a GPU that means bfloat16 in hardware, on a CPU at least 1.2 times float32's speed.
    """
    if setting != "auto":
        return setting
    return "bfloat16" if _bfloat16_pays() else "float32"


def resolve_precision(setting: str) -> str:
    """Lightning precision as configured; `auto` is `bf16-mixed` or `32-true` by the rule of `resolve_dtype`."""
    if setting != "auto":
        return setting
    return "bf16-mixed" if _bfloat16_pays() else "32-true"


def _bfloat16_pays() -> bool:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # a measurement: processes that train together must not come to different ends
    return ranks.decided_by_first(lambda: faster_bfloat16(torch.get_num_threads()) >= WORTHWHILE)


def keep_freed_memory() -> None:
    """Have this process reuse the memory of large buffers where the C library can be told to (glibc).

    By default it returns every buffer of more than 32 MiB to the system when it is freed, and the next one is made of pages
    that the system has to clear first. A training step on a CPU frees and takes hundreds of them. In exchange
    the process keeps its peak of memory until it ends.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)

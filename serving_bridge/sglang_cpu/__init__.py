"""SGLang's DFLASH on a machine without GPU, for tests, demos and development.

SGLang runs on CPUs, but offers DFLASH there only to platforms that declare it, and its published kernel package is built
for GPUs alone. With `DRAFTSMITH_SGLANG_CPU=1` this declares a CPU platform that has DFLASH; `kernels/` holds the few
functions that SGLang imports from the kernel package, in plain torch, and goes on `PYTHONPATH`. Never set either on a
machine with a GPU: production needs neither.
"""

from __future__ import annotations

import os
from pathlib import Path

ENABLE_VARIABLE = "DRAFTSMITH_SGLANG_CPU"
KERNELS = Path(__file__).parent / "kernels"


def enabled() -> bool:
    """Whether the operator asked for it."""
    return os.environ.get(ENABLE_VARIABLE) == "1"


def environment(threads: int | None = None) -> dict[str, str]:
    """Variables that a CPU server needs."""
    variables = {
        ENABLE_VARIABLE: "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_PLATFORM": "draftsmith_cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(KERNELS), os.environ.get("PYTHONPATH")])),
    }
    if threads is not None:
        variables |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return variables


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's class, unless not asked for."""
    return "serving_bridge.sglang_cpu.platform.CpuDraftPlatform" if enabled() else None


def register() -> None:
    """Entry point of `sglang.srt.plugins`: what the platform interface cannot say."""
    if enabled():
        from serving_bridge.sglang_cpu.hooks import install

        install()

"""One contender in a process of its own: reads a problem, then obeys commands from standard input, one line each.

`check FILE` answers loss and gradient (written to FILE) before any step; `steps N` answers CPU and wall seconds of N optimizer
steps; `peak` answers the peak memory since loading; `profile N` prints a table. Answers are lines of JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from contest.problem import SHAPES, read_problem
from contest.side import Side, adamw

MIB = 2**20


def make_side(name: str, problem: Any) -> Side:
    """`ours-VARIANT`, `specforge-ATTENTION[-CHUNK_BLOCKS]` or `speculators-ATTENTION`."""
    kind, option, *rest = name.split("-")
    if kind == "ours":
        from contest.ours import ours

        return ours(problem, option)
    from contest import peers

    if kind == "specforge":
        return peers.specforge(problem, option, *(int(blocks) for blocks in rest))
    return peers.speculators(problem, option)


def memory_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


class Stepper:
    """Steps, and what they cost."""

    def __init__(self, side: Side, half: bool) -> None:
        self.side = side
        self.half = half
        self.optimizer = adamw(side)
        # what loading and initialisation took and freed is no part of what stands before the first step
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        self.before = memory_bytes("VmRSS")

    def gradient(self) -> torch.Tensor:
        """One loss and its gradient; the loss detached."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            loss = self.side.loss()
        loss.backward()
        return loss.detach()

    def check(self, path: str) -> dict[str, float]:
        loss = self.gradient()
        gradients = {
            name: weight.grad * self.side.factor
            for name, weight in self.side.weights.items()
            if weight.grad is not None
        }
        save_file(gradients, path)
        return {"loss": float(loss) * self.side.factor}

    def steps(self, count: int) -> dict[str, list[float]]:
        cpu, wall = [], []
        for _ in range(count):
            cpu_before, wall_before = time.process_time(), time.perf_counter()
            self.gradient()
            self.optimizer.step()
            cpu.append(time.process_time() - cpu_before)
            wall.append(time.perf_counter() - wall_before)
        return {"cpu": cpu, "wall": wall}

    def peak(self) -> dict[str, float]:
        return {"mib": (memory_bytes("VmHWM") - self.before) / MIB, "baseline_mib": self.before / MIB}

    def profile(self, count: int) -> dict[str, str]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.steps(count)
        averages = profiler.key_averages(group_by_input_shape=True)
        return {
            "table": averages.table(sort_by="self_cpu_time_total", row_limit=28, max_name_column_width=40)
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", required=True)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--problem", required=True, type=Path)
    parser.add_argument("--dtype", required=True, choices=("float32", "bfloat16"))
    parser.add_argument("--times", type=int, default=1, help="so many times the shape's anchors")
    parser.add_argument("--threads", required=True, type=int)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    # libraries print to standard output, which is for answers alone
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shape = SHAPES[options.shape]
    shape = replace(shape, anchors=shape.anchors * options.times)
    problem = read_problem(shape, options.problem, getattr(torch, options.dtype))
    stepper = Stepper(make_side(options.side, problem), half=options.dtype == "bfloat16")

    def answer(facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    answer({"ready": options.side})
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "check":
            answer(stepper.check(arguments[0]))
        elif command == "steps":
            answer(stepper.steps(int(arguments[0])))
        elif command == "profile":
            answer(stepper.profile(int(arguments[0])))
        else:
            answer(stepper.peak())


if __name__ == "__main__":
    main()

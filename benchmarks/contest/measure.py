"""Running a case: all sides stand ready in processes of their own and take their steps in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from contest.environment import ROOT

# what `pipeline.hardware.keep_freed_memory` sets from within
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
WARM_UP = 2
LOSS_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}
COSINE_TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-3}


@dataclass(frozen=True)
class Case:
    """One problem in one number format under one allocator; `kept`: freed memory stays with the process, on all sides."""

    shape: str
    dtype: str
    kept: bool = True
    times: int = 1

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.dtype}-{'kept' if self.kept else 'default'}"


class Worker:
    """A contender's process."""

    def __init__(self, side: str, case: Case, problem: Path, python: Path, threads: int) -> None:
        self.side = side
        command = [
            python,
            "-m",
            "contest.worker",
            "--side",
            side,
            "--shape",
            case.shape,
            "--dtype",
            case.dtype,
        ]
        command += ["--problem", problem, "--threads", str(threads), "--times", str(case.times)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        environment.pop("OMP_NUM_THREADS", None)
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, **(KEPT if case.kept else {})},
        )
        self._ready = False

    def ask(self, command: str) -> dict[str, Any]:
        """What the worker answers; the first call waits until it stands ready, so that several can load at once."""
        assert self._process.stdin is not None
        if not self._ready:
            self._answer()
            self._ready = True
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.side} ended with {self._process.wait()}; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def run_case(
    case: Case,
    sides: Sequence[tuple[str, Path]],
    problem: Path,
    *,
    threads: int,
    sessions: int,
    rounds: int,
    steps: int,
) -> dict[str, Any]:
    """CPU and wall seconds of every round, and peak memory (MiB above what was loaded) of every session.

    Every session starts the processes anew; the order within a round is turned round every other time.
    """
    cpu: dict[str, list[float]] = {side: [] for side, _ in sides}
    wall: dict[str, list[float]] = {side: [] for side, _ in sides}
    memory: dict[str, list[float]] = {side: [] for side, _ in sides}
    for session in range(sessions):
        with ExitStack() as stack:
            workers = [
                stack.enter_context(Worker(side, case, problem, python, threads)) for side, python in sides
            ]
            for worker in workers:
                worker.ask("peak")
            for worker in workers:
                worker.ask(f"steps {WARM_UP}")
                memory[worker.side].append(worker.ask("peak")["mib"])
            for number in range(rounds):
                for worker in workers if number % 2 == 0 else reversed(workers):
                    taken = worker.ask(f"steps {steps}")
                    cpu[worker.side].append(statistics.mean(taken["cpu"]))
                    wall[worker.side].append(statistics.mean(taken["wall"]))
            print(f"  {case.name}: session {session + 1} of {sessions}", flush=True)
    return {"case": case.name, "cpu": cpu, "wall": wall, "memory": memory}


def check_agreement(
    case: Case, sides: Iterable[tuple[str, Path]], problem: Path, scratch: Path, threads: int
) -> dict[str, dict[str, float]]:
    """Loss (as Σ w·ℓ / Σ w) and gradient of every side before its first step, against the first side's.

    Raises:
        RuntimeError: where they differ by more than rounding.
    """
    found: dict[str, dict[str, float]] = {}
    reference: tuple[float, dict[str, torch.Tensor]] | None = None
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(side, case, problem, python, threads)) for side, python in sides
        ]
        paths = {worker.side: scratch / f"gradient-{worker.side}.safetensors" for worker in workers}
        losses = {worker.side: worker.ask(f"check {paths[worker.side]}")["loss"] for worker in workers}
    for side, path in paths.items():
        loss = losses[side]
        gradient = load_file(path)
        path.unlink()
        reference = reference or (loss, gradient)
        if gradient.keys() != reference[1].keys():
            raise RuntimeError(f"{side} trains other weights: {gradient.keys() ^ reference[1].keys()}")
        ours, theirs = (
            torch.cat([g[n].flatten().double() for n in sorted(g)]) for g in (reference[1], gradient)
        )
        cosine = float(torch.cosine_similarity(ours, theirs, dim=0))
        found[side] = {"loss": loss, "gradient_norm": float(theirs.norm()), "cosine": cosine}
        apart = abs(loss / reference[0] - 1)
        if apart > LOSS_TOLERANCE[case.dtype] or 1 - cosine > COSINE_TOLERANCE[case.dtype]:
            raise RuntimeError(f"{side} does other work in {case.name}: {found}")
    return found


def peak_series(
    sides: Iterable[tuple[str, Path]], shape: str, dtype: str, problem: Path, threads: int
) -> dict[str, list[float]]:
    """Peak memory in MiB of each side with 1, 2 and 4 times the anchors."""
    series: dict[str, list[float]] = {}
    for side, python in sides:
        for times in (1, 2, 4):
            with Worker(side, Case(shape, dtype, times=times), problem, python, threads) as worker:
                worker.ask(f"steps {WARM_UP}")
                series.setdefault(side, []).append(worker.ask("peak")["mib"])
    return series

"""Peak memory of the block loss at a real vocabulary: does it grow with slots x vocabulary?

Run: python benchmarks/loss_memory.py [--vocab 151936] [--hidden 1024] [--out results.json]

Each case runs in a fresh process; the figure is peak resident memory during loss and backward, minus what inputs, head and
libraries take before. `eager` is the same loss through autograd on whole logits, for comparison.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

BLOCK_SIZE = 16


class PeakMemory:
    """Samples the resident size of this process in a thread; torch's own threads do not stop it."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self.before = self.peak = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def mib(self) -> float:
        return (self.peak - self.before) / 2**20


def one_case(kind: str, objective: str, slots: int, vocab: int, hidden: int) -> dict[str, float]:
    import torch

    from drafters.block_loss import BlockTargets, block_loss
    from drafters.objectives import LossSpec, fixed_weights

    torch.manual_seed(0)
    num_blocks = slots // BLOCK_SIZE
    head_VH = (torch.randn(vocab, hidden) * 0.02).bfloat16()
    hidden_NBH = torch.randn(num_blocks, BLOCK_SIZE, hidden, requires_grad=True)
    valid_NB = torch.ones(num_blocks, BLOCK_SIZE, dtype=torch.bool)
    valid_NB[:, 0] = False
    positions_NB = torch.arange(num_blocks)[:, None] * 4 + torch.arange(BLOCK_SIZE)
    targets = BlockTargets(torch.randint(0, vocab, (num_blocks, BLOCK_SIZE)), valid_NB, positions_NB)
    teacher_TH = torch.randn(int(positions_NB.max()) + 1, hidden).bfloat16() if objective == "opd" else None
    spec = LossSpec(objective, clip="none")  # type: ignore[arg-type]
    with PeakMemory() as memory:
        started, cpu = time.perf_counter(), time.process_time()
        if kind == "ours":
            loss = block_loss(hidden_NBH, head_VH, targets, spec, teacher_hidden_TH=teacher_TH).value
        else:
            logits = (hidden_NBH[valid_NB].bfloat16() @ head_VH.T).float()
            weights = fixed_weights(spec, BLOCK_SIZE).expand_as(valid_NB)[valid_NB]
            losses = torch.nn.functional.cross_entropy(logits, targets.served_NB[valid_NB], reduction="none")
            loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return {"mib": memory.mib, "wall_s": seconds, "cpu_s": cpu_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=3, metavar=("KIND", "OBJECTIVE", "SLOTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        kind, objective, slots = options.case
        print(json.dumps(one_case(kind, objective, int(slots), options.vocab, options.hidden)))
        return
    cases = [
        ("ours", "ce", 512),
        ("ours", "ce", 8192),
        ("ours", "opd", 512),
        ("ours", "opd", 8192),
        ("eager", "ce", 512),
    ]
    rows = []
    for kind, objective, slots in cases:
        command = [sys.executable, __file__, "--vocab", str(options.vocab), "--hidden", str(options.hidden)]
        command += ["--case", kind, objective, str(slots)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row = {"kind": kind, "objective": objective, "slots": slots, **json.loads(output.splitlines()[-1])}
        rows.append(row)
        print(
            f"{kind:6s} {objective:4s} {slots:6d} slots: peak {row['mib']:8.0f} MiB above inputs, "
            f"{row['wall_s']:.1f} s wall, {row['cpu_s']:.1f} s CPU",
            flush=True,
        )
    if options.out:
        facts = {
            "vocab": options.vocab,
            "hidden": options.hidden,
            "machine": platform.processor(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""AdaFlash's Table 1 (Qwen3-8B) beside what the simulator says, given no more of the paper than acceptance lengths and one speed.

    python benchmarks/adaflash_table.py [--device h100] [--out outputs/adaflash_table.json]

Traces are synthetic: for each data set texts whose whole blocks of 16 have the τ that the paper reports of DFlash, and others
with that of AdaFlash's drafter at concurrency 1, where whole blocks are verified (`synthetic_traces.py`). Costs are the roofline
of Qwen3-8B and a five-layer drafter. The one thing fitted is a time added to each pass, so that a plain step of one request
takes what the paper's Tables 1 and 3 imply: 835.32 tokens/s at a speedup of 4.54. The paper does not name its GPU. Nothing is
measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from synthetic_traces import Process, draw_with

from pipeline.config import Config, PolicyConfig
from pipeline.plan.devices import GPUS
from pipeline.plan.models import models_of
from pipeline.simulation.costs import VerifyWork
from pipeline.simulation.methods import PLAIN, Method
from pipeline.simulation.requests import Requests
from pipeline.simulation.roofline import RooflineCosts
from pipeline.simulation.runs import Row, run_methods
from pipeline.simulation.traffic import Traffic

BLOCK = 16
LOADS = (1, 32, 64, 128)
PLAIN_RATE = 835.32 / 4.54
GAMMAS = (0.75, 1.0, 1.25, 1.5)

# Table 1, Q3-8B: τ and speedups of DFlash, then of AdaFlash, at concurrency 1, 32, 64, 128
PAPER: dict[str, tuple[float, Sequence[float], float, Sequence[float]]] = {
    "MathQA": (7.09, (4.38, 1.86, 1.24, 0.90), 9.83, (5.32, 2.27, 1.65, 1.34)),
    "GSM8K": (6.27, (3.84, 1.59, 1.03, 0.82), 7.75, (4.54, 1.83, 1.32, 1.27)),
    "OpenCodeInstruct": (6.69, (4.08, 1.77, 1.17, 0.86), 8.40, (4.87, 2.03, 1.51, 1.25)),
    "CodeAlpaca": (5.63, (3.39, 1.46, 0.91, 0.74), 6.80, (3.75, 1.58, 1.18, 1.11)),
    "ShareGPT": (3.40, (2.11, 1.05, 0.70, 0.51), 3.92, (2.24, 1.10, 1.04, 0.87)),
    "Blend": (6.07, (3.39, 1.51, 0.98, 0.74), 7.00, (3.66, 1.61, 1.26, 1.05)),
}

WHOLE = Method("fixed", "whole", PolicyConfig(name="fixed"))
HEAD_FROM = 64
"""Concurrency from which on the paper's τ tells that its head is asked."""
SCALED = [
    Method("adaflash", f"gamma {g:g}", PolicyConfig(name="adaflash", gamma=g, off_below_load=HEAD_FROM))
    for g in GAMMAS
]
JOINT = Method("throughput", "", PolicyConfig(name="throughput"))


def costs_on(device: str, context: int) -> RooflineCosts:
    """The roofline with the fitted time of a pass."""
    config = Config.model_validate(
        {
            "target": {"model": "Qwen/Qwen3-8B"},
            "drafter": {"block_size": BLOCK, "num_layers": 5},
            "data": {"train": [{"path": "unread.jsonl"}]},
        }
    )
    costs = RooflineCosts(models_of(config), GPUS[device], BLOCK)
    step = costs.verify_s(VerifyWork(1, 1, 1, context, context + 1))
    return replace(costs, overhead_s=max(0.0, 1 / PLAIN_RATE - step))


def rows_of(
    tau: float, methods: Sequence[Method], costs: RooflineCosts, process: Process, seed: int
) -> list[Row]:
    """Plain decoding and the methods at all concurrencies, over texts of this τ."""
    requests = Requests.of(draw_with(tau, process, seed), BLOCK)
    return list(run_methods(requests, [PLAIN, *methods], costs, Traffic(1), LOADS))


def best(rows: Sequence[Row], policy: str, load: int) -> Row:
    return max(
        (r for r in rows if (r["policy"], r["concurrency"]) == (policy, load)), key=lambda r: r["speedup"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", choices=sorted(GPUS), default="h100")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before each answer")
    parser.add_argument("--tokens", type=int, default=320, help="tokens of each answer")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    process = Process(
        block_size=BLOCK, texts=arguments.texts, tokens=arguments.tokens, prompt=arguments.prompt
    )
    costs = costs_on(arguments.device, arguments.prompt + arguments.tokens // 2)
    print(f"{arguments}; {1000 * costs.overhead_s:.2f} ms added to each pass\n")
    print("| data set | C | DFlash: paper | simulated | AdaFlash: paper | simulated | γ | throughput |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    found: list[dict[str, Any]] = []
    for name, (plain_tau, plain_paper, tau, paper) in PAPER.items():
        static = rows_of(plain_tau, [WHOLE], costs, process, arguments.seed)
        adapted = rows_of(tau, [WHOLE, *SCALED, JOINT], costs, process, arguments.seed)
        for load, theirs, ours in zip(LOADS, plain_paper, paper, strict=True):
            scaled = best(adapted, "adaflash", load)
            found.append(
                {
                    "data_set": name,
                    "concurrency": load,
                    "dflash_paper": theirs,
                    "dflash": best(static, "fixed", load)["speedup"],
                    "adaflash_paper": ours,
                    "adaflash": scaled["speedup"],
                    "gamma": scaled["setting"].removeprefix("gamma ") if load >= HEAD_FROM else "off",
                    "whole_blocks": best(adapted, "fixed", load)["speedup"],
                    "throughput": best(adapted, "throughput", load)["speedup"],
                }
            )
            print(line(found[-1]), flush=True)
    for load in LOADS:
        own = [row for row in found if row["concurrency"] == load]
        keys = ("dflash_paper", "dflash", "adaflash_paper", "adaflash", "throughput")
        mean = {key: sum(row[key] for row in own) / len(own) for key in keys}
        print(line({"data_set": "**mean**", "concurrency": load, "gamma": "", **mean}))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {k: str(v) for k, v in vars(arguments).items()}
        arguments.out.write_text(
            json.dumps({"settings": settings, "overhead_s": costs.overhead_s, "rows": found}, indent=2) + "\n"
        )


def line(row: dict[str, Any]) -> str:
    names = ("dflash_paper", "dflash", "adaflash_paper", "adaflash")
    cells = [f"{row[name]:.2f}" for name in names] + [row["gamma"], f"{row['throughput']:.2f}"]
    return f"| {row['data_set']} | {row['concurrency']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()

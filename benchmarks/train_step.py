"""Our training step against SpecForge's and speculators' on the same work, and our variants against our own.

    python benchmarks/train_step.py --out outputs/bench/train_step

Each case is written to a file of its own in `--out` and kept: `--cases` measures only those named, and a case that is there is
measured again only with `--again`. The result is made of all that are there.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from contest import report
from contest.environment import ROOT, main_python, peers_python
from contest.floor import floor_seconds, measure_machine
from contest.measure import Case, check_agreement, peak_series, run_case
from contest.problem import SHAPES, read_problem, write_problem

from drafters.errors import UserError

# first each peer's default, as far as a CPU can run it; then what an option of SpecForge's changes
PEER_SIDES = ("specforge-sdpa", "speculators-sdpa", "specforge-sdpa-8", "specforge-sdpa-0")
OUR_SIDES = ("ours-ce", "ours-opd", "ours-osd", "ours-opd+length", "ours-length", "ours-d3d")
CONTESTS = (
    Case("smollm2", "float32"),
    Case("smollm2", "bfloat16"),
    Case("wide", "float32"),
    Case("wide", "bfloat16"),
    Case("smollm2", "bfloat16", kept=False),
    Case("wide", "bfloat16", kept=False),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/bench/train_step"))
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="the peers' environment")
    parser.add_argument("--cases", nargs="*", help="such as peers:smollm2-float32-kept; default: all")
    parser.add_argument("--again", action="store_true", help="measure cases that are there already")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sessions", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4, help="of each session")
    parser.add_argument("--steps", type=int, default=1, help="of each round")
    options = parser.parse_args()
    try:
        theirs = peers_python(options.peers.absolute())
    except UserError as error:
        sys.exit(str(error))
    jobs = {f"peers:{case.name}": case for case in CONTESTS}
    jobs |= {f"variants:{case.name}": case for case in CONTESTS if case.kept}
    jobs |= {f"series:{case.name}": case for case in CONTESTS if case.kept and case.dtype == "float32"}
    for name in options.cases or jobs:
        if name not in jobs:
            sys.exit(f"--cases: {name} is none of {', '.join(jobs)}")
        path = options.out / f"{name.replace(':', '-')}.json"
        if options.again or not path.exists():
            measured = measure(name.split(":")[0], jobs[name], theirs, options)
            path.write_text(json.dumps(measured, indent=2) + "\n")
    cases = [json.loads(path.read_text()) for path in sorted(options.out.glob("*-*.json"))]
    summary = report.summarise(cases)
    report.write(summary, facts(options), options.out)
    print(report.table(summary))


def measure(kind: str, case: Case, theirs: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One case's figures."""
    shape, dtype = SHAPES[case.shape], getattr(torch, case.dtype)
    problem = options.out / f"problem-{case.shape}.safetensors"
    if not problem.exists():
        write_problem(shape, problem)
    started = {
        "kind": kind,
        "case": case.name,
        "commit": commit(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    peers = [(side, theirs) for side in PEER_SIDES]
    ce = ("ours-ce", main_python())
    if kind == "series":
        chosen = [ce, ("ours-opd", main_python()), *peers]
        return {**started, "series": peak_series(chosen, case.shape, case.dtype, problem, options.threads)}
    sides = [ce, *peers] if kind == "peers" else [(side, main_python()) for side in OUR_SIDES]
    anchors_N = read_problem(shape, problem, dtype).anchors_N
    machine = measure_machine(shape, dtype, options.threads)
    half = case.dtype == "bfloat16"
    floor = {
        "ce": floor_seconds(shape, anchors_N, machine, opd=False, half=half),
        "opd": floor_seconds(shape, anchors_N, machine, opd=True, half=half),
        "gflop_per_cpu_second": machine.flops / 1e9,
        "gbyte_per_cpu_second": machine.bandwidth / 1e9,
    }
    agreement = check_agreement(case, sides, problem, options.out, options.threads) if kind == "peers" else {}
    measured = run_case(
        case,
        sides,
        problem,
        threads=options.threads,
        sessions=options.sessions,
        rounds=options.rounds,
        steps=options.steps,
    )
    return {**started, **measured, "floor": floor, "agreement": agreement}


def commit() -> str:
    """The checkout's commit, marked where files differ from it."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Machine, versions, commit and command."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {
        "machine": {
            "cpu": models[0].split(":", 1)[1].strip() if models else platform.processor(),
            "threads": options.threads,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": platform.system(),
        },
        "peers": [
            line for line in (ROOT / "constraints" / "peers.txt").read_text().splitlines() if "==" in line
        ],
        "commit": commit(),
        "commands": [shlex.join([Path(sys.executable).name, *sys.argv])],
    }


if __name__ == "__main__":
    main()

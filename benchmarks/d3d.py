"""What a D3D drafter gains from its parts: next-token loss, size, initial weights, look-ahead; and beside a DFlash drafter.

    python benchmarks/d3d.py ar-weight --run outputs/d3d --steps 120 --seeds 1 2
    python benchmarks/d3d.py scale|init|families --run outputs/d3d
    python benchmarks/d3d.py lookahead --run outputs/d3d --slowdowns 4 8 16

Needs the output of `make demo-d3d`, whose responses all variants learn from and are judged by. Each variant is trained in turn,
for equal steps (`families`: equal minutes), once for each seed; τ is replayed on the held-out prompts. Intervals are over
prompts, each with all its seeds; differences are paired by prompt against the first variant; the spread of the seeds is printed
beside. Results and a plot go below `--out`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters.branches import Budget
from drafters.decoding import ServingDrafter
from drafters.policies import FixedPolicy
from drafters.replay import ReplayResult, replay, total_acceptance_length
from drafters.target import Target
from pipeline.bootstrap import bootstrap_ratio, paired_bootstrap_ratio
from pipeline.config import Config, load_config
from pipeline.corpus import load_documents
from pipeline.lookahead import Decoder, DecodingRun, SlowedTarget
from pipeline.models import load_drafter_for, load_target
from pipeline.result import RESULT_FILE, hash_config, write_json
from pipeline.stages.evaluate import spread
from pipeline.stages.train import train_drafter


@dataclass(frozen=True)
class Variant:
    """A name, and what it sets differently."""

    name: str
    settings: list[str]


def ar_weight(args: argparse.Namespace) -> list[Variant]:
    """λ; 1 comes first, as the others are compared with it."""
    return [Variant(f"lambda {value:g}", [f"train.loss.ar_weight={value}"]) for value in (1, 0, 0.5, 1.5)]


def scale(args: argparse.Namespace) -> list[Variant]:
    """Depth: the target's own layers, some left out evenly, the first and the last kept."""
    depths = [30, 20, 12, 6]
    return [
        Variant(f"{depth} layers", [f"drafter.model={shallow(args, depth)}"] if depth < 30 else [])
        for depth in depths
    ]


def init(args: argparse.Namespace) -> list[Variant]:
    """The target's weights, or random ones of the same shape."""
    return [Variant("target's weights", []), Variant("random", ["drafter.init=random"])]


def families(args: argparse.Namespace) -> list[Variant]:
    """In equal minutes: D3D whole, D3D with as many layers as DFlash, and DFlash as the quickstart has it."""
    minutes = [f"train.max_minutes={args.minutes}", "train.steps=100000", "train.optim.schedule=constant"]
    dflash = [
        "drafter.family=dflash",
        "drafter.num_layers=6",
        "drafter.freeze_mlp=true",
        "lookahead.mode=off",
    ]
    dflash += ["train.optim.lr=1e-3", "train.feature_cache_mib=1024"]
    return [
        Variant("d3d, 30 layers", minutes),
        Variant("d3d, 6 layers", [*minutes, f"drafter.model={shallow(args, 6)}"]),
        Variant("dflash, 6 layers", [*minutes, *dflash]),
    ]


def shallow(args: argparse.Namespace, depth: int) -> Path:
    """The target with `depth` of its layers, written once."""
    directory = args.out / f"target-{depth}"
    if not directory.exists():
        source = args.run / "target"
        model = AutoModelForCausalLM.from_pretrained(source)
        layers = model.model.layers
        kept = [round(i * (len(layers) - 1) / (depth - 1)) for i in range(depth)]
        model.model.layers = torch.nn.ModuleList([layers[i] for i in kept])
        model.config.num_hidden_layers = depth
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    return directory.absolute()


def compare(args: argparse.Namespace, variants: Sequence[Variant]) -> dict[str, Any]:
    """Train and judge every variant."""
    rows: list[dict[str, Any]] = []
    base: tuple[list[int], list[int]] | None = None
    for variant in variants:
        of_seeds: list[list[ReplayResult]] = []
        stages: list[dict[str, Any]] = []
        parameters = 0
        for seed in args.seeds:
            output = args.out / f"{variant.name.replace(' ', '-').replace(',', '')}-{seed}"
            config = variant_config(args, variant, output, seed)
            stages.append(trained_stage(config))
            bundle = load_target(config)
            directory = output / "train" / "drafter"
            drafter = load_drafter_for(directory, bundle, dtype=bundle.target.dtype).drafter
            parameters = sum(p.numel() for p in drafter.parameters())
            documents = load_documents(config, "heldout", bundle.target.identity)
            of_seeds.append([r for r in replay(drafter, bundle.target, documents) if r.rounds])
        # a prompt counts once, with all its seeds: they are not independent
        committed = [sum(r.committed for r in of_prompt) for of_prompt in zip(*of_seeds, strict=True)]
        rounds = [sum(r.rounds for r in of_prompt) for of_prompt in zip(*of_seeds, strict=True)]
        base = base or (committed, rounds)
        interval = bootstrap_ratio(committed, rounds)
        difference = paired_bootstrap_ratio(*base, committed, rounds)
        taus = [total_acceptance_length(results) for results in of_seeds]
        steps = statistics.fmean(stage["metrics"]["steps"] for stage in stages)
        cpu = statistics.fmean(stage["cpu_seconds"] for stage in stages)
        rows.append(
            {
                "variant": variant.name,
                "settings": variant.settings,
                "tau": asdict(interval),
                "difference": asdict(difference),
                "tau_by_seed": taus,
                "steps": steps,
                "cpu_s": cpu,
                "parameters_m": parameters / 1e6,
            }
        )
        print(
            f"{variant.name:18} tau {interval.point:.3f} [{interval.low:.3f}, {interval.high:.3f}]  "
            f"by seed {' '.join(f'{tau:.3f}' for tau in taus)}  difference {difference.point:+.3f} "
            f"[{difference.low:+.3f}, {difference.high:+.3f}]  {steps:.0f} steps  {cpu:.0f} CPU-s  "
            f"{parameters / 1e6:.0f} M",
            flush=True,
        )
    return {"rows": rows, **{key: stages[0][key] for key in ("git_commit", "git_dirty", "versions")}}


def trained_stage(config: Config) -> dict[str, Any]:
    """The result of training by this configuration, made now unless it is there."""
    path = config.output / "train" / RESULT_FILE
    wanted = hash_config(config.dump())
    if not path.exists() or json.loads(path.read_text())["config_hash"] != wanted:
        train_drafter(config)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def variant_config(args: argparse.Namespace, variant: Variant, output: Path, seed: int) -> Config:
    """The demo's config with the variant's settings, on the demo's responses."""
    output.mkdir(parents=True, exist_ok=True)
    for name in ("responses", "target", ".target-origin"):
        source, link = args.run / name, output / name
        if source.exists() and not link.exists():
            link.symlink_to(source.absolute())
    settings = [
        f"output={output}",
        f"seed={seed}",
        f"train.steps={args.steps}",
        f"train.validate_every={args.steps}",
        f"train.checkpoint_every={args.steps}",
    ]
    return load_config(Path(args.config), [*settings, *variant.settings])


def lookahead(args: argparse.Namespace) -> dict[str, Any]:
    """Hit rate and speed for every C and F, with the target slowed to several times the drafter's pass."""
    config = load_config(Path(args.config), [f"output={args.run}"])
    bundle = load_target(config)
    loaded = load_drafter_for(args.run / "drafter", bundle, dtype=bundle.target.dtype)
    serving = ServingDrafter(loaded.drafter, FixedPolicy(), loaded.drafter_version)
    documents = spread(load_documents(config, "heldout", bundle.target.identity), args.documents)
    block = loaded.drafter.block_size

    def decode(target: Target, budget: Budget | None) -> DecodingRun:
        return Decoder(config.lookahead, target, serving, args.tokens).run(budget, documents)

    decode(bundle.target, None)
    plain = decode(bundle.target, None).stats
    draft_s = plain.draft_s / plain.draft_passes
    budgets = [None, *(Budget(c, f) for c in range(2, block + 1, 2) for f in args.fan_outs)]
    rows: list[dict[str, Any]] = []
    for slowdown in args.slowdowns:
        decoder = Decoder(
            config.lookahead, SlowedTarget(bundle.target, slowdown * draft_s), serving, args.tokens
        )
        # document by document, every budget in turn: a machine that slows down slows them all
        runs = [[decoder.run(budget, [document]) for budget in budgets] for document in documents]
        for number, budget in enumerate(budgets):
            of_budget = [of_document[number] for of_document in runs]
            whole = DecodingRun()
            for run in of_budget:
                whole.add(run)
            sync = [of_document[0] for of_document in runs]
            # tokens are the same for all, so a ratio of seconds is one of speeds
            gain = bootstrap_ratio([r.seconds for r in sync], [r.seconds for r in of_budget])
            rows.append(
                {
                    "slowdown": slowdown,
                    "coverage": None if budget is None else budget.coverage,
                    "fan_out": None if budget is None else budget.fan_out,
                    "gain": gain.point,
                    "gain_low": gain.low,
                    "gain_high": gain.high,
                    **whole.report(),
                }
            )
            print(
                f"target {slowdown:g} x drafter, {budget or 'no look-ahead'}: hit rate {whole.stats.hit_rate:.2f}, "
                f"{whole.tokens_per_s:.2f} tokens/s, {gain.point:.3f} [{gain.low:.3f}, {gain.high:.3f}] of that "
                f"without, tau {whole.acceptance_length:.2f}, preparing {whole.report()['ahead_ms']:.0f} ms",
                flush=True,
            )
    return {"draft_ms": 1000 * draft_s, "rows": rows}


def plot(what: str, result: dict[str, Any], path: Path) -> None:
    """Bars of τ with intervals, or hit rate and gain against the budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    rows = result["rows"]
    if what == "lookahead":
        left, right = figure.subplots(1, 2)
        for slowdown in sorted({row["slowdown"] for row in rows}):
            for fan_out in sorted({row["fan_out"] for row in rows if row["fan_out"]}):
                chosen = [r for r in rows if (r["slowdown"], r["fan_out"]) == (slowdown, fan_out)]
                label = f"target {slowdown:g}x, F {fan_out}"
                left.plot([r["coverage"] for r in chosen], [r["hit_rate"] for r in chosen], label=label)
                right.plot([r["coverage"] for r in chosen], [r["gain"] for r in chosen], label=label)
        left.set_ylabel("hit rate")
        right.set_ylabel("speed with / without")
        right.axhline(1.0, color="0.7")
        for axes in (left, right):
            axes.set_xlabel("coverage C")
        left.legend(fontsize=6)
    else:
        axes = figure.add_subplot()
        points = [row["tau"]["point"] for row in rows]
        errors = [
            [row["tau"]["point"] - row["tau"]["low"] for row in rows],
            [row["tau"]["high"] - row["tau"]["point"] for row in rows],
        ]
        axes.bar([row["variant"] for row in rows], points, yerr=errors, capsize=4)
        axes.set_ylabel("acceptance length")
        axes.set_ylim(bottom=1)
    figure.savefig(path, dpi=110)


VARIANTS: dict[str, Callable[[argparse.Namespace], list[Variant]]] = {
    "ar-weight": ar_weight,
    "scale": scale,
    "init": init,
    "families": families,
}


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*VARIANTS, "lookahead"])
    parser.add_argument("--run", type=Path, default=Path("outputs/d3d"), help="Output of `make demo-d3d`.")
    parser.add_argument("--config", default="d3d", help="Config of that run.")
    parser.add_argument(
        "--out", type=Path, default=None, help="Where to work; default outputs/bench/d3d-WHAT."
    )
    parser.add_argument("--steps", type=int, default=340)
    parser.add_argument("--minutes", type=float, default=6.0, help="Of each training in `families`.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[4, 8, 16])
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--fresh", action="store_true", help="Train again what was trained.")
    args = parser.parse_args()
    args.out = args.out or Path("outputs/bench") / f"d3d-{args.what}"
    if args.fresh:
        shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True, exist_ok=True)
    result = lookahead(args) if args.what == "lookahead" else compare(args, VARIANTS[args.what](args))
    settings = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
    write_json(
        args.out / "result.json",
        {"what": args.what, "settings": settings, "threads": torch.get_num_threads(), **result},
    )
    plot(args.what, result, args.out / "plot.png")
    print(args.out / "result.json")


if __name__ == "__main__":
    main()

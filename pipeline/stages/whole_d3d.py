"""`draftsmith run` of a D3D preset: trained, pruned with recovery, and drafting ahead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from drafters.errors import UserError
from drafters.layers import remove_layer
from drafters.packing import Document
from drafters.replay import replay, total_acceptance_length
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.corpus import conversations
from pipeline.lookahead import configured_budget
from pipeline.models import keep_copy, load_drafter_for, target_directory
from pipeline.result import RESULT_FILE
from pipeline.stages.context import Stage, open_stage
from pipeline.stages.deploy import deploy_drafter
from pipeline.stages.evaluate import evaluate_drafter, heldout_documents, write_heldout
from pipeline.stages.prune import STATE, prune_drafter
from pipeline.stages.regenerate import regenerate_responses
from pipeline.stages.rerun import StageRunner
from pipeline.stages.train import train_drafter
from pipeline.stages.whole import show_budget


def run_d3d(config: Config, runner: StageRunner) -> Path:
    """Every stage in order, then τ at each step on held-out prompts.

    `<output>/result.json` holds the figures; `drafter/`, `target/` and `heldout.jsonl` are kept so that anyone can recompute
    them.
    """
    check_d3d(config)
    show_budget(config)
    output = config.output
    trained, pruned = output / "train" / "drafter", output / "prune" / "drafter"
    runner.run("responses", lambda _: regenerate_responses(config))
    runner.run("train", lambda resume: train_drafter(config, resume=resume))
    runner.run("prune", lambda resume: prune_drafter(config, drafter=trained, resume=resume), progress=STATE)
    runner.run("deploy", lambda _: deploy_drafter(config, drafter=pruned))
    runner.run("evaluate", lambda _: evaluate_drafter(config, drafter=pruned))
    runner.run(".", lambda _: conclude_d3d(config, trained, pruned, runner.seconds))
    return output


def check_d3d(config: Config) -> None:
    """Refuse at the start what the run would need only near its end.

    Raises:
        UserError: naming the key.
    """
    if not conversations(config, "heldout"):
        raise UserError("data.heldout: the whole run needs held-out prompts to measure on")
    if not config.data.val_fraction:
        raise UserError("data.val_fraction: pruning measures on validation documents, and there are none")
    lm = AutoConfig.from_pretrained(config.drafter.model or target_directory(config))
    if config.prune.layers is not None and config.prune.layers >= lm.num_hidden_layers:
        raise UserError(
            f"prune.layers: {config.prune.layers} is not below the {lm.num_hidden_layers} layers of the drafter"
        )
    if config.lookahead.mode != "off":
        configured_budget(config.lookahead, config.drafter.block_size, lm.vocab_size)


def conclude_d3d(config: Config, trained: Path, pruned: Path, times: dict[str, float]) -> Path:
    """Held-out τ of the trained drafter, of the same without the removed layers, and of the recovered one."""
    evaluated = _metrics(config.output / "evaluate")
    with open_stage(config, "run", ".") as stage:
        documents = heldout_documents(stage)
        drafter = keep_copy(config.output / "drafter", pruned, stage.bundle)
        write_heldout(config.output / "heldout.jsonl", documents)
        with stage.result.section("replay"), torch.no_grad():
            taus = _taus(stage, trained, documents)
        recovered = {
            key: evaluated[key]
            for key in ("acceptance_length", "acceptance_length_low", "acceptance_length_high", "by_domain")
        }
        tau = {**taus, "pruned": recovered["acceptance_length"]}
        pruning = _metrics(config.output / "prune")
        layers = pruning["layers"]
        show_table(
            "acceptance length on held-out prompts",
            ["drafter", "layers", "τ", "of trained"],
            [
                [name, str(depth), f"{tau[name]:.3f}", f"{tau[name] / tau['trained']:.3f}"]
                for name, depth in (
                    ("trained", layers + len(pruning["steps"])),
                    ("pruned_unrecovered", layers),
                    ("pruned", layers),
                )
            ],
        )
        lookahead = evaluated.get("lookahead")
        stage.result.metrics |= {
            "tau": tau,
            "retention": tau["pruned"] / tau["trained"],
            "pruned": recovered,
            "layers": layers,
            "lossless": evaluated.get("lossless"),
            "lossless_prompts": evaluated.get("lossless_prompts"),
            "speed": evaluated.get("speed"),
            "lookahead": lookahead,
            "hit_rate": None if lookahead is None else lookahead["as_is"]["ahead"]["hit_rate"],
            "stage_seconds": dict(times),
        }
        say(f"retention {stage.result.metrics['retention']:.3f}, lossless {evaluated.get('lossless')}")
        for path in (drafter, config.output / "heldout.jsonl"):
            stage.result.add_output(path)
        return stage.output


def _taus(stage: Stage, trained: Path, documents: Sequence[Document]) -> dict[str, float]:
    """τ of the trained drafter, and without the layers that pruning removed, nothing being recovered."""
    target = stage.bundle.target
    drafter = load_drafter_for(trained, stage.bundle, dtype=target.dtype).drafter
    whole = total_acceptance_length(replay(drafter, target, documents))
    for step in _metrics(stage.config.output / "prune")["steps"]:
        remove_layer(drafter, step["removal"]["removed"])
    return {
        "trained": whole,
        "pruned_unrecovered": total_acceptance_length(replay(drafter, target, documents)),
    }


def _metrics(directory: Path) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((directory / RESULT_FILE).read_text())["metrics"]
    return metrics

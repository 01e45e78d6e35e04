"""What `draftsmith plan` computes beside what a training step really takes on this CPU, component by component.

    python benchmarks/plan_check.py [--sizes tiny smollm2] [--threads 1] [--repeats 3] [--out results.json]

Models have random weights: sizes are what is checked. Each case runs in a fresh process. Bytes of weights, gradients, moments,
features and activations are counted; the peak is what torch allocates in a step, and that of resident memory above what the
process had before it made gradients and moments. Seconds are medians of a few steps, each component by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from drafters.block_loss import BlockTargets, block_loss
from drafters.d3d import D3DDrafter
from drafters.d3d_loss import d3d_loss
from drafters.dflash import DFlashDrafter
from drafters.dflash_config import drafter_config
from drafters.fill import Drafter, fill_blocks
from drafters.identity import TargetIdentity
from drafters.layer_ids import default_layer_ids
from drafters.objectives import LossSpec
from drafters.packing import Document, PackedBatch, pack_documents
from drafters.target import Target
from lightning_modules.optim import OptimSpec, configure_adamw
from pipeline.config import Config
from pipeline.hardware import keep_freed_memory
from pipeline.plan.devices import measure_cpu
from pipeline.plan.memory import memory_of
from pipeline.plan.models import Models, models_of
from pipeline.plan.step import Step, step_of
from pipeline.plan.strategy import Strategy
from pipeline.plan.time import time_of

TARGETS = {"tiny": "tiny-llama", "smollm2": "SmolLM2-135M-Instruct"}
TOKENS = 96
CASES = [("dflash", "ce"), ("dflash", "opd"), ("d3d", "osd")]
MASK = 3


def configuration(size: str, family: str, objective: str) -> Config:
    """Rows of four documents of TOKENS tokens, with twelve blocks of eight slots in each."""
    return Config.model_validate(
        {
            "target": {"model": TARGETS[size], "dtype": "float32"},
            "drafter": {"family": family, "num_layers": 3, "block_size": 8},
            "data": {"train": [{"path": "none"}], "max_length": TOKENS, "row_tokens": 4 * TOKENS},
            "regenerate": {"max_new_tokens": TOKENS // 2},
            "train": {"anchors_per_document": 12, "loss": {"objective": objective}, "precision": "32-true"},
        }
    )


def make_batch(step: Step, vocabulary: int) -> PackedBatch:
    """Random documents of the planned lengths."""
    generator = torch.Generator().manual_seed(0)
    mask = [i >= step.document_tokens - step.response_tokens for i in range(step.document_tokens)]
    documents = [
        Document(
            torch.randint(4, vocabulary, (step.document_tokens,), generator=generator).tolist(), mask, str(i)
        )
        for i in range(step.documents)
    ]
    return pack_documents(documents, anchors_per_document=step.anchors, generator=generator)


def hf_model(models: Models) -> Any:
    """A causal LM of the target's sizes with random weights, fp32."""
    arch = models.target
    config = AutoConfig.for_model(
        arch.model_type,
        vocab_size=arch.vocab,
        hidden_size=arch.hidden,
        intermediate_size=arch.intermediate,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        tie_word_embeddings=arch.tied,
    )
    config.d3d_config = {"block_size": 8, "mask_token_id": MASK, "shift": True}
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


class OneStep:
    """A training step in its components, run one by one."""

    def __init__(self, models: Models, step: Step) -> None:
        ids = default_layer_ids(models.target.layers, models.context_layers)
        self.step = step
        self.target = Target(hf_model(models), TargetIdentity("check", "0", "0"), ids)
        self.drafter: Drafter
        if step.family == "d3d":
            self.drafter = D3DDrafter(hf_model(models))
        else:
            config = drafter_config(
                self.target.config,
                num_layers=models.drafter_layers,
                block_size=step.block_size,
                mask_token_id=MASK,
                target_layer_ids=ids,
            )
            self.drafter = DFlashDrafter(config)
        self.batch = make_batch(step, models.target.vocab)
        self.optimizer = configure_adamw(self.drafter, None, OptimSpec())["optimizer"]
        self.spec = LossSpec(step.objective)

    def run(self) -> dict[str, float]:
        """Seconds of every component."""
        clock = _Stopwatch()
        output = None
        if self.step.runs_target:
            output = self.target.forward_packed(self.batch.input_ids_T, self.batch.position_ids_T)
            self.features = output.features_TC.nbytes if self.step.family == "dflash" else 0
            self.features += output.hidden_TH.nbytes
            clock.lap("target forward")
        teacher = output.hidden_TH if output is not None and self.step.teacher else None
        if isinstance(self.drafter, D3DDrafter):
            drafted = self.drafter(self.batch)
            clock.lap("drafter forward")
            value = d3d_loss(
                drafted,
                self.drafter.head_VH,
                self.batch,
                self.spec,
                teacher_hidden_TH=teacher,
                teacher_head_VH=self.target.head_VH,
            ).value
        else:
            assert output is not None
            filled = fill_blocks(self.drafter, self.target, self.batch, output.features_TC)
            clock.lap("drafter forward")
            targets = BlockTargets.from_layout(self.batch, filled.layout)
            value = block_loss(
                filled.hidden_NBH, self.target.head_VH, targets, self.spec, teacher_hidden_TH=teacher
            ).value
        clock.lap("loss head")
        value.backward()
        clock.lap("drafter backward")
        norm = nn.utils.get_total_norm([p.grad for p in self.drafter.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(self.drafter.parameters(), 1e-6, norm)
        self.optimizer.step()
        clock.lap("optimizer")
        self.gradients = sum(p.grad.nbytes for p in self.drafter.parameters() if p.grad is not None)
        self.optimizer.zero_grad(set_to_none=True)
        return clock.laps

    def activations(self) -> int:
        """Bytes that autograd keeps after the drafter's forward."""
        weights = {p.untyped_storage().data_ptr() for p in self.drafter.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        features = None
        if self.step.family == "dflash":
            features = self.target.forward_packed(
                self.batch.input_ids_T, self.batch.position_ids_T
            ).features_TC
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            fill_blocks(self.drafter, self.target, self.batch, features)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class _Stopwatch:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def allocated_peak(run: Callable[[], object]) -> int:
    """Bytes that torch has allocated at the peak of a call, above what there was before."""
    gc.collect()  # what earlier calls left would be freed in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    changes = [event for event in results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def resident_peak(run: Callable[[], object], before: int) -> int:
    """Bytes of resident memory at its peak, above `before`."""
    process, done, peak = psutil.Process(), threading.Event(), [0]

    def sample() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], process.memory_info().rss)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    run()
    done.set()
    sampler.join()
    return peak[0] - before


def one_case(size: str, family: str, objective: str, repeats: int) -> dict[str, Any]:
    """Predicted and measured bytes and seconds."""
    config = configuration(size, family, objective)
    models = models_of(config)
    step = step_of(config, "train", vocabulary=models.target.vocab, target_bytes=4, mixed=False)
    single = Strategy("single", 1)
    memory = memory_of(step, models, single)
    planned = {c.name: c.seconds for c in time_of(step, models, single, memory, measure_cpu())}
    torch.manual_seed(0)
    work = OneStep(models, step)
    before = psutil.Process().memory_info().rss
    work.run()
    resident = resident_peak(work.run, before)
    allocated = allocated_peak(work.run)
    states = work.optimizer.state.values()
    moments = sum(t.nbytes for state in states for t in state.values() if t.numel() > 1)
    activations = work.activations()
    keep_freed_memory()
    work.run()
    runs = [work.run() for _ in range(repeats)]
    return {
        "bytes": {
            "target_weights": [memory.target_weights, sum(p.nbytes for p in work.target.model.parameters())],
            "master_weights": [memory.master_weights, sum(p.nbytes for p in work.drafter.parameters())],
            "gradients": [memory.gradients, work.gradients],
            "moments": [memory.moments, moments],
            "features": [memory.features, work.features if step.runs_target else 0],
            "activations": [memory.activations, activations],
            "peak allocated by a step": [memory.peak - memory.resident, allocated],
            "peak resident, weights off": [
                memory.peak - memory.target_weights - memory.master_weights,
                resident,
            ],
        },
        "seconds": {name: [planned[name], statistics.median(run[name] for run in runs)] for name in runs[0]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", nargs=3, metavar=("SIZE", "FAMILY", "OBJECTIVE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.case:
        print(json.dumps(one_case(*options.case, options.repeats)))
        return
    print(
        f"torch {torch.__version__}, {options.threads} threads, fp32, {platform.processor() or platform.machine()}"
    )
    rows = []
    for size in options.sizes:
        for family, objective in CASES:
            command = [
                sys.executable,
                __file__,
                "--threads",
                str(options.threads),
                "--repeats",
                str(options.repeats),
            ]
            command += ["--case", size, family, objective]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            row = {
                "size": size,
                "family": family,
                "objective": objective,
                **json.loads(output.splitlines()[-1]),
            }
            rows.append(row)
            print(f"\n{size} {family} {objective:18s} {'planned':>12s} {'measured':>12s}  planned/measured")
            for unit, factor in (("bytes", 2**20), ("seconds", 1e-3)):
                for name, (planned, measured) in row[unit].items():
                    label = f"{name}, {'MiB' if unit == 'bytes' else 'ms'}"
                    ratio = f"{planned / measured:.3f}" if measured else "-"
                    print(
                        f"  {label:30s} {planned / factor:12.3f} {measured / factor:12.3f}  {ratio}",
                        flush=True,
                    )
    if options.out:
        facts = {"torch": torch.__version__, "threads": options.threads, "rows": rows}
        options.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()

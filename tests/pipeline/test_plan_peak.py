"""A plan's peak of memory against what torch really allocates in a step of tiny models."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from drafters.block_loss import BlockTargets, block_loss
from drafters.d3d_loss import d3d_loss
from drafters.fill import fill_blocks
from drafters.identity import TargetIdentity
from drafters.objectives import LossSpec
from drafters.target import Target
from pipeline.plan.memory import memory_of
from pipeline.plan.models import Models
from pipeline.plan.passing import features_bytes, target_forward_bytes
from pipeline.plan.sizes import dflash_size, model_size
from pipeline.plan.step import Step
from pipeline.plan.strategy import Strategy
from tests.pipeline import plan_samples as samples


def allocated_peak(run: Callable[[], object]) -> int:
    """Bytes allocated at the peak of a call, above what there was before."""
    gc.collect()  # what earlier calls left would be freed in this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def planned_step(family: str, objective: str, mixed: bool, anchors: int = 12) -> Step:
    return samples.step(
        family,
        documents=3,
        document_tokens=96,
        response_tokens=60,
        anchors=anchors,
        objective=objective,
        teacher=objective != "ce",
        target_bytes=2 if mixed else 4,
        mixed=mixed,
    )


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("objective", ["ce", "opd", "osd"])
# with two anchors next tokens have larger chunks than blocks
@pytest.mark.parametrize(("family", "anchors"), [("dflash", 12), ("d3d", 12), ("d3d", 2)])
def test_peak_is_near_what_is_allocated(family: str, anchors: int, objective: Any, mixed: bool) -> None:
    step = planned_step(family, objective, mixed, anchors)
    config = samples.lm_config("qwen3", num_hidden_layers=4)
    arch = samples.architecture(config)
    target = Target(
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if mixed else torch.float32),
        TargetIdentity("t", "r", "h"),
        [0, 1],
    )
    batch, spec = samples.batch(step), LossSpec(objective)
    if family == "d3d":
        drafter: Any = samples.d3d(config)
        models = Models(arch, model_size(arch), 2, None, arch, model_size(arch))
    else:
        drafter = samples.dflash(config, layers=3, context_layers=2)
        size = dflash_size(arch, layers=3, context_layers=2)
        models = Models(arch, model_size(arch), 2, size, None, None)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            output = (
                target.forward_packed(batch.input_ids_T, batch.position_ids_T) if step.runs_target else None
            )
            teacher = output.hidden_TH if output is not None and step.teacher else None
            if family == "d3d":
                head = drafter.head_VH.to(torch.bfloat16 if mixed else torch.float32)
                drafted = drafter(batch)
                value = d3d_loss(
                    drafted,
                    head,
                    batch,
                    spec,
                    teacher_hidden_TH=teacher,
                    teacher_head_VH=target.head_VH,
                ).value
            else:
                assert output is not None
                filled = fill_blocks(drafter, target, batch, output.features_TC)
                targets = BlockTargets.from_layout(batch, filled.layout)
                value = block_loss(
                    filled.hidden_NBH, target.head_VH, targets, spec, teacher_hidden_TH=teacher
                ).value
        value.backward()
        drafter.zero_grad(set_to_none=True)

    run()
    memory = memory_of(step, models, Strategy("single", 1))
    ratio = (memory.peak - memory.resident) / allocated_peak(run)
    assert 0.95 < ratio < 1.12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_forward_is_a_near_upper_bound(dtype: torch.dtype) -> None:
    step = planned_step("dflash", "opd", dtype == torch.bfloat16)
    config = samples.lm_config("llama", num_hidden_layers=4)
    arch = samples.architecture(config)
    target = Target(
        AutoModelForCausalLM.from_config(config, dtype=dtype), TargetIdentity("t", "r", "h"), [0, 1]
    )
    models = Models(arch, model_size(arch), 2, dflash_size(arch, layers=1, context_layers=2), None, None)
    batch = samples.batch(step)
    planned = target_forward_bytes(step, models) + features_bytes(step, models)
    measured = allocated_peak(lambda: target.forward_packed(batch.input_ids_T, batch.position_ids_T))
    assert 1 <= planned / measured < 1.3

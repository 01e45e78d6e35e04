"""A plan's FLOPs against torch's count of the real modules, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from drafters.block_loss import BlockTargets, block_loss
from drafters.blocks import build_blocks
from drafters.d3d import D3DOutput
from drafters.d3d_loss import d3d_loss
from drafters.identity import TargetIdentity
from drafters.objectives import LossSpec
from drafters.target import Target
from pipeline.plan.flops import drafter_flops, loss_flops, target_flops
from pipeline.plan.models import Models
from pipeline.plan.sizes import dflash_size, model_size
from tests.pipeline import plan_samples as samples


def counted(run: Callable[[], Any]) -> tuple[int, Any]:
    """FLOPs that torch counts, attention as plain products (it does not count the CPU's fused kernel)."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops(), result


def dflash_models(target: Any, layers: int, context_layers: int) -> Models:
    arch = samples.architecture(target)
    size = dflash_size(arch, layers=layers, context_layers=context_layers)
    return Models(arch, model_size(arch), context_layers, size, None, None)


def d3d_models(config: Any) -> Models:
    arch = samples.architecture(config)
    return Models(arch, model_size(arch), 0, None, arch, model_size(arch))


@pytest.mark.parametrize(("layers", "context_layers"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("freeze_mlp", [False, True])
def test_dflash_forward_and_backward(layers: int, context_layers: int, freeze_mlp: bool) -> None:
    step = samples.step(freeze_mlp=freeze_mlp)
    target = samples.lm_config("qwen3")
    drafter = samples.dflash(target, layers=layers, context_layers=context_layers)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not (freeze_mlp and ".mlp." in name))
    planned = drafter_flops(step, dflash_models(target, layers, context_layers))
    forward, hidden = counted(lambda: samples.run_dflash(drafter, samples.batch(step)))
    assert forward == planned.forward
    backward, _ = counted(lambda: hidden.sum().backward())
    assert backward == planned.backward(attention_factor=2)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_d3d_forward_and_backward(kind: str) -> None:
    step = samples.step("d3d")
    config = samples.lm_config(kind)
    drafter = samples.d3d(config)
    planned = drafter_flops(step, d3d_models(config))
    forward, output = counted(lambda: drafter(samples.batch(step)))
    assert forward == planned.forward
    backward, _ = counted(lambda: (output.hidden_TH.sum() + output.hidden_NBH.sum()).backward())
    assert backward == planned.backward(attention_factor=2)


def test_target_forward() -> None:
    step = samples.step(teacher=True)
    config = samples.lm_config("qwen3")
    target = Target(AutoModelForCausalLM.from_config(config), TargetIdentity("t", "r", "h"), [0, 1])
    batch = samples.batch(step)
    flops, _ = counted(lambda: target.forward_packed(batch.input_ids_T, batch.position_ids_T))
    assert flops == target_flops(step, dflash_models(config, 1, 2))


@pytest.mark.parametrize(
    ("objective", "teacher"), [("ce", False), ("ce", True), ("opd", True), ("osd", True)]
)
def test_dflash_loss(objective: Any, teacher: bool) -> None:
    step = samples.step(objective=objective, teacher=teacher)
    config = samples.lm_config("qwen3")
    batch = samples.batch(step)
    targets = BlockTargets.from_layout(batch, build_blocks(batch, step.block_size, samples.MASK))
    hidden = torch.randn(step.blocks, step.block_size, 88, requires_grad=True)
    flops, _ = counted(
        lambda: block_loss(
            hidden,
            torch.randn(samples.VOCAB, 88),
            targets,
            LossSpec(objective),
            teacher_hidden_TH=torch.randn(step.tokens, 88) if teacher else None,
        ).value.backward()
    )
    rows = int(targets.valid_NB.sum())
    positions = int(targets.teacher_NB[targets.valid_NB].unique().numel())
    product = 2 * 88 * samples.VOCAB
    teacher_products = {"ce": 1, "opd": 1, "osd": 2}[objective] * positions if teacher else 0
    assert flops == product * (2 * rows + teacher_products)
    # the plan takes every block to be whole and positions to be met as rarely as can be: an upper bound, and a near one
    planned = loss_flops(step, dflash_models(config, 1, 2))
    assert flops <= planned <= 1.3 * flops


def test_d3d_loss_returns_the_gradient_of_its_head() -> None:
    step = samples.step("d3d")
    config = samples.lm_config("qwen3")
    batch = samples.batch(step)
    layout = build_blocks(batch, step.block_size, samples.MASK)
    output = D3DOutput(
        torch.randn(step.tokens, 88, requires_grad=True),
        torch.randn(step.blocks, step.block_size, 88, requires_grad=True),
        layout,
    )
    head = torch.randn(samples.VOCAB, 88, requires_grad=True)
    flops, _ = counted(lambda: d3d_loss(output, head, batch, LossSpec()).value.backward())
    rows = int(layout.valid_NB.sum()) + step.next_tokens
    assert flops == 3 * 2 * 88 * samples.VOCAB * rows
    assert flops <= loss_flops(step, d3d_models(config)) <= 1.2 * flops

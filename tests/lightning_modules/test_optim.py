"""Learning rates are a function of the step; vectors are not decayed; the length head has its own rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_modules.optim import OptimSpec, configure_adamw
from tests.lightning_modules.training_samples import make_drafter, make_head, make_target


def test_constant_schedule_warms_up_linearly() -> None:
    spec = OptimSpec(warmup_steps=4, schedule="constant")
    assert [spec.factor(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_from_the_end_of_the_warm_up_to_zero() -> None:
    spec = OptimSpec(warmup_steps=10, schedule="cosine", total_steps=110)
    assert spec.factor(0) == pytest.approx(0.1)
    assert spec.factor(9) == spec.factor(10) == 1.0
    assert spec.factor(60) == pytest.approx(0.5)
    assert spec.factor(35) == pytest.approx(0.5 * (1 + 2**-0.5))
    assert spec.factor(110) == pytest.approx(0, abs=1e-12)
    assert spec.factor(500) == pytest.approx(0, abs=1e-12)
    falling = [spec.factor(step) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    "spec",
    [
        OptimSpec(warmup_steps=0),
        OptimSpec(warmup_steps=0, schedule="cosine", total_steps=None),
        OptimSpec(warmup_steps=0, schedule="cosine", total_steps=50),
    ],
)
def test_without_warm_up_the_first_step_is_a_whole_one(spec: OptimSpec) -> None:
    assert spec.factor(0) == 1.0


def test_a_run_shorter_than_its_warm_up() -> None:
    spec = OptimSpec(warmup_steps=20, schedule="cosine", total_steps=5)
    assert [spec.factor(step) for step in range(5)] == [(step + 1) / 20 for step in range(5)]


def groups_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[dict[str, Any]]:
    return [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]


def test_every_parameter_is_in_one_group_with_its_own_settings() -> None:
    target = make_target()
    drafter, head = make_drafter(target), make_head(target)
    frozen = drafter.layers[0].mlp.up_proj.weight.requires_grad_(False)
    spec = OptimSpec(lr=0.1, head_lr=0.02, weight_decay=0.3, warmup_steps=0)
    optimizer = configure_adamw(drafter, head, spec)["optimizer"]
    assert groups_of(optimizer, frozen) == []
    for module, rate in ((drafter, 0.1), (head, 0.02)):
        for parameter in module.parameters():
            if parameter is frozen:
                continue
            [group] = groups_of(optimizer, parameter)
            assert group["lr"] == rate
            assert group["weight_decay"] == (0.3 if parameter.dim() > 1 else 0.0)
            assert group["betas"] == (0.9, 0.95)


def test_decay_pulls_matrices_and_leaves_vectors() -> None:
    target = make_target()
    drafter = make_drafter(target)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    optimizer = configure_adamw(drafter, None, OptimSpec(lr=0.1, weight_decay=0.5, warmup_steps=0))[
        "optimizer"
    ]
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in drafter.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.dim() > 1 else before[name]
        torch.testing.assert_close(parameter.detach(), expected, msg=name)


def test_the_schedule_scales_all_groups_step_by_step() -> None:
    target = make_target()
    spec = OptimSpec(lr=0.1, head_lr=0.02, warmup_steps=2, schedule="cosine", total_steps=6)
    configured = configure_adamw(make_drafter(target), make_head(target), spec)
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    assert configured["lr_scheduler"]["interval"] == "step"
    for step in range(6):
        rates = {group["lr"] for group in optimizer.param_groups}
        assert rates == {0.1 * spec.factor(step), 0.02 * spec.factor(step)}
        optimizer.step()
        scheduler.step()


def test_a_head_alone() -> None:
    head = make_head(make_target())
    optimizer = configure_adamw(None, head, OptimSpec(lr=0.1, head_lr=0.02, warmup_steps=0))["optimizer"]
    assert {group["lr"] for group in optimizer.param_groups} == {0.02}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(head.parameters()))

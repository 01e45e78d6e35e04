"""Slot losses and their closed-form gradients against float64 autograd over python loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.errors import UserError
from drafters.objectives import (
    ClipMode,
    LossSpec,
    distillation_losses,
    entries_above,
    fixed_weights,
    survival_weights,
)

CLIPS: list[ClipMode] = list(get_args(ClipMode))
P_TRAP = torch.tensor([[0.98, 0.01, 0.01]], dtype=torch.float64)
Q_TRAP = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)


def losses(
    logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    labels: torch.Tensor,
    hard: torch.Tensor,
    spec: LossSpec,
    weight_sum: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`distillation_losses` from the teacher's logits; it may overwrite what it is given, so it gets copies."""
    normaliser = (teacher_logits / spec.temperature).logsumexp(dim=-1)
    loss, gradient, log_label = distillation_losses(
        logits.clone(), teacher_logits.clone(), normaliser, labels, hard, spec, weight_sum
    )
    expected = logits.log_softmax(dim=-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(log_label, expected)
    return loss, gradient


def reverse_kl(
    q_RV: torch.Tensor, p_RV: torch.Tensor, clip: ClipMode, delta: float, weight_sum: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The clipped reverse KL alone."""
    rows = q_RV.shape[0]
    spec = LossSpec(objective="opd", alpha=0.0, clip=clip, delta=delta)
    labels, hard = torch.zeros(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.bool)
    return losses(q_RV.log(), p_RV.log(), labels, hard, spec, weight_sum)


def random_logits(seed: int, rows: int = 6, vocab: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafter and teacher logits; rows range from nearly equal to far apart, so that clips are on and off."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 2
    noise = torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-2, 0.5, rows, dtype=torch.float64)[:, None]
    return teacher + noise * scale, teacher


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("alpha", [0.0, 0.8])
def test_opd_equals_the_brute_force(
    clip: ClipMode, temperature: float, alpha: float, reference_slot_loss: Callable[..., torch.Tensor]
) -> None:
    spec = LossSpec(objective="opd", clip=clip, temperature=temperature, alpha=alpha, delta=0.02)
    weight_sum = 3.5
    logits, teacher = random_logits(1)
    labels = teacher.argmax(dim=-1)
    hard = torch.tensor([True, False, True, True, False, True])
    loss, gradient = losses(logits, teacher, labels, hard, spec, weight_sum)
    z = logits.clone().requires_grad_()
    expected = torch.stack(
        [
            reference_slot_loss(z[r], teacher[r], int(labels[r]), bool(hard[r]), spec, weight_sum)
            for r in range(6)
        ]
    )
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=1e-12)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), z)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_single_precision_stays_close_to_double() -> None:
    logits, teacher = random_logits(3, vocab=50)
    labels, hard = teacher.argmax(dim=-1), torch.ones(6, dtype=torch.bool)
    for clip in CLIPS:
        spec = LossSpec(objective="opd", clip=clip)
        exact = losses(logits, teacher, labels, hard, spec)
        single = losses(logits.float(), teacher.float(), labels, hard, spec)
        torch.testing.assert_close(single[0].double(), exact[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vocab", [5, 128, 300])
@pytest.mark.parametrize("limit", [-9.0, 1.5, 9.0])
def test_entries_above_are_those_of_a_mask(vocab: int, limit: float) -> None:
    values = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0))
    rows, columns = entries_above(values, limit)
    expected = (values > limit).nonzero().tolist()
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [tuple(pair) for pair in expected]


def test_entry_clipping_is_no_divergence() -> None:
    loss, gradient = reverse_kl(Q_TRAP, P_TRAP, "entry", 0.01)
    assert loss.item() == pytest.approx(-0.27, abs=0.01)
    assert gradient[0, 0] > 0, "descending this gradient lowers the right logit"
    bounded, bounded_gradient = reverse_kl(Q_TRAP, P_TRAP, "bounded", 0.01)
    assert bounded.item() > 0
    assert bounded_gradient[0, 0] < 0


def descend(clip: ClipMode, alpha: float, steps: int = 2000) -> float:
    """q(top) after plain gradient descent on one slot's logits from the trap's start."""
    logits = Q_TRAP.log().clone()
    label, hard = torch.tensor([0]), torch.tensor([True])
    spec = LossSpec(objective="opd", alpha=alpha, clip=clip, delta=0.01)
    for _ in range(steps):
        logits -= losses(logits, P_TRAP.log(), label, hard, spec)[1]
    return logits.softmax(dim=-1)[0, 0].item()


def test_entry_alone_drives_the_top_token_to_p_over_e() -> None:
    assert descend("entry", alpha=0.0) == pytest.approx(0.98 / math.e, abs=0.005)


@pytest.mark.parametrize("clip", ["entry", "bounded"])
def test_the_default_mixture_raises_the_top_token(clip: ClipMode) -> None:
    assert descend(clip, alpha=0.8) > 0.9


@pytest.mark.parametrize(("alpha", "safe"), [(0.4, False), (0.6, True)])
def test_entry_beside_a_one_hot_target_needs_half_the_weight_on_the_hard_term(
    alpha: float, safe: bool
) -> None:
    q = torch.tensor([[0.99, 0.005, 0.005]], dtype=torch.float64)
    p = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    spec = LossSpec(objective="opd", alpha=alpha, clip="entry")
    gradient = losses(q.log(), p.log(), torch.tensor([0]), torch.tensor([True]), spec)[1]
    assert (gradient[0, 0] < 0) == safe


@given(st.lists(st.floats(-6, 6), min_size=8, max_size=8))
def test_bounded_is_a_divergence(values: list[float]) -> None:
    q = torch.tensor([values[:4]], dtype=torch.float64).softmax(dim=-1)
    p = torch.tensor([values[4:]], dtype=torch.float64).softmax(dim=-1)
    loss = reverse_kl(q, p, "bounded", 0.01)[0].item()
    assert loss >= 0
    if (q - p).abs().max() > 1e-3:
        assert loss > 1e-8
    assert reverse_kl(p, p, "bounded", 0.01)[0].item() == pytest.approx(0.0, abs=1e-14)


def test_position_clipping_has_no_gradient_above_the_threshold() -> None:
    logits, teacher = random_logits(4)
    q, p = logits.softmax(-1), teacher.softmax(-1)
    plain, plain_gradient = reverse_kl(q, p, "none", 0.0)
    delta = plain.median().item() + 1e-9
    loss, gradient = reverse_kl(q, p, "position", delta)
    above = plain > delta
    assert above.any()
    assert not above.all()
    assert (gradient[above] == 0).all()
    torch.testing.assert_close(gradient[~above], plain_gradient[~above])
    torch.testing.assert_close(loss, plain.clamp_max(delta))
    # dividing by the weight sum first moves the threshold up by that sum
    normalised, _ = reverse_kl(q, p, "position_normalised", delta / 1000, 1000.0)
    torch.testing.assert_close(normalised, loss)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_probabilities_stay_finite(clip: ClipMode, dtype: torch.dtype) -> None:
    infinity = float("inf")
    teacher = torch.tensor(
        [[2.0, 1.0, -infinity, 0.0], [0.0, -infinity, -infinity, -infinity], [0.0, 1.0, 2.0, 3.0]],
        dtype=dtype,
    )
    logits = torch.tensor(
        [[2.0, -infinity, 0.0, 1.0], [200.0, 0.0, 0.0, 0.0], [0.0, -infinity, -200.0, 300.0]], dtype=dtype
    )
    spec = LossSpec(objective="opd", clip=clip)
    loss, gradient = losses(logits, teacher, torch.tensor([0, 0, 3]), torch.ones(3, dtype=torch.bool), spec)
    assert torch.isfinite(loss.sum() * 100), "a sum over slots must stay finite too"
    assert torch.isfinite(gradient).all()


def test_fixed_weights_decay_from_the_first_draft() -> None:
    weights = fixed_weights(LossSpec(weighting="exponential", decay=3.0), 5)
    assert weights.tolist() == pytest.approx([0.0, *(math.exp(-j / 3) for j in range(4))])
    default = fixed_weights(LossSpec(weighting="exponential"), 8)
    assert default[2].item() == pytest.approx(math.exp(-1 / 4))
    mean = [0.0, 1.0, 1.0, 1.0]
    assert fixed_weights(LossSpec(weighting="exponential", decay=math.inf), 4).tolist() == mean
    assert fixed_weights(LossSpec(weighting="uniform"), 4).tolist() == mean


@pytest.mark.parametrize("floor", [0.0, 0.3, 1.0])
def test_survival_weights_equal_the_sum_of_survivals(floor: float) -> None:
    generator = torch.Generator().manual_seed(5)
    a = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    lengths = [4, 0, 1, 3]
    valid = torch.tensor([[0 < j <= length for j in range(5)] for length in lengths])
    weights = survival_weights(a.log(), valid, floor)
    for n, length in enumerate(lengths):
        for j in range(5):
            expected = 0.0
            for k in range(max(j, 1), length + 1):
                expected += math.prod((1 - floor) * a[n, i].item() + floor for i in range(1, k + 1))
            counted = expected if 1 <= j <= length else 0.0
            assert weights[n, j].item() == pytest.approx(counted, abs=1e-12)


def test_survival_weights_cannot_be_normalised_beforehand() -> None:
    with pytest.raises(UserError, match=r"loss\.clip"):
        LossSpec(clip="position_normalised", weighting="survival")

"""Soft labels reduced to one head row: the same loss and gradient as with the whole distribution."""

from __future__ import annotations

import pytest
import torch

from drafters.block_loss import BlockTargets, block_loss
from drafters.objectives import LossSpec, Objective
from drafters.teacher import CHUNK_ROWS, TeacherMoments, label_losses, teacher_moments

HIDDEN, VOCAB = 5, 11


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("positions", [0, 3, CHUNK_ROWS + 2])
def test_moments_are_sums_over_the_vocabulary(positions: int) -> None:
    hidden, head = normal(positions, HIDDEN), normal(VOCAB, HIDDEN, seed=1)
    got = teacher_moments(hidden, head)
    assert got.mean_row_TH is not None
    assert got.negentropy_T is not None
    assert got.greedy_T.shape == (positions,)
    for t in range(positions):
        p = torch.softmax(head @ hidden[t], dim=0)
        assert got.greedy_T[t] == p.argmax()
        torch.testing.assert_close(got.mean_row_TH[t], sum(p[v] * head[v] for v in range(VOCAB)))
        torch.testing.assert_close(got.negentropy_T[t], (p * p.log()).sum())
    hard = teacher_moments(hidden, head, soft=False)
    assert torch.equal(hard.greedy_T, got.greedy_T)
    assert hard.mean_row_TH is None


def test_parts_put_together_and_taken_apart() -> None:
    head = normal(VOCAB, HIDDEN, seed=1)
    whole = teacher_moments(normal(7, HIDDEN), head)
    parts = [whole.at(torch.arange(a, b)) for a, b in ((0, 2), (2, 3), (3, 7))]
    again = TeacherMoments.cat(parts)
    assert again.mean_row_TH is not None and whole.mean_row_TH is not None
    assert torch.equal(again.greedy_T, whole.greedy_T)
    assert torch.equal(again.mean_row_TH, whole.mean_row_TH)
    assert sum(part.nbytes for part in parts) == whole.nbytes == 7 * (8 + 8 * HIDDEN + 8)


@pytest.mark.parametrize("soft", [False, True])
def test_label_losses_equal_autograd(soft: bool) -> None:
    head = normal(VOCAB, HIDDEN, seed=1)
    teacher_hidden = normal(6, HIDDEN, seed=2)
    hidden = (teacher_hidden + 0.5 * normal(6, HIDDEN, seed=3)).requires_grad_()
    labels, hard = torch.arange(6), torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    logits = hidden @ head.T
    logq = logits.log_softmax(-1)
    p = (teacher_hidden @ head.T).softmax(-1)
    expected = (p * (p.log() - logq)).sum(-1) if soft else -logq[torch.arange(6), labels] * hard
    (expected_grad,) = torch.autograd.grad(expected.sum(), hidden)
    raw = logits.detach()
    moments = teacher_moments(teacher_hidden, head) if soft else None
    loss, grad, log_label = label_losses(
        hidden.detach(), raw, raw.max(dim=-1), head, labels, hard, moments, torch.float64
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, expected_grad)
    torch.testing.assert_close(log_label, logq.detach()[torch.arange(6), labels])


def test_half_precision_is_close_where_logits_are_large() -> None:
    """The normaliser comes from the top token's probability, which half precision holds to three digits."""
    head, hidden = normal(400, 32, seed=1).bfloat16(), 2 * normal(9, 32, seed=2).bfloat16()
    raw = hidden @ head.T
    labels, hard = torch.arange(9), torch.ones(9, dtype=torch.bool)
    loss, grad, _ = label_losses(hidden, raw, raw.max(dim=-1), head, labels, hard, None, torch.float32)
    exact = raw.double().log_softmax(-1)
    torch.testing.assert_close(loss.double(), -exact[torch.arange(9), labels], rtol=1e-3, atol=1e-2)
    expected_grad = exact.exp() @ head.double() - head[labels].double()
    torch.testing.assert_close(grad.double(), expected_grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("objective", ["ce", "osd"])
def test_kept_moments_change_nothing(objective: Objective) -> None:
    head, teacher_hidden = normal(VOCAB, HIDDEN, seed=1), normal(9, HIDDEN, seed=2)
    teacher_NB = torch.tensor([[0, 1, 2, 3], [2, 3, 4, 5], [5, 6, 7, 8]])
    targets = BlockTargets(
        served_NB=(teacher_hidden @ head.T).argmax(-1)[teacher_NB].roll(1, 0),
        valid_NB=torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0]]).bool(),
        teacher_NB=teacher_NB,
    )
    spec = LossSpec(objective=objective)
    results = []
    for options in (
        {"teacher_hidden_TH": teacher_hidden},
        {"moments": teacher_moments(teacher_hidden, head, soft=objective == "osd")},
    ):
        hidden = normal(3, 4, HIDDEN, seed=3).requires_grad_()
        result = block_loss(hidden, head, targets, spec, chunk_rows=4, **options)
        (grad,) = torch.autograd.grad(result.value, hidden)
        results.append((result.value.detach(), grad, result.match_NB))
    torch.testing.assert_close(results[0], results[1])
    assert results[0][0] > 0

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
    assert got.excess_TH is not None
    assert got.negentropy_T is not None
    assert got.greedy_T.shape == (positions,)
    for t in range(positions):
        p = torch.softmax(head @ hidden[t], dim=0)
        assert got.greedy_T[t] == p.argmax()
        expected = sum(p[v] * head[v] for v in range(VOCAB)) - head[p.argmax()]
        torch.testing.assert_close(got.excess_TH[t], expected)
        torch.testing.assert_close(got.negentropy_T[t], (p * p.log()).sum())
    hard = teacher_moments(hidden, head, soft=False)
    assert torch.equal(hard.greedy_T, got.greedy_T)
    assert hard.excess_TH is None


def test_parts_put_together_and_taken_apart() -> None:
    head = normal(VOCAB, HIDDEN, seed=1)
    whole = teacher_moments(normal(7, HIDDEN), head)
    parts = [whole.at(torch.arange(a, b)) for a, b in ((0, 2), (2, 3), (3, 7))]
    again = TeacherMoments.cat(parts)
    assert again.excess_TH is not None and whole.excess_TH is not None
    assert torch.equal(again.greedy_T, whole.greedy_T)
    assert torch.equal(again.excess_TH, whole.excess_TH)
    places = torch.tensor([1, 0, 1]).bool()
    spread = whole.at(torch.tensor([4, 6])).spread(places)
    assert spread.excess_TH is not None
    assert torch.equal(spread.excess_TH[places], whole.excess_TH[[4, 6]])
    assert not spread.excess_TH[1].any()
    assert sum(part.nbytes for part in parts) == whole.nbytes == 7 * (8 + 8 * HIDDEN + 8)


@pytest.mark.parametrize("soft", [False, True])
def test_label_losses_equal_autograd(soft: bool) -> None:
    head = normal(VOCAB, HIDDEN, seed=1)
    teacher_hidden = normal(6, HIDDEN, seed=2)
    hidden = (teacher_hidden + 0.5 * normal(6, HIDDEN, seed=3)).requires_grad_()
    moments = teacher_moments(teacher_hidden, head) if soft else None
    labels = torch.arange(6) if moments is None else moments.greedy_T
    hard = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    logits = hidden @ head.T
    logq = logits.log_softmax(-1)
    p = (teacher_hidden @ head.T).softmax(-1)
    expected = (p * (p.log() - logq)).sum(-1) if soft else -logq[torch.arange(6), labels] * hard
    (expected_grad,) = torch.autograd.grad(expected.sum(), hidden)
    loss, grad, log_label = label_losses(
        hidden.detach(), logits.detach().clone(), logits.amax(-1), head, labels, hard, moments
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, expected_grad)
    torch.testing.assert_close(log_label, logq.detach()[torch.arange(6), labels])


@pytest.mark.parametrize("soft", [False, True])
def test_half_precision_keeps_the_gradient_of_a_nearly_right_drafter(soft: bool) -> None:
    """Where q is close to the label, the gradient is a small difference that rounded sums would drown."""
    head = normal(400, 32, seed=1).bfloat16()
    teacher_hidden = (head[:9] * 0.6).bfloat16()  # p of the top token from 0.9 to 0.9999
    hidden = (teacher_hidden + 0.02 * normal(9, 32, seed=2)).bfloat16()
    labels, hard = torch.arange(9), torch.ones(9, dtype=torch.bool)
    moments = teacher_moments(teacher_hidden, head) if soft else None
    loss, grad, _ = label_losses(
        hidden, hidden @ head.T, (hidden @ head.T).amax(-1), head, labels, hard, moments
    )
    W = head.double()
    logq = (hidden.double() @ W.T).log_softmax(-1)
    p = (teacher_hidden.double() @ W.T).softmax(-1)
    assert p[torch.arange(9), labels].median() > 0.9
    wanted = p if soft else torch.nn.functional.one_hot(labels, 400).double()
    expected = (logq.exp() - wanted) @ W
    assert loss.dtype == torch.float32
    error = (grad.double() - expected).norm(dim=-1)
    # rounding is a small part of either term, hence of a nearly right drafter's gradient too
    scale = ((logq.exp() - torch.nn.functional.one_hot(labels, 400)) @ W).norm(dim=-1)
    assert (error < 0.06 * scale + 1e-4).all(), (error / scale).tolist()


def test_moments_do_not_depend_on_autocast() -> None:
    hidden, head = normal(5, HIDDEN).float(), normal(VOCAB, HIDDEN, seed=1).float()
    expected = teacher_moments(hidden, head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = teacher_moments(hidden, head)
    assert got.excess_TH is not None and expected.excess_TH is not None
    assert got.excess_TH.dtype == torch.float32
    assert torch.equal(got.excess_TH, expected.excess_TH)


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

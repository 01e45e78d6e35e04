"""The acceptance head learns conditional acceptance from whole blocks and says it of the slots themselves."""

from __future__ import annotations

import pytest
import torch

from drafters.acceptance_head import (
    MAX_LOGIT,
    AcceptanceHead,
    acceptance_labels,
    acceptance_loss,
    certainty_logit,
    confident_argmax,
    draft_confidence,
)

H, B = 6, 5


def test_each_slot_is_judged_by_its_own_hidden_state() -> None:
    head, states = AcceptanceHead(H, B, 4, confidence=False), torch.randn(3, B, H)
    predicted = head(states)
    assert (predicted.shape, predicted.dtype) == ((3, B - 1), torch.float32)
    changed = states.clone()
    changed[1, 2] += 1.0
    different = head(changed) != predicted
    assert different.nonzero().tolist() == [[1, 1]], "slot 2, the second draft"
    # the anchor's own state is no draft's
    changed[:, 0] += 1.0
    assert torch.equal(head(changed) != predicted, different)
    assert head(states.bfloat16()).dtype == torch.float32


def test_survival_is_the_product_of_what_comes_before() -> None:
    head, states = AcceptanceHead(H, B, 4, confidence=False), torch.randn(3, B, H)
    a, s = head(states), head.survival(states)
    for j in range(B - 1):
        torch.testing.assert_close(s[:, j], a[:, : j + 1].prod(dim=1))


def test_confidence_begins_as_the_answer() -> None:
    """Before training, with a network that says nothing, a drafter is taken at its word."""
    head = AcceptanceHead(H, B, 4)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias.zero_()
    sure = torch.rand(3, B - 1) * 0.98 + 0.01
    torch.testing.assert_close(head(torch.randn(3, B, H), sure.log()), sure)
    with pytest.raises(ValueError, match="confidence"):
        head(torch.randn(3, B, H))


def test_certainty_is_bounded() -> None:
    extreme = certainty_logit(torch.tensor([0.0, -1e-12, -100.0, float("-inf"), 1e-3]))
    assert extreme.tolist() == [MAX_LOGIT, MAX_LOGIT, -MAX_LOGIT, -MAX_LOGIT, MAX_LOGIT]
    p = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(certainty_logit(p.log()).double(), torch.logit(p), atol=1e-5, rtol=1e-5)


def test_confidence_is_the_likeliest_tokens_log_probability() -> None:
    hidden, head = torch.randn(150, H), torch.randn(40, H) * 2
    tokens, confidence = confident_argmax(hidden, head, rows=64)
    best = (hidden.double() @ head.double().T).log_softmax(dim=-1).max(dim=-1)
    assert torch.equal(tokens, best.indices)
    torch.testing.assert_close(confidence.double(), best.values, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(draft_confidence(hidden @ head.T), confidence)
    # rounded logits aside, bfloat16 keeps what a logit between the bounds needs
    halves = (hidden @ head.T).bfloat16()
    rounded = certainty_logit(draft_confidence(halves))
    exact = certainty_logit(halves.double().log_softmax(dim=-1).amax(dim=-1))
    assert (rounded - exact)[exact < 4].abs().max() < 0.15
    with torch.autocast("cpu", torch.bfloat16):
        assert all(
            torch.equal(a, b)
            for a, b in zip(confident_argmax(hidden, head), (tokens, confidence), strict=True)
        )
    empty = confident_argmax(hidden[:0], head)
    assert [(len(x), x.dtype) for x in empty] == [(0, torch.int64), (0, torch.float32)]


def test_labels_are_conditional_and_not_censored() -> None:
    x, o = True, False
    match_NB = torch.tensor(
        [
            [o, x, x, o, x],  # the last slot matches, but after a mismatch: it says nothing of what is asked
            [o, o, x, x, x],
            [o, x, x, x, x],
            [o, x, x, o, o],  # cut by the end of the text after two slots that matched
            [o, o, o, o, o],  # no text left at all
        ]
    )
    valid_NB = torch.tensor([[o, x, x, x, x]] * 3 + [[o, x, x, o, o], [o, o, o, o, o]])
    accepted_ND, counted_ND = acceptance_labels(match_NB, valid_NB)
    assert counted_ND.tolist() == [[x, x, x, o], [x, o, o, o], [x, x, x, x], [x, x, o, o], [o, o, o, o]]
    assert accepted_ND[counted_ND].tolist() == [x, x, o, o, x, x, x, x, x, x]
    # every known slot of a cut block counts, and nothing beyond its end
    logits = torch.zeros(5, 4, requires_grad=True)
    loss = acceptance_loss(logits, accepted_ND, counted_ND)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(2.0)).item())
    loss.backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad != 0, counted_ND)
    torch.testing.assert_close(logits.grad[counted_ND].abs(), torch.full((10,), 0.05))
    nothing = acceptance_loss(logits, accepted_ND, torch.zeros_like(counted_ND))
    assert nothing.item() == 0
    nothing.backward()


def test_the_gradient_stops_at_what_it_reads() -> None:
    states = torch.randn(3, B, H, requires_grad=True)
    sure = torch.full((3, B - 1), -0.5, requires_grad=True)
    head = AcceptanceHead(H, B, 4)
    counted = torch.ones(3, B - 1, dtype=torch.bool)
    acceptance_loss(head.logits(states * 2, sure * 1), counted, counted).backward()
    assert states.grad is None and sure.grad is None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())


def test_training_recovers_conditional_acceptance() -> None:
    """Slot rates that differ, and a block-wise difficulty that the states reveal; late slots are learnt though rarely reached."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.tensor([0.9, 0.6, 0.8, 0.5])

    def blocks(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        easy = torch.rand(count, 1, generator=generator) < 0.5
        truth = torch.sigmoid(torch.logit(rates) - 1.5 * (~easy).float())
        states = torch.randn(count, B, H, generator=generator) * 0.1
        states[:, :, 0] += torch.where(easy, 1.0, -1.0)
        match = torch.zeros(count, B, dtype=torch.bool)
        match[:, 1:] = torch.rand(count, B - 1, generator=generator) < truth
        return states, match, truth

    valid = torch.ones(20_000, B, dtype=torch.bool)
    valid[:, 0] = False
    states, match, _ = blocks(len(valid))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = AcceptanceHead(H, B, 8, confidence=False)
    optimizer = torch.optim.Adam(head.parameters(), lr=2e-2)
    labels, counted = acceptance_labels(match, valid)
    for _ in range(250):
        loss = acceptance_loss(head.logits(states), labels, counted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    states, _, truth = blocks(200)
    assert (head(states) - truth).abs().max() < 0.08

"""The policy `survival` cuts where the chance of getting so far falls below its threshold."""

from __future__ import annotations

import pytest
import torch

from drafters.acceptance_head import AcceptanceHead
from drafters.policies import Load
from drafters.survival_policy import SurvivalPolicy


def head_of(conditional: list[float]) -> AcceptanceHead:
    """Answers these probabilities for every block."""
    head = AcceptanceHead(4, len(conditional) + 1, 2, confidence=False)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias.zero_()
        head.slot_bias.copy_(torch.logit(torch.tensor(conditional)))
    return head


HEAD = head_of([0.9, 0.8, 0.5, 0.99])  # survival .9, .72, .36, .3564
STATES = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("threshold", "length"),
    [(0.0, 5), (0.35, 5), (0.3595, 4), (0.37, 3), (0.73, 2), (0.91, 1), (1.0, 1)],
)
def test_slots_that_are_reached_often_enough(threshold: float, length: int) -> None:
    got = SurvivalPolicy(HEAD, threshold).verify_len(STATES, STATES, Load())
    assert (got.tolist(), got.dtype, got.requires_grad) == ([length] * 3, torch.int64, False)


def test_a_slot_after_an_unlikely_one_does_not_count_by_itself() -> None:
    """Conditional acceptance of the last slot is .99; what counts is the way there."""
    assert SurvivalPolicy(HEAD, 0.6).verify_len(STATES, STATES, Load()).tolist() == [3] * 3


def test_the_threshold_is_chosen_by_load() -> None:
    policy = SurvivalPolicy(HEAD, 0.0, {8: 0.73, 2: 0.37})
    lengths = [policy.verify_len(STATES, STATES, Load(n)).tolist()[0] for n in (1, 2, 7, 8, 99)]
    assert lengths == [5, 3, 3, 2, 2]


def test_confidence_is_read_if_the_head_reads_it() -> None:
    head = AcceptanceHead(4, 3, 2)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias.zero_()
    policy = SurvivalPolicy(head, 0.5)
    assert policy.reads_confidence
    sure = torch.tensor([[0.9, 0.9], [0.9, 0.5], [0.4, 0.9]]).log()
    states = torch.zeros(3, 3, 4)
    assert policy.verify_len(states, states, Load(1, sure)).tolist() == [3, 2, 1]
    with pytest.raises(ValueError, match="confidence"):
        policy.verify_len(states, states, Load())

"""Greedy verification, warping of distributions, and the residual."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.errors import UserError
from drafters.verify import SamplingParams, residual, verify_greedy, warp

INFINITY = float("inf")


def brute_force_warp(logits: list[float], temperature: float, top_p: float, top_k: int) -> list[float]:
    """Temperature, then top-k with ties, then top-p by mass, one entry after another."""
    scores = [x / temperature for x in logits]
    if 0 < top_k < len(scores):
        kth = sorted(scores, reverse=True)[top_k - 1]
        scores = [x if x >= kth else -INFINITY for x in scores]
    largest = max(scores)
    weights = [math.exp(x - largest) for x in scores]
    probs = [w / sum(weights) for w in weights]
    if top_p < 1:
        order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
        mass, kept = 0.0, set()
        for i in order:
            if mass >= top_p:
                break
            kept.add(i)
            mass += probs[i]
        probs = [x if i in kept else 0.0 for i, x in enumerate(probs)]
        probs = [x / sum(probs) for x in probs]
    return probs


@given(
    st.lists(st.sampled_from([-INFINITY, -2.0, -1.0, 0.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=7),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0.05, 0.33, 0.72, 0.9, 1.0]),
    st.integers(0, 8),
)
def test_warp_equals_the_brute_force(
    logits: list[float], temperature: float, top_p: float, top_k: int
) -> None:
    logits = [*logits, 0.25]
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    row = torch.tensor([logits], dtype=torch.float64)
    expected = brute_force_warp(logits, temperature, top_p, top_k)
    assert warp(row, sampling)[0].tolist() == pytest.approx(expected, abs=1e-12)
    assert warp(row.float(), sampling).dtype == torch.float32


def test_warp_treats_rows_alone_and_does_not_touch_its_input() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 0.0, 0.0]])
    before = logits.clone()
    sampling = SamplingParams(temperature=1.0, top_p=0.8, top_k=2)
    both = warp(logits, sampling)
    assert torch.equal(logits, before)
    torch.testing.assert_close(both[1:], warp(logits[1:], sampling))
    assert both[0, 0] == 0


def test_top_k_keeps_ties_and_top_p_keeps_at_least_one() -> None:
    tied = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert (warp(tied, SamplingParams(temperature=1.0, top_k=1))[0] > 0).tolist() == [
        False,
        True,
        True,
        False,
    ]
    peaked = torch.tensor([[0.0, 9.0, 0.0]])
    assert warp(peaked, SamplingParams(temperature=1.0, top_p=1e-6))[0].tolist() == [0, 1, 0]
    # exactly the mass asked for is enough: two of four equal entries for one half
    equal = torch.zeros(1, 4, dtype=torch.float64)
    assert (warp(equal, SamplingParams(temperature=1.0, top_p=0.5))[0] > 0).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_low_temperature_approaches_the_argmax() -> None:
    logits = torch.tensor([[1.0, 1.5, 1.4]])
    assert warp(logits, SamplingParams(temperature=1e-3))[0].tolist() == pytest.approx([0, 1, 0])


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": 1e-45}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}],
    ids=str,
)
def test_impossible_sampling_parameters_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match="sampling"):
        SamplingParams(**bad)  # type: ignore[arg-type]


def one_hot_logits(choices: list[int], vocab: int = 5) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), vocab).float()


@pytest.mark.parametrize(
    ("drafts", "choices", "accepted", "token"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3, 4),
        ([1, 2, 3], [1, 0, 3, 4], 1, 0),
        ([1, 2, 3], [0, 2, 3, 4], 0, 0),
        ([1, 2, 3], [1, 2, 0, 4], 2, 0),
        ([], [3], 0, 3),
    ],
)
def test_greedy_accepts_the_longest_prefix(
    drafts: list[int], choices: list[int], accepted: int, token: int
) -> None:
    outcome = verify_greedy(torch.tensor(drafts, dtype=torch.long), one_hot_logits(choices))
    assert (outcome.accepted, outcome.next_token) == (accepted, token)


def test_greedy_ties_go_to_the_same_token_as_argmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    assert verify_greedy(torch.tensor([2]), logits).accepted == 0
    assert verify_greedy(torch.tensor([1]), logits).next_token == 0


def test_residual_is_the_normalised_excess() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    assert residual(p, q).tolist() == pytest.approx([1, 0, 0])
    assert residual(p, torch.tensor([0.4, 0.1, 0.5])).tolist() == pytest.approx([1 / 3, 2 / 3, 0])
    assert torch.equal(residual(p, p), p)

"""The admission estimate: a moving mean that holds requests back only after memory ran out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_bridge.sglang_plugin.admission import AdmissionEstimate


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.5, 2.0])
def test_beta_outside_the_open_interval_is_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="beta"):
        AdmissionEstimate(beta)


@given(st.lists(st.integers(0, 64), max_size=12), st.floats(0.01, 0.99))
def test_the_estimate_is_the_weighted_sum_of_rounds(rounds: list[int], beta: float) -> None:
    admission = AdmissionEstimate(beta)
    for running in rounds:
        admission.observe(running)
    weights = [beta * (1 - beta) ** age for age in range(len(rounds))]
    expected = sum(weight * running for weight, running in zip(weights, reversed(rounds), strict=True))
    assert admission.estimate == pytest.approx(expected)


def test_nothing_is_held_back_without_memory_trouble() -> None:
    admission = AdmissionEstimate(0.5)
    admission.observe(1)
    assert admission.admissible(running=100, engine_limit=37) == 37


def test_after_an_overflow_at_most_one_more_than_the_estimate_runs() -> None:
    admission = AdmissionEstimate(0.5)
    for running in (8, 4, 4):
        admission.observe(running)
    assert admission.estimate == 4.0
    admission.overflow()
    assert admission.admissible(running=3, engine_limit=50) == 2
    assert admission.admissible(running=5, engine_limit=50) == 0
    assert admission.admissible(running=9, engine_limit=50) == 0


def test_a_fractional_estimate_is_rounded_up() -> None:
    admission = AdmissionEstimate(0.5)
    admission.observe(5)
    assert admission.estimate == 2.5
    admission.overflow()
    assert admission.admissible(running=0, engine_limit=50) == 4


def test_the_hold_ends_after_the_remembered_rounds() -> None:
    admission = AdmissionEstimate(0.5, memory_rounds=3)
    admission.overflow()
    for _ in range(2):
        admission.observe(2)
        assert admission.admissible(running=4, engine_limit=50) == 0
    admission.observe(2)
    assert admission.admissible(running=4, engine_limit=50) == 50


def test_another_overflow_begins_the_hold_anew_and_is_counted() -> None:
    admission = AdmissionEstimate(0.5, memory_rounds=2)
    admission.overflow()
    admission.observe(2)
    admission.overflow()
    admission.observe(2)
    assert admission.admissible(running=4, engine_limit=50) == 0
    assert admission.overflows == 2


@given(
    st.lists(st.one_of(st.integers(0, 40), st.just(None)), max_size=20),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_serving_never_stops_and_the_engine_is_never_exceeded(
    history: list[int | None], running: int, engine_limit: int
) -> None:
    admission = AdmissionEstimate(0.3, memory_rounds=4)
    for event in history:
        if event is None:
            admission.overflow()
        else:
            admission.observe(event)
    allowed = admission.admissible(running, engine_limit)
    assert 0 <= allowed <= engine_limit
    if running == 0 and engine_limit:
        assert allowed >= 1

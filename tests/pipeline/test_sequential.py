"""The sequential test keeps its promise: looking after every observation, it is rarely wrong."""

from __future__ import annotations

import random

import pytest

from pipeline.sequential import SignTest


def verdicts(mean: float, runs: int, length: int, error_rate: float = 0.05) -> list[bool | None]:
    """First verdict of each run over normal values of deviation 1."""
    generator = random.Random(5)
    found: list[bool | None] = []
    for _ in range(runs):
        test = SignTest(error_rate, first_look=12)
        verdict = None
        for _ in range(length):
            test.add(generator.gauss(mean, 1.0))
            verdict = test.verdict()
            if verdict is not None:
                break
        found.append(verdict)
    return found


@pytest.mark.parametrize("side", [1, -1])
def test_wrong_verdicts_stay_under_the_error_rate(side: int) -> None:
    found = verdicts(side * 0.02, runs=600, length=200)
    wrong = sum(verdict is (side < 0) for verdict in found)
    # 600 runs at 5 %: 30 expected at most; being asymptotic it may exceed that a little
    assert wrong <= 40


def test_looking_only_once_at_each_step_would_be_wrong_far_more_often() -> None:
    """The guard of the test above: fixed-sample intervals, looked at every time, fail it."""
    generator = random.Random(5)
    wrong = 0
    for _ in range(600):
        values: list[float] = []
        for _ in range(200):
            values.append(generator.gauss(0.02, 1.0))
            if len(values) >= 12 and sum(values) / len(values) < -1.645 / len(values) ** 0.5:
                wrong += 1
                break
    assert wrong > 80


@pytest.mark.parametrize(("mean", "expected"), [(-1.5, False), (1.5, True)])
def test_a_clear_case_is_seen_at_the_first_looks(mean: float, expected: bool) -> None:
    generator = random.Random(1)
    for _ in range(100):
        test = SignTest(0.01, first_look=12)
        while test.verdict() is None and len(test.values) < 24:
            test.add(generator.gauss(mean, 1.0))
        assert test.verdict() is expected
        assert len(test.values) >= 12


def test_nothing_is_said_before_the_first_look() -> None:
    test = SignTest(0.01, first_look=5)
    for _ in range(4):
        test.add(-9.0)
        assert test.verdict() is None
    test.add(-9.0)
    assert test.verdict() is False


def test_equal_values_are_certain() -> None:
    test = SignTest(0.01, first_look=3)
    for _ in range(3):
        test.add(0.1)
    assert test.verdict() is True and test.half_width() < 1e-12

"""The cost table finds a piecewise-linear truth in noisy rounds, and never says that more work costs less."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from drafters.monotone import interpolate, non_decreasing
from drafters.step_cost import StepCosts, row_bucket

B = 8


def truth(rows: float, requests: int) -> float:
    """Flat while the pass is bound by weights, then linear in rows; each cache adds its share."""
    return 20.0 + 0.5 * max(0.0, rows - 12) + 0.8 * requests


def observed(
    *, rounds: int = 4000, noise: float = 0.15, seed: int = 0, requests: tuple[int, ...] = (1, 2, 4, 8)
) -> StepCosts:
    costs, generator = StepCosts(), np.random.default_rng(seed)
    for _ in range(rounds):
        count = int(generator.choice(requests))
        rows = int(generator.integers(count, count * B + 1))
        costs.observe_verify(rows, count, truth(rows, count) * generator.lognormal(0, noise))
        costs.observe_draft(count, (3.0 + 0.25 * count) * generator.lognormal(0, noise))
    return costs


@pytest.mark.parametrize("seed", range(3))
def test_the_truth_is_recovered(seed: int) -> None:
    costs = observed(seed=seed)
    for count in (1, 2, 4, 8):
        rows = np.arange(count, count * B + 1)
        expected = np.asarray([truth(r, count) for r in rows])
        # E[lognormal(0, .15)] = 1.011
        np.testing.assert_allclose(costs.verify_s(rows, count), expected, rtol=0.1)
        assert abs(np.mean(costs.verify_s(rows, count) / expected) - 1.011) < 0.03
        assert costs.draft_s(count) == pytest.approx(3.0 + 0.25 * count, rel=0.1)


def test_a_load_that_was_not_seen_lies_between_its_neighbours() -> None:
    costs = observed(noise=0.02, requests=(1, 2, 4, 16))
    for count in (3, 8):
        rows = np.arange(count, count * B + 1, count)
        np.testing.assert_allclose(costs.verify_s(rows, count), [truth(r, count) for r in rows], rtol=0.05)
    # and far beyond what was seen it goes on, roughly
    (far,) = costs.verify_s([256], 32)
    assert truth(128, 16) < far < 2 * truth(256, 32)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_monotone_however_noisy(seed: int) -> None:
    costs = observed(rounds=150, noise=0.8, seed=seed)
    table = np.stack([costs.verify_s(range(1, 200), count) for count in range(1, 12)])
    assert (np.diff(table, axis=1) >= -1e-9).all()
    assert (np.diff(table, axis=0) >= -1e-9).all()
    drafts = [costs.draft_s(count) for count in range(1, 12)]
    assert all(low <= high for low, high in itertools.pairwise(drafts))
    assert (table > 0).all()


def test_a_slower_machine_is_followed_and_a_hiccup_is_not() -> None:
    costs = StepCosts()
    for _ in range(100):
        costs.observe_verify(8, 1, 20.0)
        costs.observe_verify(1, 1, 10.0)
    costs.observe_verify(8, 1, 5000.0)
    for _ in range(15):
        costs.observe_verify(1, 1, 10.0)
    assert costs.verify_s([8], 1)[0] < 22
    for _ in range(200):
        costs.observe_verify(8, 1, 40.0)
    assert costs.verify_s([8], 1)[0] == pytest.approx(40.0, rel=0.02)


def test_a_cell_that_was_not_seen_for_millions_of_rounds_still_counts() -> None:
    costs = StepCosts()
    for rows in (1, 4, 8):
        costs.observe_verify(rows, 1, 1.0 + rows)
        costs.observe_verify(2 * rows, 2, 2.0 + 2 * rows)
    costs.observe_draft(1, 0.5)
    costs.observe_draft(2, 0.7)
    costs._verify.rounds += 3_000_000
    costs._draft.rounds += 3_000_000
    for _ in range(40):
        costs.observe_verify(4, 1, 5.0)
        costs.observe_draft(1, 0.5)
    assert np.isfinite(costs.verify_s(range(1, 17), 2)).all()
    assert costs.verify_s([8], 1)[0] == pytest.approx(9.0, rel=0.1)
    assert costs.draft_s(2) == pytest.approx(0.7)


def test_drafting_that_is_rarely_seen_is_not_held_for_as_dear_as_it_was() -> None:
    costs = StepCosts()

    def rounds(count: int, draft: float | None) -> None:
        for _ in range(count):
            costs.observe_verify(4, 1, 20.0)
            if draft is not None:
                costs.observe_draft(1, draft)

    rounds(60, 45.0)
    again = costs.copy()
    again.observe_verify(4, 1, 20.0)
    again.observe_draft(1, 20.0)
    assert 44.0 < again.draft_s(1) < 45.0, "a copy is as if just observed"
    for _ in range(5):
        rounds(200, None)
        rounds(1, 20.0)
    assert costs.draft_s(1) < 25.0
    # and a hiccup then is none the less one
    rounds(200, None)
    rounds(1, 5000.0)
    assert costs.draft_s(1) < 75.0


def test_a_first_round_that_compiles_is_forgotten() -> None:
    costs = StepCosts()
    costs.observe_verify(4, 1, 900.0)
    costs.observe_verify(4, 1, 20.0)
    costs.observe_verify(4, 1, 22.0)
    assert costs.verify_s([4], 1)[0] == pytest.approx(21.0)


def test_what_it_knows() -> None:
    costs = StepCosts()
    assert (costs.known, costs.observed, costs.most_rows, costs.draft_s(3)) == (False, 0, 0, 0.0)
    with pytest.raises(ValueError, match="no round"):
        costs.verify_s([1], 1)
    costs.observe_verify(8, 1, 1.0)
    costs.observe_draft(1, 0.5)
    assert not costs.known, "one number of rows tells nothing of others"
    costs.observe_verify(1, 1, 0.8)
    assert (costs.known, costs.observed, costs.most_rows) == (True, 2, 8)


def test_round_trip_through_json() -> None:
    costs = observed(rounds=300)
    again = StepCosts.from_json(json.loads(json.dumps(costs.to_json())))
    rows = range(1, 64)
    # weights by age are all that is lost
    np.testing.assert_allclose(again.verify_s(rows, 4), costs.verify_s(rows, 4), rtol=0.02)
    assert again.draft_s(2) == pytest.approx(costs.draft_s(2), rel=0.02)
    assert again.observed == costs.observed


def test_rows_are_kept_exact_when_few_and_close_when_many() -> None:
    assert [row_bucket(rows) for rows in range(1, 33)] == list(range(1, 33))
    assert all(abs(row_bucket(rows) - rows) <= rows / 30 for rows in range(33, 5000))
    assert len({row_bucket(rows) for rows in range(1, 4097)}) < 160


@pytest.mark.parametrize("seed", range(10))
def test_monotone_regression_is_the_closest(seed: int) -> None:
    """Against the min-max formula: the fit at k is max over i ≤ k of min over j ≥ k of mean(i..j)."""
    generator = np.random.default_rng(seed)
    values, weights = generator.normal(size=9), generator.uniform(0.1, 3.0, 9)

    def mean(i: int, j: int) -> float:
        return float(np.average(values[i : j + 1], weights=weights[i : j + 1]))

    expected = [max(min(mean(i, j) for j in range(k, 9)) for i in range(k + 1)) for k in range(9)]
    np.testing.assert_allclose(non_decreasing(values, weights), expected)


def test_interpolation_is_level_before_and_goes_on_after() -> None:
    knots, values = np.asarray([2.0, 4.0, 10.0]), np.asarray([1.0, 3.0, 3.0])
    x = np.asarray([0.0, 2.0, 3.0, 7.0, 10.0, 14.0])
    np.testing.assert_allclose(interpolate(x, knots, values), [1.0, 1.0, 2.0, 3.0, 3.0, 4.0])

"""Bootstrap intervals against explicit loops, and their coverage on simulated drafters."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline import bootstrap
from pipeline.bootstrap import bootstrap_ratio, paired_bootstrap_quotient, paired_bootstrap_ratio


def simulate(generator: np.random.Generator, documents: int, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Documents of varying length and difficulty whose Σ committed ÷ Σ rounds is `tau` in expectation."""
    rounds = generator.integers(4, 20, documents)
    accepted = generator.gamma(2.0, (tau - 1) / 2.0, documents) * rounds
    return rounds + accepted, rounds


def test_paired_interval_equals_a_loop_over_resamples() -> None:
    generator = np.random.default_rng(3)
    committed_a, rounds_a = simulate(generator, 7, 1.8)
    committed_b, rounds_b = simulate(generator, 7, 2.1)
    found = paired_bootstrap_ratio(
        committed_a, rounds_a, committed_b, rounds_b, samples=50, confidence=0.9, seed=11
    )

    draws = np.random.default_rng(11)
    differences = []
    for _ in range(50):
        sums = np.zeros(4)
        for document, count in enumerate(draws.multinomial(7, np.full(7, 1 / 7))):
            for _ in range(count):
                row = (committed_a[document], rounds_a[document], committed_b[document], rounds_b[document])
                sums += np.array(row)
        differences.append(sums[2] / sums[3] - sums[0] / sums[1])
    differences.sort()

    assert found.point == pytest.approx(
        committed_b.sum() / rounds_b.sum() - committed_a.sum() / rounds_a.sum()
    )
    assert found.low == pytest.approx(np.quantile(differences, 0.1))
    assert found.high == pytest.approx(np.quantile(differences, 0.9))


def test_single_interval_equals_a_loop_over_resamples() -> None:
    committed, rounds = [9, 4, 12, 6], [3, 4, 5, 2]
    found = bootstrap_ratio(committed, rounds, samples=40, confidence=0.8, seed=5)
    draws = np.random.default_rng(5)
    ratios = []
    for _ in range(40):
        counts = draws.multinomial(4, np.full(4, 1 / 4))
        ratios.append(np.repeat(committed, counts).sum() / np.repeat(rounds, counts).sum())
    assert found.point == pytest.approx(31 / 14)
    assert (found.low, found.high) == pytest.approx((np.quantile(ratios, 0.2), np.quantile(ratios, 0.8)))


def test_chunks_do_not_change_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    committed, rounds = simulate(np.random.default_rng(0), 12, 2.0)
    whole = bootstrap_ratio(committed, rounds, samples=100)
    monkeypatch.setattr(bootstrap, "_CHUNK_ELEMENTS", 12 * 7)
    assert bootstrap_ratio(committed, rounds, samples=100) == whole


def test_bounds_hold_about_as_often_as_they_claim() -> None:
    generator = np.random.default_rng(1)
    below = above = 0
    for trial in range(300):
        committed, rounds = simulate(generator, 60, 2.0)
        interval = bootstrap_ratio(committed, rounds, samples=300, confidence=0.9, seed=trial)
        below += interval.low <= 2.0
        above += interval.high >= 2.0
    assert 0.84 < below / 300 < 0.96
    assert 0.80 < above / 300 < 0.96


def test_no_difference_is_called_an_improvement_about_as_often_as_claimed() -> None:
    generator = np.random.default_rng(2)
    claimed = 0
    for trial in range(300):
        committed_a, rounds = simulate(generator, 60, 2.0)
        committed_b = committed_a + generator.normal(0, 2, 60)
        interval = paired_bootstrap_ratio(
            committed_a, rounds, committed_b, rounds, samples=300, confidence=0.9, seed=trial
        )
        claimed += interval.low > 0
    assert 0.04 < claimed / 300 < 0.17


def test_pairing_removes_the_spread_between_documents() -> None:
    committed, rounds = simulate(np.random.default_rng(4), 50, 2.0)
    paired = paired_bootstrap_ratio(committed, rounds, committed * 1.05, rounds)
    alone = bootstrap_ratio(committed, rounds)
    assert paired.low > 0
    assert paired.high - paired.low < 0.2 * (alone.high - alone.low)


@pytest.mark.parametrize(
    ("committed", "rounds", "options"),
    [
        ([], [], {}),
        ([1.0, 2.0], [1.0], {}),
        ([1.0], [0.0], {}),
        ([float("nan")], [1.0], {}),
        ([1.0], [1.0], {"confidence": 0.05}),
        ([1.0], [1.0], {"samples": 0}),
    ],
)
def test_bad_input_is_refused(committed: list[float], rounds: list[float], options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="bootstrap needs"):
        bootstrap_ratio(committed, rounds, **options)  # type: ignore[arg-type]


def test_quotient_equals_a_loop_over_resamples_and_cancels_what_both_sides_share() -> None:
    generator = np.random.default_rng(5)
    tokens, seconds_a = simulate(generator, 6, 2.0)
    seconds_b = seconds_a * generator.uniform(0.4, 0.6, 6)
    found = paired_bootstrap_quotient(
        tokens, seconds_a, tokens, seconds_b, samples=40, confidence=0.9, seed=7
    )
    draws = np.random.default_rng(7)
    quotients = []
    for _ in range(40):
        chosen = np.repeat(np.arange(6), draws.multinomial(6, np.full(6, 1 / 6)))
        a = sum(tokens[i] for i in chosen) / sum(seconds_a[i] for i in chosen)
        b = sum(tokens[i] for i in chosen) / sum(seconds_b[i] for i in chosen)
        quotients.append(b / a)
    assert found.point == pytest.approx(seconds_a.sum() / seconds_b.sum())
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(quotients, [0.1, 0.9])))
    same = paired_bootstrap_quotient(tokens, seconds_a, tokens, seconds_a / 2, samples=40)
    assert (same.low, same.point, same.high) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="committed in every document"):
        paired_bootstrap_quotient([0.0], [1.0], [1.0], [1.0])

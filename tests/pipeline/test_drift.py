"""Drift statistics against brute force, and decisions from them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import AlarmsConfig, DriftConfig, RetrainConfig
from pipeline.drift import (
    CHANCE,
    Observation,
    PopulationShift,
    TauDrift,
    alarm_values,
    chi_square_quantile,
    decide,
    population_shift,
    tau_drift,
)
from pipeline.lineage import DomainSums


@dataclass(frozen=True)
class Replayed:
    domain: str
    committed: int
    rounds: int


BASELINE = {"math": DomainSums(10, 300, 100), "code": DomainSums(10, 200, 100)}  # τ 3 and 2


def documents(**sums: tuple[int, int]) -> list[Replayed]:
    return [Replayed(domain, *pair) for domain, pair in sums.items()]


def test_expected_tau_is_the_baseline_on_todays_mixture() -> None:
    # 60 math tokens in 20 rounds at τ 3, 60 code tokens in 30 at τ 2: τ 120/50, though half of all text is of each domain
    found = tau_drift(documents(math=(60, 24), code=(60, 30)), BASELINE, confidence=0.95)
    assert found is not None
    assert found.now == pytest.approx(120 / 54)
    assert found.expected == pytest.approx(120 / 50)
    assert found.drop == pytest.approx(1 - (120 / 54) / (120 / 50))


def test_a_shift_of_the_mixture_alone_is_no_drop() -> None:
    recent = [Replayed("code", 2 * n, n) for n in range(1, 20)] + [Replayed("math", 3, 1)]
    found = tau_drift(recent, BASELINE, confidence=0.95)
    assert found is not None
    assert found.drop == pytest.approx(0, abs=1e-12)
    assert found.now < 2.2  # while the plain τ of the mixture fell from 2.5


@given(
    st.lists(
        st.tuples(st.sampled_from(["math", "code"]), st.integers(1, 40), st.integers(1, 30)),
        min_size=1,
        max_size=12,
    )
)
def test_drop_against_exact_fractions(rows: list[tuple[str, int, int]]) -> None:
    found = tau_drift([Replayed(*row) for row in rows], BASELINE, confidence=0.9)
    assert found is not None
    tau = {"math": Fraction(3), "code": Fraction(2)}
    committed = Fraction(sum(c for _, c, _ in rows))
    now = committed / sum(r for _, _, r in rows)
    expected = committed / sum(Fraction(c) / tau[d] for d, c, _ in rows)
    assert found.now == pytest.approx(float(now))
    assert found.expected == pytest.approx(float(expected))
    assert found.drop == pytest.approx(float(1 - now / expected), abs=1e-9)


def test_lower_bound_of_the_drop_against_a_bootstrap_by_loops() -> None:
    generator = np.random.default_rng(5)
    rows = [Replayed("math", int(c), int(r)) for c, r in generator.integers(5, 30, size=(25, 2))]
    found = tau_drift(rows, BASELINE, confidence=0.9, seed=3)
    assert found is not None
    drops = []
    for _ in range(4000):
        drawn = [rows[i] for i in generator.integers(0, len(rows), size=len(rows))]
        drops.append(1 - sum(r.committed / 3 for r in drawn) / sum(r.rounds for r in drawn))
    assert found.drop_low == pytest.approx(float(np.quantile(drops, 0.1)), abs=0.02)
    assert found.drop_low < found.drop


def test_turns_of_one_conversation_are_no_independent_evidence() -> None:
    generator = np.random.default_rng(1)
    rows = [Replayed("math", int(c), 10) for c in generator.integers(20, 40, size=12)]
    once = tau_drift(rows, BASELINE, confidence=0.9)
    keys = [f"c{n}" for n in range(12)]
    repeated = tau_drift(rows * 6, BASELINE, confidence=0.9, conversations=keys * 6)
    naive = tau_drift(rows * 6, BASELINE, confidence=0.9)
    assert once is not None and repeated is not None and naive is not None
    assert (repeated.documents, repeated.conversations) == (72, 12)
    assert (repeated.drop, repeated.drop_low, repeated.drop_high) == pytest.approx(
        (once.drop, once.drop_low, once.drop_high)
    )
    assert naive.drop_high - naive.drop_low < 0.6 * (once.drop_high - once.drop_low)


def test_domains_without_baseline_and_documents_without_rounds_count_for_nothing() -> None:
    known = documents(math=(60, 24))
    strange = [Replayed("law", 100, 100), Replayed("math", 0, 0)]
    alone, mixed = (tau_drift(rows, BASELINE, confidence=0.95) for rows in (known, [*known, *strange]))
    assert alone is not None and mixed is not None
    assert (mixed.drop, mixed.documents, mixed.without_baseline) == (alone.drop, 1, ["law"])
    assert tau_drift(strange, BASELINE, confidence=0.95) is None


def brute_psi(reference: dict[str, int], recent: dict[str, int]) -> float:
    domains = {d for d in (*reference, *recent) if reference.get(d, 0) + recent.get(d, 0)}
    total = 0.0
    for d in domains:
        q = Fraction(2 * reference.get(d, 0) + 1, 2 * sum(reference.values()) + len(domains))
        p = Fraction(2 * recent.get(d, 0) + 1, 2 * sum(recent.values()) + len(domains))
        total += float(p - q) * math.log(float(p / q))
    return total


COUNTS = st.dictionaries(st.sampled_from("abcde"), st.integers(0, 60), min_size=1)


@given(COUNTS, COUNTS)
def test_population_stability_index_against_brute_force(a: dict[str, int], b: dict[str, int]) -> None:
    found = population_shift(a, b)
    if not sum(a.values()) or not sum(b.values()):
        assert found is None
        return
    assert found is not None
    assert found.index == pytest.approx(brute_psi(a, b), abs=1e-12)
    assert found.index >= 0
    back = population_shift(b, a)
    assert back is not None and back.index == pytest.approx(found.index)
    for side in (0, 1):
        assert math.fsum(pair[side] for pair in found.shares.values()) == pytest.approx(1)


def test_equal_shares_have_no_shift_and_one_domain_never_has() -> None:
    same = population_shift({"a": 30, "b": 10}, {"a": 30, "b": 10})
    single = population_shift({"a": 3}, {"a": 500})
    assert same is not None and same.index == 0
    assert single is not None and (single.index, single.chance) == (0, 0)


@pytest.mark.parametrize(("n", "m"), [(400, 60), (100, 100)])
def test_chance_is_exceeded_as_rarely_as_it_says(n: int, m: int) -> None:
    """Samples of one distribution pass for a shift about once in a hundred times, which a fixed limit does not give."""
    generator = np.random.default_rng(0)
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    beyond = limit = 0
    trials = 3000
    for _ in range(trials):
        a, b = (
            {str(i): int(k) for i, k in enumerate(generator.multinomial(size, shares))} for size in (n, m)
        )
        found = population_shift(a, b)
        assert found is not None
        beyond += found.index > found.chance
        limit += found.index > 0.1
    assert beyond / trials == pytest.approx(CHANCE, abs=0.008)
    assert limit / trials > 0.02


@pytest.mark.parametrize(("freedom", "expected"), [(1, 6.635), (2, 9.210), (5, 15.086), (20, 37.566)])
def test_chi_square_quantile_against_tables(freedom: int, expected: float) -> None:
    assert chi_square_quantile(freedom, 0.99) == pytest.approx(expected, rel=0.02)


CONFIG = RetrainConfig(enough_records=100, drift=DriftConfig(max_tau_drop=0.05, max_population_shift=0.2))


def drop(by: float, low: float, high: float = 0.9) -> TauDrift:
    return TauDrift(40, 30, 2.5 * (1 - by), 2.5, by, low, high)


DROP = drop(0.2, 0.1)
SHIFT = PopulationShift(0.5, 0.1, 60, {"a": (0.9, 0.5), "b": (0.1, 0.5)})


@pytest.mark.parametrize(
    ("seen", "train", "word"),
    [
        (Observation(9), False, "only 9 new training records, 10 are needed"),
        (Observation(9, tau=DROP, shift=SHIFT), False, "10 are needed"),
        (Observation(9, interrupted=True), True, "interrupted"),
        (Observation(50), False, "nothing drifts"),
        (Observation(100), True, "100 new training records"),
        (Observation(50, tau=DROP), True, "drop +20.0%"),
        (Observation(50, tau=drop(0.2, -0.01)), False, "nothing drifts"),
        (Observation(50, tau=drop(0.04, 0.03)), False, "nothing drifts"),
        (Observation(50, shift=SHIFT), True, "most moved: a 90% → 50%"),
        (Observation(50, shift=PopulationShift(0.5, 0.6, 6, SHIFT.shares)), False, "nothing drifts"),
        (Observation(50, shift=PopulationShift(0.15, 0.1, 600, SHIFT.shares)), False, "nothing drifts"),
    ],
)
def test_decision_names_its_reason(seen: Observation, train: bool, word: str) -> None:
    decision = decide(CONFIG, 10, seen)
    assert decision.train is train
    assert word in decision.reason
    assert [check.name for check in decision.checks] == ["volume", "acceptance", "population"]


@pytest.mark.parametrize(
    ("tau", "value"),
    [
        (None, None),
        (drop(0.2, 0.1), 0.2),
        (drop(0.2, -0.01), None),  # it may be chance, but it is no recovery
        (drop(0.07, -0.01), 0.07),  # between the thresholds: neither
        (drop(0.02, -0.01, 0.06), 0.02),
        (drop(0.02, -0.2, 0.24), None),  # so uncertain that the alarm may still be right
        (drop(-0.3, -0.4, -0.2), -0.3),
    ],
)
def test_uncertain_drop_tells_alarms_nothing(tau: TauDrift | None, value: float | None) -> None:
    assert alarm_values(AlarmsConfig(), Observation(9, tau=tau))["tau_drop"] == value


@pytest.mark.parametrize(
    ("index", "chance", "value"),
    [(0.5, 0.1, 0.5), (0.5, 0.6, None), (0.2, 0.6, 0.2), (0.05, 0.1, 0.05), (0.05, 0.6, None)],
)
def test_shift_that_chance_explains_tells_alarms_nothing(
    index: float, chance: float, value: float | None
) -> None:
    seen = Observation(9, shift=PopulationShift(index, chance, 60, SHIFT.shares))
    assert alarm_values(AlarmsConfig(), seen)["population_shift"] == value


def test_new_records_alone_are_reason_enough_by_default() -> None:
    assert decide(RetrainConfig(), 10, Observation(10)).train


def test_what_was_not_measured_says_why() -> None:
    seen = Observation(50, unmeasured={"tau": "only 3 recent", "shift": "no record"})
    findings = {check.name: (check.fires, check.finding) for check in decide(CONFIG, 10, seen).checks}
    assert findings["acceptance"] == (None, "only 3 recent")
    assert findings["population"] == (None, "no record")


def test_counts_of_a_survey_fit_as_they_are() -> None:
    assert population_shift({"a": 5}, Counter({"a": 5})) is not None

"""Has traffic moved away from the champion? Pure statistics, and the decision whether to retrain.

Two things can move: how well the champion drafts a kind of text (τ in a domain), and how much of each kind there is
(the population). Both are measured apart: the expected τ is what the champion's τ of each domain at the gate would give on
today's mixture.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from pipeline.bootstrap import bootstrap_ratio
from pipeline.config import AlarmsConfig, RetrainConfig, ThresholdConfig
from pipeline.lineage import DomainReplay, DomainSums

CHANCE = 0.01
"""Probability at which a population shift is taken for chance."""


@dataclass(frozen=True)
class TauDrift:
    """τ now and as expected from the baseline; `drop` is relative, `drop_low` and `drop_high` its one-sided bounds.

    The baseline's own error is not in the bounds.
    """

    documents: int
    conversations: int
    now: float
    expected: float
    drop: float
    drop_low: float
    drop_high: float
    without_baseline: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PopulationShift:
    """Population stability index of two distributions over domains; `chance` is what it exceeds once in 1/`CHANCE` times when
    both are samples of one distribution. `shares` are (reference, recent).
    """

    index: float
    chance: float
    records: int
    shares: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Observation:
    """What a call found. `unmeasured` says of a check why there is no figure."""

    new_records: int
    interrupted: bool = False
    tau: TauDrift | None = None
    shift: PopulationShift | None = None
    unmeasured: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One line of a decision; `fires` is None where it could not be judged."""

    name: str
    fires: bool | None
    finding: str


@dataclass(frozen=True)
class Decision:
    """Whether to train, in one sentence, and the checks behind it."""

    train: bool
    reason: str
    checks: list[Check]


def tau_drift(
    results: Sequence[DomainReplay],
    baseline: Mapping[str, DomainSums],
    *,
    confidence: float,
    seed: int = 0,
    conversations: Sequence[str] | None = None,
) -> TauDrift | None:
    """τ of replayed recent documents against the baseline of their domains.

    A document with c committed tokens of domain d would have taken c/τ_d rounds at the baseline, so that
    τ_expected = Σc ÷ Σ(c/τ_d) and drop = 1 - τ_now/τ_expected = 1 - Σ(c/τ_d) ÷ Σ rounds. Documents without a round, or of a
    domain without a baseline, are left out; None if nothing remains. `conversations` names that of each result: bounds
    come from resampling whole conversations, whose turns are alike; None takes each document for one.
    """
    tau_of = {domain: sums.committed / sums.rounds for domain, sums in baseline.items() if sums.rounds}
    unknown = sorted({r.domain for r in results if r.rounds and r.domain not in tau_of})
    keys = [str(n) for n in range(len(results))] if conversations is None else conversations
    pairs = [(r, key) for r, key in zip(results, keys, strict=True) if r.rounds and r.domain in tau_of]
    counted = [r for r, _ in pairs]
    if not counted:
        return None
    expected: defaultdict[str, float] = defaultdict(float)
    rounds: defaultdict[str, int] = defaultdict(int)
    for result, key in pairs:
        expected[key] += result.committed / tau_of[result.domain]
        rounds[key] += result.rounds
    ratio = bootstrap_ratio(list(expected.values()), list(rounds.values()), confidence=confidence, seed=seed)
    committed = sum(r.committed for r in counted)
    return TauDrift(
        documents=len(counted),
        conversations=len(rounds),
        now=committed / sum(rounds.values()),
        expected=committed / math.fsum(expected.values()),
        drop=1 - ratio.point,
        drop_low=1 - ratio.high,
        drop_high=1 - ratio.low,
        without_baseline=unknown,
    )


def population_shift(reference: Mapping[str, int], recent: Mapping[str, int]) -> PopulationShift | None:
    """Σ (p - q) ln(p/q) over domains, half a record added to each domain on both sides so that a new one is finite.

    When both are samples of one distribution, index ÷ (1/n + 1/m) is about χ² with (domains - 1) degrees of freedom;
    `chance` is its quantile. None without records on a side.
    """
    n, m = sum(reference.values()), sum(recent.values())
    domains = sorted({d for counts in (reference, recent) for d, number in counts.items() if number})
    if not n or not m:
        return None
    shares = {}
    for domain in domains:
        q = (reference.get(domain, 0) + 0.5) / (n + 0.5 * len(domains))
        p = (recent.get(domain, 0) + 0.5) / (m + 0.5 * len(domains))
        shares[domain] = (q, p)
    index = math.fsum((p - q) * math.log(p / q) for q, p in shares.values())
    chance = chi_square_quantile(len(domains) - 1, 1 - CHANCE) * (1 / n + 1 / m)
    return PopulationShift(index, chance, m, shares)


def chi_square_quantile(freedom: int, probability: float) -> float:
    """Wilson and Hilferty's approximation: a few percent off at one degree of freedom, less beyond."""
    if freedom == 0:
        return 0.0
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + NormalDist().inv_cdf(probability) * math.sqrt(spread)) ** 3


def decide(config: RetrainConfig, least: int, seen: Observation) -> Decision:
    """Train or not.

    An interrupted round goes on whatever the checks say. Else there must be `least` new records, and one check must fire.
    """
    enough = config.enough_records or least
    checks = [
        Check(
            "volume",
            seen.new_records >= enough,
            f"{seen.new_records} new training records, {enough} are reason enough",
        ),
        _check_tau(config, seen),
        _check_shift(config, seen),
    ]
    if seen.interrupted:
        return Decision(True, "an interrupted round goes on", checks)
    if seen.new_records < least:
        return Decision(False, f"only {seen.new_records} new training records, {least} are needed", checks)
    firing = [check.finding for check in checks if check.fires]
    if not firing:
        return Decision(False, "nothing drifts, and the new records alone are no reason", checks)
    return Decision(True, "; ".join(firing), checks)


def alarm_values(config: AlarmsConfig, seen: Observation) -> dict[str, float | None]:
    """What alarms are told: a figure that proves neither a drift nor a recovery is None, which says nothing.

    A drop speaks for the alarm when its lower bound is above 0, and against it when its upper bound is below `raise_at`; an
    index speaks for it above chance, and against it when chance alone would not reach `raise_at`.
    """
    tau, shift = seen.tau, seen.shift
    return {
        "tau_drop": None
        if tau is None
        else _certain(config.tau_drop, tau.drop, tau.drop_low > 0, tau.drop_high < config.tau_drop.raise_at),
        "population_shift": None
        if shift is None
        else _certain(
            config.population_shift,
            shift.index,
            shift.index > shift.chance,
            shift.chance < config.population_shift.raise_at,
        ),
    }


def _certain(limits: ThresholdConfig, value: float, drifts: bool, is_well: bool) -> float | None:
    if value >= limits.raise_at:
        return value if drifts else None
    if value <= limits.clear_at:
        return value if is_well else None
    return value


def _check_tau(config: RetrainConfig, seen: Observation) -> Check:
    tau, limit = seen.tau, config.drift.max_tau_drop
    if tau is None:
        return Check("acceptance", None, seen.unmeasured.get("tau", "not measured"))
    fires = tau.drop >= limit and tau.drop_low > 0
    finding = (
        f"τ {tau.now:.3f} on {tau.documents} recent held-out records of {tau.conversations} conversations, "
        f"{tau.expected:.3f} expected: drop {tau.drop:+.1%} (at least {tau.drop_low:+.1%}), limit {limit:.1%}"
    )
    if tau.without_baseline:
        finding += f"; no baseline for {', '.join(tau.without_baseline)}"
    return Check("acceptance", fires, finding)


def _check_shift(config: RetrainConfig, seen: Observation) -> Check:
    shift, limit = seen.shift, config.drift.max_population_shift
    if shift is None:
        return Check("population", None, seen.unmeasured.get("shift", "not measured"))
    fires = shift.index >= limit and shift.index > shift.chance
    moved = max(shift.shares, key=lambda domain: abs(shift.shares[domain][1] - shift.shares[domain][0]))
    before, now = shift.shares[moved]
    return Check(
        "population",
        fires,
        f"population stability index {shift.index:.3f} over {shift.records} records, limit {limit:g}, chance "
        f"{shift.chance:.3f}; most moved: {moved} {before:.0%} → {now:.0%}",
    )

"""The gate: may a challenger replace the champion? Pure decisions over replayed held-out documents.

A drafter is judged by replay τ, a length head or policy by committed tokens ÷ cost, because a
policy that verifies fewer rows trades τ for speed on purpose. Both compare paired documents with a
one-sided bootstrap bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from drafters.errors import UserError
from pipeline.bootstrap import Interval, paired_bootstrap_ratio


class DocumentReplay(Protocol):
    """What the gate reads of a replayed document; `drafters.replay.ReplayResult` fits."""

    @property
    def document_id(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def committed(self) -> int: ...
    @property
    def rounds(self) -> int: ...


@dataclass(frozen=True)
class LengthReplay:
    """One document replayed under a length policy.

    `verified` is Σ verify_len over the rounds: the rows the target verified, anchors counted.
    """

    document_id: str
    domain: str
    committed: int
    rounds: int
    verified: int


@dataclass(frozen=True)
class GatePolicy:
    """When a challenger wins.

    `confidence` of the one-sided lower bound; `min_documents` paired documents in all,
    `min_domain_documents` in a domain before its drop is judged; `max_domain_drop` is relative
    (0.05: a domain may lose 5 %).
    """

    confidence: float = 0.95
    min_documents: int = 16
    min_domain_documents: int = 8
    max_domain_drop: float = 0.05
    bootstrap_samples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Verdict:
    """The decision, one sentence saying why, and the numbers behind it (JSON-ready)."""

    accepted: bool
    reason: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sums:
    """Numerator and denominator of one document's ratio."""

    document_id: str
    domain: str
    numerator: float
    denominator: float


@dataclass(frozen=True)
class _Pair:
    champion: _Sums
    challenger: _Sums


def judge(
    champion: Sequence[DocumentReplay] | None,
    challenger: Sequence[DocumentReplay],
    policy: GatePolicy,
    *,
    weights_finite: bool,
    reload_equal: bool,
    guards: Collection[str] = (),
) -> Verdict:
    """Judge a challenger's replay against the champion's on the same held-out documents.

    Finite weights and a bit-equal reload are required of every drafter. The first champion
    (`champion` None) then needs only τ > 1. Any later challenger needs enough documents, a
    paired-bootstrap lower bound of the τ difference above 0, and no domain that drops by more than
    the tolerance. Documents without a round on either side count for nothing.

    `guards` names documents that only guard their domains against a drop: offline text that recent traffic
    must not be diluted with, but must not make worse either.

    Raises:
        UserError: the two replays do not cover the same documents.
    """
    broken = _integrity(weights_finite, reload_equal)
    if broken:
        return broken
    ours = [_round_sums(result) for result in challenger]
    if champion is None:
        return _judge_first(ours)
    theirs = [_round_sums(result) for result in champion]
    return _judge_pairs(_pair(theirs, ours), policy, "acceptance length", guards)


def judge_length_head(
    champion: Sequence[LengthReplay],
    challenger: Sequence[LengthReplay],
    policy: GatePolicy,
    *,
    cost_fixed: float,
    cost_row: float,
    weights_finite: bool = True,
    reload_equal: bool = True,
) -> Verdict:
    """Judge a length head or policy by Σ committed ÷ (cost_fixed·Σ rounds + cost_row·Σ verify_len).

    `cost_fixed` is what a round costs whatever its length (drafting, weight reads, launches),
    `cost_row` what one verified row adds, both in the same unit, usually seconds. Where no head
    serves yet, the champion is the policy in use, such as fixed full blocks. Rules otherwise as
    `judge`.

    Raises:
        UserError: the two replays do not cover the same documents, or a cost is negative, or both
            are 0.
    """
    if cost_fixed < 0 or cost_row < 0 or cost_fixed + cost_row <= 0:
        raise UserError(
            f"cost model: cost_fixed {cost_fixed} and cost_row {cost_row} must not be negative, "
            "and not both 0"
        )
    broken = _integrity(weights_finite, reload_equal)
    if broken:
        return broken

    def sums(result: LengthReplay) -> _Sums:
        cost = cost_fixed * result.rounds + cost_row * result.verified
        return _Sums(result.document_id, result.domain, result.committed, cost)

    pairs = _pair([sums(result) for result in champion], [sums(result) for result in challenger])
    verdict = _judge_pairs(pairs, policy, "committed tokens per unit cost")
    verdict.details["cost_fixed"], verdict.details["cost_row"] = cost_fixed, cost_row
    return verdict


def _integrity(weights_finite: bool, reload_equal: bool) -> Verdict | None:
    details = {"weights_finite": weights_finite, "reload_equal": reload_equal}
    if not weights_finite:
        return Verdict(False, "the weights hold values that are not finite", details)
    if not reload_equal:
        return Verdict(False, "the registered weights do not reload bit-equal", details)
    return None


def _round_sums(result: DocumentReplay) -> _Sums:
    return _Sums(result.document_id, result.domain, result.committed, result.rounds)


def _judge_first(challenger: list[_Sums]) -> Verdict:
    value = _ratio(challenger)
    details = {"documents": len(challenger), "challenger": value, "first_champion": True}
    if value is None:
        return Verdict(False, "no held-out document has a round: nothing was measured", details)
    accepted = value > 1
    comparison = "is above" if accepted else "is not above"
    reason = f"first champion: acceptance length {value:.3f} {comparison} 1, that of no drafter"
    return Verdict(accepted, reason, details)


def _judge_pairs(
    pairs: list[_Pair], policy: GatePolicy, quantity: str, guards: Collection[str] = ()
) -> Verdict:
    counted = [p for p in pairs if p.champion.denominator > 0 and p.challenger.denominator > 0]
    measured = [p for p in counted if p.champion.document_id not in guards]
    details: dict[str, Any] = {
        "quantity": quantity,
        "documents": len(measured),
        "guard_documents": len(counted) - len(measured),
        "documents_without_rounds": len(pairs) - len(counted),
        "champion": _ratio([p.champion for p in measured]),
        "challenger": _ratio([p.challenger for p in measured]),
        "domains": _domains(counted, policy),
        "policy": asdict(policy),
    }
    needed = max(1, policy.min_documents)
    if len(measured) < needed:
        return Verdict(
            False, f"only {len(measured)} held-out documents, {needed} are needed to judge", details
        )
    difference = _difference(measured, policy)
    details["difference"] = asdict(difference)
    verb = "is above" if difference.low > 0 else "is not above"
    findings = [
        f"{quantity} {_shown(details['challenger'])} vs champion {_shown(details['champion'])}: "
        f"difference {difference.point:+.3g}, {100 * policy.confidence:g}% lower bound "
        f"{difference.low:+.3g} {verb} 0"
    ]
    dropped = [
        f"domain {name} drops by {-entry['relative_change']:.1%} "
        f"({_shown(entry['champion'])} to {_shown(entry['challenger'])}), more than the tolerated "
        f"{policy.max_domain_drop:.1%}"
        for name, entry in details["domains"].items()
        if entry["dropped"]
    ]
    return Verdict(difference.low > 0 and not dropped, "; ".join(findings + dropped), details)


def _difference(pairs: list[_Pair], policy: GatePolicy) -> Interval:
    return paired_bootstrap_ratio(
        [p.champion.numerator for p in pairs],
        [p.champion.denominator for p in pairs],
        [p.challenger.numerator for p in pairs],
        [p.challenger.denominator for p in pairs],
        samples=policy.bootstrap_samples,
        confidence=policy.confidence,
        seed=policy.seed,
    )


def _domains(pairs: list[_Pair], policy: GatePolicy) -> dict[str, dict[str, Any]]:
    """Per domain: documents, both ratios, their relative change, whether judged and dropped."""
    report = {}
    for name in sorted({p.champion.domain for p in pairs}):
        members = [p for p in pairs if p.champion.domain == name]
        champion = _ratio([p.champion for p in members])
        challenger = _ratio([p.challenger for p in members])
        change = challenger / champion - 1 if champion and challenger else 0.0
        judged = len(members) >= policy.min_domain_documents
        report[name] = {
            "documents": len(members),
            "champion": champion,
            "challenger": challenger,
            "relative_change": change,
            "judged": judged,
            "dropped": judged and change < -policy.max_domain_drop,
        }
    return report


def _pair(champion: list[_Sums], challenger: list[_Sums]) -> list[_Pair]:
    """Pairs in order of document id, so that the verdict does not depend on the order of replay."""
    sides = []
    for name, results in (("champion", champion), ("challenger", challenger)):
        repeated = [i for i, n in Counter(r.document_id for r in results).items() if n > 1]
        if repeated:
            raise UserError(f"gate: the {name}'s replay holds document {repeated[0]!r} twice")
        sides.append({r.document_id: r for r in results})
    theirs, ours = sides
    unpaired = sorted(theirs.keys() ^ ours.keys())
    if unpaired:
        raise UserError(
            f"gate: {len(unpaired)} documents were replayed on one side only, first "
            f"{unpaired[0]!r}; replay champion and challenger on the same held-out documents"
        )
    pairs = [_Pair(theirs[i], ours[i]) for i in sorted(theirs)]
    for pair in pairs:
        if pair.champion.domain != pair.challenger.domain:
            raise UserError(
                f"gate: document {pair.champion.document_id!r} has domain "
                f"{pair.champion.domain!r} for the champion and {pair.challenger.domain!r} for the "
                "challenger"
            )
    return pairs


def _ratio(results: list[_Sums]) -> float | None:
    denominator = math.fsum(r.denominator for r in results)
    return math.fsum(r.numerator for r in results) / denominator if denominator > 0 else None


def _shown(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"

"""The gate's decisions and the sentences that explain them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from drafters.errors import UserError
from drafters.replay import ReplayResult
from pipeline.gate import GatePolicy, LengthReplay, Verdict, judge, judge_length_head

POLICY = GatePolicy(bootstrap_samples=500)
DOMAINS = ("math", "code")


def replays(gains: dict[str, float], documents: int = 20, seed: int = 0) -> list[ReplayResult]:
    """Documents of 20-40 rounds per domain; a domain's `gain` scales what each document commits beyond 1."""
    generator = np.random.default_rng(seed)
    results = []
    for domain, gain in gains.items():
        for index in range(documents):
            rounds = int(generator.integers(20, 40))
            accepted = round(rounds * generator.uniform(0.4, 1.2) * gain)
            results.append(ReplayResult(f"{domain}-{index}", domain, rounds + accepted, rounds))
    return results


def decide(champion: Sequence[ReplayResult] | None, challenger: Sequence[ReplayResult]) -> Verdict:
    return judge(champion, challenger, POLICY, weights_finite=True, reload_equal=True)


def test_better_challenger_is_accepted() -> None:
    verdict = decide(replays({"math": 1.0, "code": 1.0}), replays({"math": 1.2, "code": 1.1}))
    assert verdict.accepted
    assert "is above 0" in verdict.reason
    assert verdict.details["difference"]["low"] > 0
    json.dumps(verdict.details, allow_nan=False)


def test_worse_but_finite_challenger_is_refused_with_numbers() -> None:
    verdict = decide(replays({"math": 1.0, "code": 1.0}), replays({"math": 0.8, "code": 0.8}))
    assert not verdict.accepted
    champion, challenger = verdict.details["champion"], verdict.details["challenger"]
    assert f"acceptance length {challenger:.3f} vs champion {champion:.3f}: difference -0." in verdict.reason
    assert "95% lower bound -0." in verdict.reason and "is not above 0" in verdict.reason


def test_equal_drafter_is_refused() -> None:
    same = replays({"math": 1.0, "code": 1.0})
    assert not decide(same, same).accepted


def test_gain_that_may_be_chance_is_refused() -> None:
    champion = replays({"math": 1.0}, documents=30)
    challenger = [
        ReplayResult(r.document_id, r.domain, r.committed + (8 if i % 2 else -7), r.rounds)
        for i, r in enumerate(champion)
    ]
    verdict = decide(champion, challenger)
    assert verdict.details["difference"]["point"] > 0
    assert not verdict.accepted


def test_order_of_replay_does_not_matter() -> None:
    champion, challenger = replays({"math": 1.0, "code": 1.0}), replays({"math": 1.1, "code": 1.1})
    assert decide(champion, challenger) == decide(champion[::-1], sorted(challenger, key=lambda r: r.rounds))


def test_domain_drop_is_refused_despite_a_better_total() -> None:
    verdict = decide(replays({"math": 1.0, "code": 1.0}), replays({"math": 2.0, "code": 0.7}))
    assert verdict.details["difference"]["low"] > 0
    assert not verdict.accepted
    assert "domain code drops by" in verdict.reason and "domain math" not in verdict.reason


def test_drop_within_tolerance_is_accepted() -> None:
    verdict = decide(replays({"math": 1.0, "code": 1.0}), replays({"math": 1.5, "code": 0.97}))
    assert verdict.details["domains"]["code"]["relative_change"] < 0
    assert verdict.accepted


def test_small_domain_is_reported_but_not_judged() -> None:
    few = POLICY.min_domain_documents - 1
    champion = replays({"math": 1.0}) + replays({"chat": 1.0}, documents=few)
    challenger = replays({"math": 1.3}) + replays({"chat": 0.7}, documents=few)
    verdict = decide(champion, challenger)
    assert verdict.accepted
    chat = verdict.details["domains"]["chat"]
    assert chat["documents"] == few and not chat["judged"] and chat["relative_change"] < -0.1


def test_weights_that_are_not_finite_are_refused_whatever_the_replay() -> None:
    better = replays({"math": 2.0})
    for champion in (replays({"math": 1.0}), None):
        verdict = judge(champion, better, POLICY, weights_finite=False, reload_equal=True)
        assert not verdict.accepted and "not finite" in verdict.reason


def test_reload_mismatch_is_refused() -> None:
    verdict = judge(
        replays({"math": 1.0}), replays({"math": 2.0}), POLICY, weights_finite=True, reload_equal=False
    )
    assert not verdict.accepted and "bit-equal" in verdict.reason


def test_first_champion_needs_only_an_acceptance_length_above_one() -> None:
    assert decide(None, replays({"math": 0.1}, documents=1)).accepted
    refused = decide(None, [ReplayResult("a", "math", 5, 5)])
    assert not refused.accepted and "1.000 is not above 1" in refused.reason
    nothing = decide(None, [])
    assert not nothing.accepted and "nothing was measured" in nothing.reason


def test_too_few_documents_are_refused() -> None:
    champion, challenger = replays({"math": 1.0}, documents=15), replays({"math": 2.0}, documents=15)
    verdict = decide(champion, challenger)
    assert not verdict.accepted
    assert verdict.reason == "only 15 held-out documents, 16 are needed to judge"


def test_documents_without_rounds_do_not_count() -> None:
    empty = [ReplayResult("empty", "math", 0, 0)]
    verdict = decide(replays({"math": 1.0}) + empty, replays({"math": 1.3}) + empty)
    assert verdict.accepted
    assert (verdict.details["documents"], verdict.details["documents_without_rounds"]) == (20, 1)


def test_unpaired_documents_are_an_error() -> None:
    champion = replays({"math": 1.0})
    with pytest.raises(UserError, match=r"'math-19'.*same held-out documents"):
        decide(champion, replays({"math": 2.0})[:-1])
    with pytest.raises(UserError, match="twice"):
        decide(champion, champion + champion[:1])
    moved = [ReplayResult(r.document_id, "code", r.committed, r.rounds) for r in champion]
    with pytest.raises(UserError, match="domain"):
        decide(champion, moved)


def test_guard_documents_do_not_dilute_the_decision_but_veto_a_drop() -> None:
    champion = replays({"code": 1.0, "math": 1.0})
    guards = [r.document_id for r in champion if r.domain == "math"]

    def guarded(challenger: Sequence[ReplayResult]) -> Verdict:
        return judge(champion, challenger, POLICY, weights_finite=True, reload_equal=True, guards=guards)

    # worse overall, better on the traffic that decides, and within the tolerance elsewhere
    slightly = guarded(replays({"code": 1.15, "math": 0.95}))
    assert slightly.accepted, slightly.reason
    assert (slightly.details["documents"], slightly.details["guard_documents"]) == (20, 20)
    # a clear loss in the guarded domain refuses however well the traffic does
    vetoed = guarded(replays({"code": 2.0, "math": 0.5}))
    assert not vetoed.accepted and "domain math drops" in vetoed.reason
    # a gain in the guarded domain alone is no reason to accept
    assert not guarded(replays({"code": 1.0, "math": 2.0})).accepted


def lengths(committed: int, rounds: int, verified: int, documents: int = 20) -> list[LengthReplay]:
    return [
        LengthReplay(f"d{i}", "math", committed + i, rounds + i % 3, verified + i) for i in range(documents)
    ]


def test_shorter_verification_wins_where_rows_are_dear_and_loses_where_they_are_cheap() -> None:
    full, short = lengths(100, 40, 40 * 8), lengths(100, 50, 50 * 3)
    dear = judge_length_head(full, short, POLICY, cost_fixed=1.0, cost_row=1.0)
    cheap = judge_length_head(full, short, POLICY, cost_fixed=1.0, cost_row=0.01)
    assert dear.accepted and not cheap.accepted
    assert "committed tokens per unit cost" in cheap.reason
    first = lengths(100, 40, 320, documents=20)
    cost = sum(1.0 * r.rounds + 1.0 * r.verified for r in first)
    assert dear.details["champion"] == pytest.approx(sum(r.committed for r in first) / cost)


def test_impossible_cost_model_is_an_error() -> None:
    replay = lengths(100, 40, 320)
    with pytest.raises(UserError, match="cost_row"):
        judge_length_head(replay, replay, POLICY, cost_fixed=1.0, cost_row=-1.0)

"""Joint lengths are the best of all length vectors, and drafting stops and resumes as it pays."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from drafters.policies import AdaptivePolicy, FixedPolicy, Load, RoundTiming
from drafters.survival_policy import SurvivalPolicy
from drafters.throughput_policy import CALIBRATION_ROUNDS, Honesty, ThroughputPolicy, best_lengths
from tests.drafters.policy_samples import linear_costs, random_acceptance_head, settled_policy

BLOCK, HIDDEN = 4, 6


def hidden(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, BLOCK, HIDDEN, generator=torch.Generator().manual_seed(seed))


def stairs(rows: np.ndarray) -> np.ndarray:
    """Steps, as kernels that work in tiles have them."""
    return 1.0 + 0.6 * np.ceil(rows / 4)


COSTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "linear": lambda rows: 1.0 + 0.1 * rows,
    "dear": lambda rows: 0.1 + rows.astype(float),
    "free": lambda rows: np.ones(len(rows)),
    "stairs": stairs,
    "convex": lambda rows: 1.0 + 0.02 * rows.astype(float) ** 2,
    "concave": lambda rows: np.sqrt(rows),
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("draft_s", [0.0, 0.7])
@pytest.mark.parametrize("seed", range(5))
def test_no_length_vector_is_better(cost: str, draft_s: float, seed: int) -> None:
    num_requests, drafts = 3, BLOCK - 1
    generator = np.random.default_rng(seed)
    # coarse values, so that equal survivals and equal rates occur
    survival = np.cumprod(np.round(generator.uniform(0.2, 1.0, (num_requests, drafts)), 1), axis=1)
    verify_s = COSTS[cost](np.arange(num_requests, num_requests * BLOCK + 1))
    plan = best_lengths(survival, verify_s, draft_s)

    def rate(lengths: tuple[int, ...]) -> float:
        tokens = sum(1 + survival[n, : v - 1].sum() for n, v in enumerate(lengths))
        return float(tokens / (draft_s + verify_s[sum(lengths) - num_requests]))

    every = itertools.product(range(1, BLOCK + 1), repeat=num_requests)
    assert rate(tuple(plan.lengths)) == pytest.approx(max(map(rate, every)), rel=1e-12)
    assert plan.rate == pytest.approx(rate(tuple(plan.lengths)), rel=1e-12)


def test_free_rows_are_all_verified_and_dear_ones_not() -> None:
    survival = np.asarray([[0.9, 0.5, 0.1], [0.8, 0.7, 0.6]])
    assert best_lengths(survival, np.ones(7), 0.0).lengths == [4, 4]
    assert best_lengths(survival, 1.0 + 100.0 * np.arange(7), 0.0).lengths == [1, 1]
    # one row for every two tokens: only what survives with more than one half
    lengths = best_lengths(survival, 2.0 * np.arange(2, 9), 0.0).lengths
    assert lengths == [1, 1]
    # rows that cost little beside the pass: the likelier of two requests gets more of them
    short, long = best_lengths(survival, 10.0 + 2.5 * np.arange(7), 0.0).lengths
    assert 1 < short < long


def test_the_policy_answers_with_its_plan() -> None:
    head = random_acceptance_head(HIDDEN, BLOCK, confidence=False)
    policy = settled_policy(head, linear_costs(fixed=1.0, row=0.1, draft=0.3, block_size=BLOCK))
    states = hidden(2)
    lengths = policy.verify_len(states, states, Load(2))
    survival = head.survival(states).double().numpy()
    verify_s = 1.0 + 0.1 * np.arange(2, 2 * BLOCK + 1)
    assert lengths.tolist() == best_lengths(survival, verify_s, 0.3).lengths
    assert lengths.dtype == torch.int64
    assert len(set(lengths.tolist())) == 2, "the two requests must differ for this to say anything"
    # another request beside it changes what a request gets
    alone = [policy.verify_len(states[i : i + 1], states, Load(1)).item() for i in range(2)]
    assert alone != lengths.tolist()


def test_what_is_drafted_all_the_same_is_verified_as_far_as_it_beats_plain_decoding() -> None:
    head = random_acceptance_head(HIDDEN, BLOCK, confidence=False)
    policy = settled_policy(head, linear_costs(fixed=1.0, row=0.1, draft=50.0, block_size=BLOCK))
    survival = np.asarray([[0.9, 0.5, 0.05], [0.6, 0.1, 0.02]])
    # beside drafting that dear a row costs nothing
    assert best_lengths(survival, 1.0 + 0.1 * np.arange(2, 9), 50.0).lengths == [4, 4]
    # but plain decoding commits 2 tokens in 1.2 s, so a row of 0.1 s must bring a sixth of one
    assert policy.plan(survival).lengths == [3, 2]


def feed(
    policy: ThroughputPolicy,
    *,
    fixed: float,
    row: float,
    draft: float,
    rounds: int,
    count: int = 2,
    committed: int | None = None,
) -> list[bool]:
    """Rounds of so many requests on a machine of such costs; whether each was drafted."""
    drafted: list[bool] = []
    for number in range(rounds):
        wants = policy.wants_draft(Load(count))
        states = hidden(count, number)
        rows = int(policy.verify_len(states, states, Load(count)).sum()) if wants else count
        # the first after a gap has more to read than usual
        usual = wants and bool(drafted) and drafted[-1]
        policy.observe(RoundTiming(count, rows, fixed + row * rows, draft if usual else None, committed))
        drafted.append(wants)
    return drafted


@pytest.mark.parametrize(
    ("draft", "row", "pays"), [(0.01, 0.01, True), (50.0, 0.01, False), (0.3, 10.0, False)]
)
def test_drafting_stops_where_it_does_not_pay(draft: float, row: float, pays: bool) -> None:
    head = random_acceptance_head(HIDDEN, BLOCK, confidence=False, bias=1.0)
    policy = ThroughputPolicy(head, probe_every=20)
    drafted = feed(policy, fixed=1.0, row=row, draft=draft, rounds=1510)
    assert all(drafted[:CALIBRATION_ROUNDS]), "it cannot know yet"
    # but for probes, one plain round or two with drafts in 20, or in up to 320 if they would cost more than 1/200 of the time
    probes = [i for i, wants in enumerate(drafted, start=1) if i > 62 and wants != pays]
    starts = [i for i in probes if i - 1 not in probes]
    assert probes == [i + j for i in starts for j in range(1 if pays else 2)]
    gaps = set(np.diff(starts).tolist())
    if not pays:
        # two rounds of 51 s for some 4 s' worth of tokens; two of 21.3 s for 21 s' worth
        assert gaps == {320 if draft == 50.0 else 20}
        return
    plans = [policy.plan(head.survival(hidden(2, n)).double().numpy()) for n in range(1500)]
    seconds, tokens = (float(np.mean([getattr(p, name) for p in plans])) for name in ("seconds", "tokens"))
    lost = (1.02 - 2 * seconds / tokens) / seconds
    assert 20 < lost / 0.005 < 320
    assert all(gap == pytest.approx(lost / 0.005, rel=0.2) for gap in gaps), "1/200 of the time"


def test_drafting_resumes_when_it_pays_again() -> None:
    policy = ThroughputPolicy(
        random_acceptance_head(HIDDEN, BLOCK, confidence=False, bias=1.0), probe_every=8
    )
    # probes that dear are 16·8 rounds apart
    assert sum(feed(policy, fixed=1.0, row=0.01, draft=40.0, rounds=200)[-80:]) == 2
    drafted = feed(policy, fixed=1.0, row=0.01, draft=0.05, rounds=1200)
    assert sum(drafted[-80:]) >= 79


def test_a_stale_cost_of_drafting_is_unlearnt() -> None:
    """Told 45 ms while the cores were shared; with the true 6 ms drafting commits 54 tokens per second, plain decoding 43."""
    head = random_acceptance_head(HIDDEN, BLOCK, confidence=False)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias.zero_()
        head.slot_bias.fill_(float(torch.logit(torch.tensor(0.38))))
    policy = ThroughputPolicy(head)
    told = feed(policy, fixed=1 / 43, row=0.0, draft=0.045, rounds=60, count=1)
    assert not any(told[-20:])
    drafted = feed(policy, fixed=1 / 43, row=0.0, draft=0.006, rounds=4000, count=1)
    assert sum(drafted[-128:]) == 126, "all but probes"


@pytest.mark.parametrize(("row", "spacing"), [(5.0, 96), (0.4, 39), (0.125, 6)])
def test_whole_blocks_are_tried_as_rarely_as_they_are_dear(row: float, spacing: int) -> None:
    """Every 6th drafted round with `probe_every` 3; every 96th where the rows cost many times what they bring."""
    head = random_acceptance_head(HIDDEN, BLOCK, confidence=False)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias.zero_()
        # half of all drafts are right. With rows of 0.4 s, 2 of 4 are the best: 1.5 tokens in 1.8 s; whole blocks take 2.6 s for
        # 1.875 tokens, which loses 0.35 s, or 0.194 of a round, 38.9 times 1/200
        head.slot_bias.zero_()
    costs = linear_costs(fixed=1.0, row=row, draft=0.0, block_size=BLOCK)
    policy = settled_policy(head, costs, probe_every=3)
    states = hidden(1)
    lengths = [int(policy.verify_len(states, states, Load(1))) for _ in range(400)]
    whole = [i for i, length in enumerate(lengths) if length == BLOCK]
    assert set(np.diff(whole).tolist()) == {spacing}, lengths


def test_promises_that_are_not_kept_are_believed_less() -> None:
    def policy() -> ThroughputPolicy:
        return ThroughputPolicy(random_acceptance_head(HIDDEN, BLOCK, confidence=False, bias=1.0))

    costs = {"fixed": 1.0, "row": 0.01, "draft": 0.3}
    assert sum(feed(policy(), **costs, rounds=1000)[-200:]) > 190
    assert sum(feed(policy(), **costs, rounds=1000, committed=8)[-200:]) > 190
    # not one draft is accepted
    assert sum(feed(policy(), **costs, rounds=1000, committed=2)[-200:]) < 10


def test_promises_are_judged_by_what_became_of_them_lately() -> None:
    honesty = Honesty()
    assert honesty.share == 1.0
    for now in range(5000):
        honesty.add(1.5, 3.0, 1, now)
    assert honesty.share == pytest.approx(0.5, abs=0.001)
    # after a long time a few rounds turn it, one alone does not
    honesty.add(3.0, 3.0, 1, 15_000)
    assert 0.5 < honesty.share < 0.6
    for now in range(1, 6):
        honesty.add(3.0, 3.0, 1, 15_000 + 10_000 * now)
    assert honesty.share > 0.9
    for now in range(500):
        honesty.add(0.0, 0.0, 1, 75_000 + 10_000 * now)
    assert honesty.share > 0.9, "where nothing was hoped for nothing is learnt"


def test_recent_blocks_are_of_all_requests_and_begin_where_drafted_rounds_ended() -> None:
    head = random_acceptance_head(HIDDEN, BLOCK, confidence=False)
    policy = ThroughputPolicy(head)
    states = hidden(300)
    policy.verify_len(states, states, Load(300))
    np.testing.assert_array_equal(np.stack(policy._recent), head.survival(states).double().numpy()[::3])
    policy = ThroughputPolicy(head)
    script = iter([True, True, False, True, True])
    policy._wants = lambda num_requests: next(script)  # type: ignore[method-assign]
    kept = []
    for number in range(5):
        if policy.wants_draft(Load(1)):
            states = hidden(1, number)
            policy.verify_len(states, states, Load(1))
        kept.append(len(policy._recent))
    assert kept == [1, 2, 2, 2, 3]


def test_calibration_ends_where_hardly_a_round_is_observed() -> None:
    """New prompts in nearly every round: two lengths were seen, so the table can tell something."""
    policy = ThroughputPolicy(random_acceptance_head(HIDDEN, BLOCK, confidence=False))
    lengths = []
    for number in range(4 * CALIBRATION_ROUNDS + 8):
        assert policy.wants_draft(Load(1)) or number >= 4 * CALIBRATION_ROUNDS
        states = hidden(1, number)
        lengths.append(int(policy.verify_len(states, states, Load(1))))
        if number < 2:
            policy.observe(RoundTiming(1, lengths[-1], 1.0 + 999.0 * lengths[-1], 0.01))
    assert set(lengths[-12:-8]) == {1, 2, BLOCK}
    assert set(lengths[-8:]) == {1}


def test_calibration_tries_lengths_and_a_higher_load_its_most_rows() -> None:
    policy = ThroughputPolicy(random_acceptance_head(HIDDEN, BLOCK, confidence=False))
    tried = set()
    for number in range(CALIBRATION_ROUNDS):
        assert policy.wants_draft(Load(1))
        states = hidden(1, number)
        length = int(policy.verify_len(states, states, Load(1)))
        tried.add(length)
        # rows beyond the first cost so much that only a trial would verify them
        policy.observe(RoundTiming(1, length, 1.0 + 9.0 * length, 0.01))
    assert tried == {1, 2, BLOCK}
    states = hidden(8)
    assert policy.verify_len(states[:1], states[:1], Load(1)).tolist() == [1]
    assert policy.verify_len(states, states, Load(8)).tolist() == [BLOCK] * 8
    policy.observe(RoundTiming(8, 8 * BLOCK, 1.0 + 9.0 * 8 * BLOCK, 0.01))
    assert policy.verify_len(states, states, Load(8)).tolist() == [1] * 8


def test_trials_go_on_where_rounds_with_new_prompts_are_not_observed() -> None:
    policy = ThroughputPolicy(random_acceptance_head(HIDDEN, BLOCK, confidence=False))
    states = hidden(8)

    def tried(count: int) -> int:
        (length,) = set(policy.verify_len(states[:count], states[:count], Load(count)).tolist())
        return int(length)

    assert {tried(1) for _ in range(8)} == {1, 2, BLOCK}
    for _ in range(CALIBRATION_ROUNDS):
        length = tried(1)
        policy.observe(RoundTiming(1, length, 1.0 + 9.0 * length, 0.01))
    assert tried(1) == 1
    assert [tried(8) for _ in range(4)] == [BLOCK, 1, 1, 1], "a load's most rows are tried once"


def test_only_throughput_is_adaptive() -> None:
    head = random_acceptance_head(HIDDEN, BLOCK)
    assert isinstance(ThroughputPolicy(head), AdaptivePolicy)
    assert not isinstance(FixedPolicy(), AdaptivePolicy)
    assert not isinstance(SurvivalPolicy(head), AdaptivePolicy)
    with pytest.raises(ValueError, match="probe_every"):
        ThroughputPolicy(head, probe_every=2)

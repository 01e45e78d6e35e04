"""Drafting ahead: prepared blocks are the blocks that would have been drafted, and output stays the target's own."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from drafters import decoding
from drafters.branches import (
    Branch,
    Budget,
    RoundCost,
    RoundOutcome,
    estimate_budgets,
    plan_branches,
)
from drafters.d3d import AheadRows, D3DDrafter
from drafters.d3d_loss import d3d_loss
from drafters.decoding import DecodingSession, ServingDrafter, decode_round
from drafters.errors import UserError
from drafters.length_head import LengthHead
from drafters.lookahead import Lookahead
from drafters.objectives import LossSpec
from drafters.packing import Document, pack_documents
from drafters.policies import AdaFlashPolicy, FixedPolicy, LengthPolicy
from drafters.target import Target
from drafters.verify import SamplingParams, Verification, verify_sampling, warp

BLOCK = 5


@pytest.fixture
def widest() -> Iterator[Lookahead]:
    with Lookahead(Budget(BLOCK, 3), note_outcomes=True) as lookahead:
        yield lookahead


def sessions_of(
    learnt: Any, documents: Sequence[Document], *, limit: int = 40, eos_ids: Sequence[int] = ()
) -> list[DecodingSession]:
    return [
        DecodingSession(
            learnt.target,
            d.token_ids[: d.response_mask.index(True)],
            sampling=SamplingParams(),
            max_new_tokens=min(limit, sum(d.response_mask)),
            eos_ids=eos_ids,
        )
        for d in documents
    ]


def run(
    sessions: list[DecodingSession],
    serving: ServingDrafter,
    lookahead: Lookahead | None,
    batch: int = 4,
) -> None:
    """As an engine does it: at most `batch` at a time, the next joins when one ends."""
    waiting = list(sessions)
    running: list[DecodingSession] = []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
        assert not decode_round(running, serving, lookahead=lookahead)
        running = [session for session in running if not session.finished]


def response(document: Document) -> list[int]:
    return document.token_ids[document.response_mask.index(True) :]


def test_a_branch_is_the_block_that_would_be_drafted_once_its_tokens_are_committed(learnt: Any) -> None:
    """Two requests at different places in one pass; then each outcome committed, one after another, from a copied cache."""
    drafter: D3DDrafter = copy.deepcopy(learnt.drafter).double()
    texts = [torch.tensor(d.token_ids) for d in learnt.documents[:2]]
    starts, verified = [9, 14], [BLOCK, 3]
    caches = [DynamicCache(config=drafter.config) for _ in texts]
    for text, start, cache in zip(texts, starts, caches, strict=True):
        drafter.draft([text[: start + 1]], [0], [cache])
    before = [copy.deepcopy(cache) for cache in caches]
    requests = [
        AheadRows(text[start : start + length], start, depths, anchors, cache)
        for text, start, length, cache, depths, anchors in zip(
            texts, starts, verified, caches, [[1, 1, 3, 4], [2, 3]], [[7, 8, 9, 10], [11, 12]], strict=True
        )
    ]
    ahead = drafter.draft_ahead(requests)
    for request, old, hidden in zip(requests, before, ahead, strict=True):
        assert request.cache.get_seq_length() == request.start + len(request.block_ids)
        for depth, anchor, block in zip(request.depths, request.anchors, hidden, strict=True):
            cache = copy.deepcopy(old)
            committed = torch.cat([request.block_ids[:depth], torch.tensor([anchor])])
            drafted = drafter.draft([committed], [request.start], [cache])
            torch.testing.assert_close(block, drafted[0], atol=1e-6, rtol=0)
            # what the worker leaves behind is what drafting would have: the keys of committed tokens
            for mine, theirs in zip(request.cache.layers, cache.layers, strict=True):
                length = request.start + depth
                torch.testing.assert_close(mine.keys[:, :, :length], theirs.keys, atol=1e-6, rtol=0)
                torch.testing.assert_close(mine.values[:, :, :length], theirs.values, atol=1e-6, rtol=0)


@pytest.mark.parametrize("slot", range(BLOCK))
def test_no_branch_sees_the_drafts_that_it_replaces(learnt: Any, slot: int) -> None:
    drafter, text = learnt.drafter, torch.tensor(learnt.documents[0].token_ids)
    depths = [1, 2, 3, 4]

    def hidden(block_ids: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache(config=drafter.config)
        drafter.draft([text[:9]], [0], [cache])
        return drafter.draft_ahead([AheadRows(block_ids, 8, depths, [3, 3, 3, 3], cache)])[0]

    block = text[8 : 8 + BLOCK]
    changed = block.clone()
    changed[slot] = (changed[slot] + 1) % 60
    moved = (hidden(block) - hidden(changed)).abs().amax(dim=(1, 2))
    for depth, difference in zip(depths, moved.tolist(), strict=True):
        assert (difference > 0) == (slot < depth), (slot, depth)


def test_the_budget_counts_the_rows_of_a_pass(learnt: Any) -> None:
    logits_DV = torch.randn(BLOCK - 1, 64, generator=torch.Generator().manual_seed(0))
    drafts = logits_DV.max(dim=-1).indices.tolist()
    for coverage, fan_out in itertools.product(range(1, BLOCK + 1), (1, 2, 5)):
        budget = Budget(coverage, fan_out)
        plan = plan_branches(logits_DV, drafts, BLOCK, BLOCK, budget)
        assert plan.full and len(plan.branches) == (coverage - 1) * fan_out == len(set(plan.branches))
        assert BLOCK + (len(plan.branches) + plan.full) * BLOCK == budget.slots(BLOCK)
        for branch in plan.branches:
            assert branch.token != drafts[branch.accepted]
            better = (logits_DV[branch.accepted] > logits_DV[branch.accepted, branch.token]).sum()
            assert 1 <= better <= fan_out


def test_after_a_shortened_verification_the_draft_itself_may_follow() -> None:
    logits_DV = torch.eye(4)[[1, 2, 3, 0]]
    plan = plan_branches(logits_DV, [1, 2, 3, 0], 3, BLOCK, Budget(3, 1))
    # d_1 may be rejected; or d_1 and d_2 hold, and d_3 is what the target would say, too
    assert not plan.full and len(plan.branches) == 2
    assert plan.branches[0].accepted == 0 and plan.branches[0].token != 1
    assert plan.branches[1] == Branch(2, 3)
    assert plan_branches(logits_DV, [1, 2, 3, 0], 1, BLOCK, Budget(4, 1)).branches == [Branch(0, 1)]
    assert plan_branches(logits_DV, [1, 2, 3, 0], 3, BLOCK, Budget(1, 3)).branches == [Branch(2, 3)]
    assert plan_branches(logits_DV[:1], [1], 2, 2, Budget(1, 1)).full is False


def test_no_plan_exceeds_its_budget() -> None:
    logits_DV = torch.randn(BLOCK - 1, 64, generator=torch.Generator().manual_seed(0))
    drafts = logits_DV.max(dim=-1).indices.tolist()
    for coverage, fan_out, verify_len in itertools.product(range(1, BLOCK + 1), (1, 3), range(1, BLOCK + 1)):
        budget = Budget(coverage, fan_out)
        plan = plan_branches(logits_DV, drafts, verify_len, BLOCK, budget)
        assert verify_len + (len(plan.branches) + plan.full) * BLOCK <= budget.slots(BLOCK)
        assert plan.full == (verify_len == BLOCK)
        assert all(branch.accepted < verify_len for branch in plan.branches)
        if verify_len < BLOCK:
            assert any(branch.accepted == verify_len - 1 for branch in plan.branches)


@pytest.mark.parametrize(
    ("budget", "field"),
    [
        (Budget(0, 1), "coverage"),
        (Budget(6, 1), "coverage"),
        (Budget(5, 0), "fan_out"),
        (Budget(5, 64), "fan_out"),
    ],
)
def test_an_impossible_budget_names_its_field(budget: Budget, field: str) -> None:
    with pytest.raises(UserError, match=f"lookahead.{field}"):
        budget.check(BLOCK, 64)


def head_policy(drafter: D3DDrafter) -> LengthPolicy:
    torch.manual_seed(0)
    return AdaFlashPolicy(LengthHead(drafter.config.hidden_size, 8), gamma=1.3)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("budget", [Budget(1, 1), Budget(3, 1), Budget(BLOCK, 3)])
@pytest.mark.parametrize("policy", ["whole", "fixed_3", "fixed_1", "head"])
def test_greedy_output_is_the_targets_own(learnt: Any, policy: str, budget: Budget, batch: int) -> None:
    policies = {
        "whole": FixedPolicy(),
        "fixed_3": FixedPolicy(3),
        "fixed_1": FixedPolicy(1),
        "head": head_policy(learnt.drafter),
    }
    serving = ServingDrafter(learnt.drafter, policies[policy], "v")
    documents = learnt.documents[2:]
    sessions = sessions_of(learnt, documents, limit=20)
    with Lookahead(budget) as lookahead:
        run(sessions, serving, lookahead, batch)
    assert [s.output_ids for s in sessions] == [response(d)[:20] for d in documents]
    used = sum(r.prepared for s in sessions for r in s.rounds)
    assert used == lookahead.stats.hits < lookahead.stats.rounds
    assert lookahead.stats.rounds == sum(len(s.rounds) - 1 for s in sessions)
    if budget.fan_out > 1:
        assert used > 0


def test_hits_do_not_change_the_rounds_except_after_full_acceptance(learnt: Any, widest: Lookahead) -> None:
    """Sync and async commit the same rounds as long as no block was prepared for full acceptance."""
    serving = ServingDrafter(learnt.drafter, FixedPolicy(), "v")
    plain, ahead = sessions_of(learnt, learnt.documents), sessions_of(learnt, learnt.documents)
    run(plain, serving, None)
    run(ahead, serving, widest)
    same, kinds = 0, set()
    for one, other in zip(plain, ahead, strict=True):
        for mine, theirs in zip(one.rounds, other.rounds, strict=False):
            if len(theirs.draft_ids) < BLOCK - 1:
                assert theirs.prepared
                kinds.add("full")
                break
            assert (mine.start, mine.accepted, mine.draft_ids) == (
                theirs.start,
                theirs.accepted,
                theirs.draft_ids,
            )
            kinds.add("hit" if theirs.prepared else "miss")
            same += 1
    assert same > 15 and kinds == {"hit", "miss", "full"}
    stats = widest.stats
    assert stats.full >= stats.full_hits > 0 and stats.hits > stats.full_hits
    assert sum(o.rank is None for o in stats.outcomes) == stats.full
    rejected = [o for o in stats.outcomes if o.rank is not None]
    assert sum(o.rank < 3 for o in rejected if o.rank is not None) == stats.hits - stats.full_hits


def test_end_of_text_inside_a_block_and_the_length_limit(learnt: Any, widest: Lookahead) -> None:
    serving = ServingDrafter(learnt.drafter, FixedPolicy(), "v")
    ends = set()
    for position in range(2, 12):
        for limit in (position, 40):
            eos = response(learnt.documents[1])[position]
            sessions = sessions_of(learnt, learnt.documents, limit=limit, eos_ids=[eos])
            run(sessions, serving, widest)
            for session, document in zip(sessions, learnt.documents, strict=True):
                expected = response(document)[:limit]
                if eos in expected:
                    expected = expected[: expected.index(eos) + 1]
                assert session.output_ids == expected
                if not session.rounds:
                    continue
                last = session.rounds[-1]
                ends.add((session.finish_reason, last.committed <= last.accepted, last.prepared))
    # ended by EOS and by the limit, on a token of the middle of a block and on the target's own, in both kinds of block
    assert len(ends) == 8


def test_a_swap_drops_what_the_old_drafter_prepared(learnt: Any, widest: Lookahead) -> None:
    other = copy.deepcopy(learnt.drafter)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.05)
    servings = [ServingDrafter(d, FixedPolicy(), v) for d, v in ((learnt.drafter, "a"), (other, "b"))]
    (session,) = sessions_of(learnt, learnt.documents[:1])
    session.prefill()
    while not session.finished:
        session.step(servings[len(session.rounds) // 3 % 2], lookahead=widest)
    assert session.output_ids == response(learnt.documents[0])
    first = [
        r.prepared
        for before, r in itertools.pairwise(session.rounds)
        if before.drafter_version != r.drafter_version
    ]
    assert len(first) > 1 and not any(first)
    assert any(r.prepared for r in session.rounds)


def test_when_the_target_fails_the_worker_has_let_go_of_the_caches(
    learnt: Any, widest: Lookahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = ServingDrafter(learnt.drafter, FixedPolicy(), "v")
    (session,) = sessions_of(learnt, learnt.documents[:1])
    session.prefill()
    session.step(serving, lookahead=widest)
    started = []
    real = widest.start

    def start(*args: Any) -> Any:
        started.append(real(*args))
        return started[-1]

    monkeypatch.setattr(widest, "start", start)
    monkeypatch.setattr(learnt.target, "forward_cached", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError):
        session.step(serving, lookahead=widest)
    assert started[0].done()


def test_after_a_failure_of_the_worker_requests_draft_without(
    learnt: Any, widest: Lookahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every third pass, after it has changed the caches."""
    real, passes = learnt.drafter.draft_ahead, itertools.count()

    def draft_ahead(requests: Sequence[AheadRows]) -> list[torch.Tensor]:
        blocks = real(requests)
        if next(passes) % 3 == 2:
            raise MemoryError("no room for so many rows")
        return blocks

    monkeypatch.setattr(learnt.drafter, "draft_ahead", draft_ahead)
    sessions = sessions_of(learnt, learnt.documents)
    run(sessions, ServingDrafter(learnt.drafter, FixedPolicy(), "v"), widest)
    assert [s.output_ids for s in sessions] == [response(d) for d in learnt.documents]
    assert widest.stats.failures > 1 and widest.stats.hits > 1


def test_sampled_requests_do_not_feel_their_neighbours(learnt: Any) -> None:
    """Seeds decide, alone and in a batch of four, with blocks prepared and without."""
    serving = ServingDrafter(learnt.drafter, FixedPolicy(), "v", "sample")

    def sampled(batch: int, lookahead: Lookahead | None) -> list[list[int]]:
        sessions = [
            DecodingSession(
                learnt.target,
                d.token_ids[: d.response_mask.index(True)],
                sampling=SamplingParams(temperature=0.5, seed=i),
                max_new_tokens=20,
            )
            for i, d in enumerate(learnt.documents)
        ]
        run(sessions, serving, lookahead, batch)
        return [session.output_ids for session in sessions]

    with Lookahead(Budget(BLOCK, 3)) as lookahead:
        alone = sampled(1, lookahead)
        assert lookahead.stats.hits > 0
        assert sampled(4, lookahead) == alone
    assert alone != [response(d)[:20] for d in learnt.documents], "something was really sampled"


class Oracle:
    """Walks through every way that a run's random decisions can go, one run for each."""

    def __init__(self) -> None:
        self.pending: list[list[int]] = [[]]

    def runs(self) -> Iterator[None]:
        while self.pending:
            self.script = self.pending.pop()
            self.taken = 0
            self.chance = 1.0
            yield

    def choose(self, weights: Sequence[float]) -> int:
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        if self.taken == len(self.script):
            for other in possible[1:]:
                self.pending.append([*self.script, other])
            self.script = [*self.script, possible[0]]
        index = self.script[self.taken]
        self.taken += 1
        self.chance *= weights[index]
        return index


def ways(
    drafts: Sequence[int], p_LV: torch.Tensor, q_LV: torch.Tensor | None
) -> Iterator[tuple[Verification, float]]:
    """Every outcome of `verify_sampling` and its probability; that function is compared with this law elsewhere."""
    reach = 1.0
    for j, token in enumerate(drafts):
        q_V = torch.eye(p_LV.shape[1])[token].double() if q_LV is None else q_LV[j].double()
        accept = min(1.0, float(p_LV[j, token]) / float(q_V[token]))
        rest_V = (p_LV[j].double() - q_V).clamp_min(0)
        if accept < 1:
            for other, weight in enumerate((rest_V / rest_V.sum()).tolist()):
                yield Verification(j, other), reach * (1 - accept) * weight
        reach *= accept
    for other, weight in enumerate(p_LV[len(drafts)].tolist()):
        yield Verification(len(drafts), other), reach * weight


@pytest.mark.parametrize("draft_sampling", ["argmax", "sample"])
@pytest.mark.parametrize("policy", [FixedPolicy(), FixedPolicy(2)], ids=["whole", "two"])
def test_sampled_output_has_the_targets_distribution(
    draft_sampling: Any,
    policy: FixedPolicy,
    monkeypatch: pytest.MonkeyPatch,
    make_target: Callable[..., Target],
    generate: Callable[..., list[int]],
    make_document: Callable[..., Document],
) -> None:
    """Whole requests, every draw and every outcome: two or three rounds, prepared and drafted ones among them."""
    vocab, sampling = 6, SamplingParams(temperature=1.2, top_k=2, seed=0)
    target = make_target("qwen3", torch.float64, vocab=vocab)
    config = copy.deepcopy(target.config)
    config.d3d_config = {"block_size": 3, "mask_token_id": vocab - 1}
    lm = AutoModelForCausalLM.from_config(config).double()
    lm.load_state_dict(target.model.state_dict())
    drafter = D3DDrafter(lm.eval())
    # the first token is the prefill's: five leave room for a round that accepts everything and one after it
    prompt, length = [1, 2, 0, 3], 4 if (draft_sampling, policy.length) == ("sample", 2) else 5
    prefixes = [[*prompt, *more] for n in range(3) for more in itertools.product(range(vocab), repeat=n)]
    texts = [make_document(prefix, generate(target, prefix, 8)) for prefix in prefixes]
    batch = pack_documents(texts, anchors_per_document=0, anchor_source="all")
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        d3d_loss(drafter(batch), drafter.head_VH, batch, LossSpec()).value.backward()
        optimizer.step()
    serving = ServingDrafter(drafter.requires_grad_(False), policy, "v", draft_sampling)
    oracle = Oracle()

    def draw(probs: torch.Tensor, count: int, **_: Any) -> torch.Tensor:
        rows = probs if probs.ndim == 2 else probs[None]
        picked = [oracle.choose(row.tolist()) for row in rows]
        return torch.tensor(picked)[:, None] if probs.ndim == 2 else torch.tensor(picked)

    def verify(drafts: torch.Tensor, p_LV: torch.Tensor, q_LV: torch.Tensor | None, _: Any) -> Verification:
        if not len(drafts):
            return verify_sampling(drafts, p_LV, q_LV)
        options = list(ways(drafts.tolist(), p_LV, q_LV))
        return options[oracle.choose([chance for _, chance in options])][0]

    result: dict[tuple[int, ...], float] = defaultdict(float)
    monkeypatch.setattr(torch, "multinomial", draw)
    monkeypatch.setattr(decoding, "verify_sampling", verify)
    with Lookahead(Budget(3, 1)) as lookahead:
        for _ in oracle.runs():
            session = DecodingSession(target, prompt, sampling=sampling, max_new_tokens=length)
            session.run(serving, lookahead)
            result[tuple(session.output_ids)] += oracle.chance
        stats = lookahead.stats
    assert 0 < stats.hits < stats.rounds
    if policy.length is None:
        assert 0 < stats.full_hits < stats.full
    assert sum(result.values()) == pytest.approx(1)

    def text_probability(tokens: tuple[int, ...]) -> float:
        with torch.no_grad():
            probs = warp(target.model(torch.tensor([[*prompt, *tokens]])).logits[0], sampling)
        rows = range(len(prompt) - 1, len(prompt) - 1 + len(tokens))
        chance = 1.0
        for row, token in zip(rows, tokens, strict=True):
            chance *= float(probs[row, token])
        return chance

    for tokens, chance in result.items():
        assert chance == pytest.approx(text_probability(tokens), abs=1e-6)


def test_the_estimate_is_what_the_rounds_would_have_taken() -> None:
    """Rounds gone through one by one, by times that are written down here and not interpolated."""
    generator = torch.Generator().manual_seed(0)
    outcomes = [
        RoundOutcome(int(a), None if a == 3 else int(r))
        for a, r in torch.randint(0, 4, (200, 2), generator=generator)
    ]
    plain = RoundCost(0, verify_s=1.0, ahead_s=0.0, draft_s=0.4, tokens=2.5)
    # on its part of the cores the target is slower from the narrowest budget on
    ahead = [
        RoundCost(8, verify_s=1.6, ahead_s=0.5, draft_s=0.6, tokens=2.4),
        RoundCost(24, verify_s=1.6, ahead_s=1.3, draft_s=0.6, tokens=2.4),
        RoundCost(40, verify_s=1.6, ahead_s=2.9, draft_s=0.6, tokens=2.4),
    ]
    estimates = estimate_budgets(outcomes, plain, ahead, full_hit_rate=1.0, block_size=4, widest=Budget(4, 3))
    by_budget = {estimate.budget: estimate for estimate in estimates}
    assert by_budget[None].round_s == 1.4 and by_budget[None].token_s == 1.4 / 2.5
    # rows of B[(C-1)F+2], and the longer of verification and preparation there
    written = {
        Budget(1, 1): (8, 1.6),
        Budget(2, 1): (12, 1.6),
        Budget(2, 2): (16, 1.6),
        Budget(2, 3): (20, 1.6),
        Budget(3, 1): (16, 1.6),
        Budget(3, 2): (24, 1.6),
        Budget(3, 3): (32, 2.1),
        Budget(4, 1): (20, 1.6),
        Budget(4, 2): (32, 2.1),
        Budget(4, 3): (44, 2.9 * 44 / 40),
    }
    assert set(by_budget) == {None, *written}
    for budget, (slots, passes) in written.items():
        assert budget.slots(4) == slots
        seconds = []
        for outcome in outcomes:
            hit = outcome.rank is None or (
                outcome.accepted + 1 < budget.coverage and outcome.rank < budget.fan_out
            )
            seconds.append(passes + (0.0 if hit else 0.6))
        assert by_budget[budget].round_s == pytest.approx(sum(seconds) / len(seconds))
        assert by_budget[budget].token_s == pytest.approx(by_budget[budget].round_s / 2.4)
    assert [e.token_s for e in estimates] == sorted(e.token_s for e in estimates)
    best = max((e for e in estimates if e.budget), key=lambda e: e.hit_rate)
    fastest = next(e for e in estimates if e.budget)
    assert best.round_s > fastest.round_s, "the highest hit rate is not the fastest here"
    assert estimates[0].budget is None, "and none is faster still"


def test_an_estimate_needs_outcomes_and_costs() -> None:
    cost = RoundCost(8, 1, 1, 1, 1)
    for outcomes, ahead in (([], [cost]), ([RoundOutcome(0, 0)], [])):
        with pytest.raises(ValueError, match="nothing to estimate"):
            estimate_budgets(outcomes, cost, ahead, full_hit_rate=1, block_size=4, widest=Budget(2, 1))

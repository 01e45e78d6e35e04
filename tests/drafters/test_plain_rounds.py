"""Rounds without drafting among others: the text stays the target's, and the drafter knows all of it when it drafts again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from drafters.branches import Budget
from drafters.decoding import DecodingSession, ServingDrafter, acceptance_length, decode_round
from drafters.fill import Drafter
from drafters.lookahead import Lookahead
from drafters.packing import Document
from drafters.policies import FixedPolicy, LengthPolicy, Load, RoundTiming
from drafters.replay import draft_all_anchors
from drafters.survival_policy import SurvivalPolicy
from drafters.target import Target
from drafters.throughput_policy import CALIBRATION_ROUNDS, ThroughputPolicy
from drafters.verify import SamplingParams
from tests.drafters.policy_samples import linear_costs, random_acceptance_head, settled_policy

BLOCK = 5


class Pattern:
    """Verifies whole blocks in the rounds that a pattern of d's and p's lets draft, and keeps what it is told."""

    name = "pattern"

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.asked: list[int] = []
        self.told: list[RoundTiming] = []

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        return torch.full((len(hidden_NBH),), BLOCK)

    def wants_draft(self, load: Load) -> bool:
        self.asked.append(load.running)
        return self.pattern[(len(self.asked) - 1) % len(self.pattern)] == "d"

    def observe(self, timing: RoundTiming) -> None:
        self.told.append(timing)


def sessions_of(target: Target, documents: Sequence[Document], **fields: Any) -> list[DecodingSession]:
    sessions = []
    for document in documents:
        prompt, output = document.prompt_and_output()
        options = {"sampling": SamplingParams(), "max_new_tokens": len(output), **fields}
        sessions.append(DecodingSession(target, prompt, **options))
    return sessions


def run(
    sessions: Sequence[DecodingSession], serving: ServingDrafter, lookahead: Lookahead | None = None
) -> int:
    rounds = 0
    while any(not s.finished for s in sessions):
        assert not decode_round([s for s in sessions if not s.finished], serving, lookahead=lookahead)
        rounds += 1
    return rounds


def subject(name: str, trained: Any, learnt: Any) -> tuple[Target, Drafter, list[Document]]:
    scene = trained if name == "dflash" else learnt
    return scene.target, scene.drafter, scene.documents


@pytest.mark.parametrize("family", ["dflash", "d3d"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("pattern", ["dp", "ppd", "ddpppppppp", "p"])
def test_gaps_change_neither_the_text_nor_later_drafts(
    pattern: str, batch: int, family: str, trained: Any, learnt: Any
) -> None:
    target, drafter, documents = subject(family, trained, learnt)
    sessions = sessions_of(target, documents[:batch])
    policy = Pattern(pattern)
    run(sessions, ServingDrafter(drafter, policy, "v1"))
    plain = drafted = 0
    for session, (document, anchors, drafts) in zip(
        sessions, draft_all_anchors(drafter, target, documents[:batch]), strict=True
    ):
        assert session.output_ids == document.prompt_and_output()[1]
        # as if it had drafted in every round
        expected = dict(zip(anchors, drafts.tolist(), strict=True))
        for record in session.rounds:
            if record.draft_ids:
                drafted += 1
                assert record.draft_ids == expected[record.start]
            else:
                plain += 1
                assert (record.verify_len, record.accepted, record.committed) == (1, 0, 1)
                assert not record.prepared
    assert plain and bool(drafted) == ("d" in pattern)
    if pattern == "p":
        assert acceptance_length(sessions) == 1.0


@pytest.mark.parametrize("pattern", ["ddp", "dpp"])
def test_gaps_between_rounds_that_were_drafted_ahead(pattern: str, learnt: Any) -> None:
    sessions = sessions_of(learnt.target, learnt.documents[:4])
    with Lookahead(Budget(BLOCK, 3)) as lookahead:
        run(sessions, ServingDrafter(learnt.drafter, Pattern(pattern), "v1"), lookahead)
        assert lookahead.stats.failures == 0
    for session, document in zip(sessions, learnt.documents, strict=False):
        assert session.output_ids == document.prompt_and_output()[1]
    prepared = sum(r.prepared for s in sessions for r in s.rounds)
    assert (prepared > 0) == (pattern == "ddp"), "a block that was prepared for a skipped round is stale"


@pytest.mark.parametrize("draft_sampling", ["argmax", "sample"])
def test_sampled_requests_go_through_plain_rounds(draft_sampling: Any, trained: Any) -> None:
    def sample(seed: int) -> list[int]:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        sessions = sessions_of(trained.target, trained.documents[:2], sampling=sampling, max_new_tokens=12)
        run(sessions, ServingDrafter(trained.drafter, Pattern("dpp"), "v1", draft_sampling))
        assert {bool(r.draft_ids) for s in sessions for r in s.rounds} == {True, False}
        return sessions[0].output_ids

    assert sample(1) == sample(1) != sample(2)


def policies() -> dict[str, LengthPolicy]:
    head = random_acceptance_head(32, BLOCK, seed=6, weight=0.3, bias=-1.0)
    costs = {"cheap": (0.05, 0.1), "dear": (0.8, 0.1), "never": (0.1, 90.0)}
    settled = {
        f"throughput-{name}": settled_policy(
            head, linear_costs(fixed=1.0, row=row, draft=draft, block_size=BLOCK), probe_every=5
        )
        for name, (row, draft) in costs.items()
    }
    return {
        "survival": SurvivalPolicy(head, 0.2),
        "throughput-new": ThroughputPolicy(head, probe_every=3),
        **settled,
    }


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("policy", list(policies()))
def test_greedy_output_is_the_targets_own(policy: str, batch: int, trained: Any) -> None:
    chosen = policies()[policy]
    sessions = sessions_of(trained.target, trained.documents[:batch])
    if policy.startswith("throughput-") and policy != "throughput-new":
        # the table keeps what it was given: how long rounds take on this machine is not the matter here
        chosen.observe = lambda timing: None  # type: ignore[attr-defined]
    run(sessions, ServingDrafter(trained.drafter, chosen, "v1"))
    for session, text in zip(sessions, trained.texts, strict=False):
        assert session.output_ids == text
    lengths = {r.verify_len for s in sessions for r in s.rounds if r.draft_ids}
    skipped = {not r.draft_ids for s in sessions for r in s.rounds}
    if policy in ("survival", "throughput-cheap"):
        assert len(lengths) >= 3, "the policy must really vary the length"
    if policy == "throughput-never":
        assert skipped == {True, False}, "plain rounds, and probes among them"


def test_what_a_policy_is_told(trained: Any) -> None:
    policy = Pattern("dddddppppppppd")
    sessions = sessions_of(trained.target, trained.documents[:3])
    serving = ServingDrafter(trained.drafter, policy, "v1")
    assert not decode_round(sessions[:2], serving)
    told, asked = policy.told, policy.asked
    assert not told and not asked, "a prompt's pass is no round"
    assert not decode_round(sessions, serving)
    assert not told, "nor is one that a new prompt is in"
    assert asked == [3]
    for _ in range(4):
        assert not decode_round(sessions, serving)
    assert [(t.requests, t.rows) for t in told] == [(3, 3 * BLOCK)] * 4
    # in its first round the third request's text was read, too
    assert [t.draft_s is None for t in told] == [True, False, False, False]
    assert all(t.verify_s > 0 for t in told)
    for _ in range(8):
        assert not decode_round(sessions, serving)
    assert [(t.requests, t.rows, t.draft_s) for t in told[4:]] == [(3, 3, None)] * 8
    # drafting after a gap longer than a block has more to read than usual
    assert not decode_round(sessions, serving)
    assert (told[-1].rows, told[-1].draft_s) == (3 * BLOCK, None)
    # the next one has not, so a probe of two rounds says what drafting costs
    assert not decode_round(sessions, serving)
    assert told[-1].draft_s is not None
    # and a failed round tells nothing
    before = len(told)
    sessions[1]._verify = None  # type: ignore[assignment, method-assign]
    assert list(decode_round(sessions, serving)) == [sessions[1]]
    assert len(told) == before


def test_policies_that_learn_really_do_so_in_rounds(trained: Any) -> None:
    policy = ThroughputPolicy(random_acceptance_head(32, BLOCK, seed=8, weight=0.3))
    sessions = sessions_of(trained.target, trained.documents[:2])
    run(sessions, ServingDrafter(trained.drafter, policy, "v1"))
    assert policy.costs.known
    assert policy.costs.observed >= CALIBRATION_ROUNDS
    (shortest, longest) = policy.costs.verify_s([2, 2 * BLOCK], 2)
    assert 0 < shortest <= longest < 60


def test_confidence_is_that_of_the_draft_logits(trained: Any) -> None:
    """Handed to policies that ask, and to no other."""

    class Keeping(FixedPolicy):
        seen: torch.Tensor | None = None

        def verify_len(
            self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load
        ) -> torch.Tensor:
            Keeping.seen = load.confidence_ND
            logits = hidden_NBH[:, 1:].double() @ trained.target.head_VH.double().T
            if load.confidence_ND is not None:
                best = logits.log_softmax(dim=-1).amax(dim=-1)
                torch.testing.assert_close(load.confidence_ND.double(), best, atol=1e-4, rtol=1e-4)
            return super().verify_len(hidden_NBH, embeddings_NBH, load)

    class Asking(Keeping):
        reads_confidence = True

    cases: tuple[tuple[LengthPolicy, bool], ...] = ((Keeping(), False), (Asking(), True))
    for policy, asks in cases:
        sessions = sessions_of(trained.target, trained.documents[:2])
        for _ in range(2):
            decode_round(sessions, ServingDrafter(trained.drafter, policy, "v1"))
        assert (Keeping.seen is not None) == asks

"""Losslessness of `survival` and `throughput` at temperatures above 0, by exact enumeration of one round of real sessions.

Every drawable block of drafts is decoded from the same state, with the probability that the drafter draws it, and every outcome
of verifying it is followed with its probability. What lengths were chosen is the policy's own doing.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters import decoding
from drafters.decoding import DecodingSession, ServingDrafter, decode_round
from drafters.dflash import DFlashDrafter
from drafters.policies import FixedPolicy, LengthPolicy, Load
from drafters.survival_policy import SurvivalPolicy
from drafters.target import Target
from drafters.verify import SamplingParams, Verification, warp
from tests.drafters.policy_samples import linear_costs, random_acceptance_head, settled_policy
from tests.drafters.test_verify_exact import Distribution, outcomes

VOCAB, BLOCK = 4, 4
PROMPTS = [[1, 2, 0, 3], [3, 3, 1]]
SAMPLING = SamplingParams(temperature=0.8, seed=0)

Script = dict[DecodingSession, tuple[int, ...]]


def enumerate_round(
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    drafter: DFlashDrafter,
    policy: LengthPolicy,
    draft_sampling: Any,
    prompts: list[list[int]],
    announce: Callable[[tuple[int, ...]], None] = lambda drafts: None,
) -> tuple[Distribution, set[int], int]:
    """(distribution of what the first session's round commits, verify_lens seen, its first token).

    The other sessions draw drafts of their own, different ones each time.
    """
    result: Distribution = defaultdict(float)
    lengths: set[int] = set()
    first_token = -1
    for number, drafts in enumerate(itertools.product(range(VOCAB), repeat=BLOCK - 1)):
        sessions = [DecodingSession(target, p, sampling=SAMPLING, max_new_tokens=20) for p in prompts]
        for session in sessions:
            session.prefill()
        first_token = sessions[0].tokens[-1]
        captured: list[Any] = []
        blocks = [drafts, *[tuple((number * 7 + i) % VOCAB for i in range(BLOCK - 1))] * (len(prompts) - 1)]
        drawn = iter(blocks)
        chances: list[float] = []

        def draw(probs: torch.Tensor, count: int, **_: Any) -> torch.Tensor:
            tokens = torch.tensor(next(drawn))[:, None]  # noqa: B023
            chances.append(float(probs.gather(1, tokens).prod()))  # noqa: B023
            return tokens

        def capture(*args: Any) -> Verification:
            captured.append(args)  # noqa: B023
            return Verification(0, 0)

        announce(drafts)
        # what a policy learns from this branch must not reach another
        serving = ServingDrafter(drafter, copy.deepcopy(policy), "v1", draft_sampling)
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "verify_sampling", capture)
            patch.setattr(torch, "multinomial", draw)
            assert decode_round(sessions, serving) == {}
        record = sessions[0].rounds[-1]
        # drafts that are the likeliest, or none, are the same in every branch
        certain = draft_sampling == "argmax" or not record.draft_ids
        drafts = tuple(record.draft_ids) if certain else drafts
        verified, p_LV, q_LV, _ = captured[0]
        assert verified.tolist() == list(drafts[: record.verify_len - 1])
        chance = 1.0 if certain else chances[0]
        lengths.add(record.verify_len)
        if chance:
            for accepted, token, probability in outcomes(monkeypatch, verified.tolist(), p_LV, q_LV):
                result[(*drafts[:accepted], token)] += chance * probability
        if certain:
            break
    return result, lengths, first_token


def worst_error(target: Target, prompt: list[int], got: Distribution, first_token: int) -> float:
    """Largest difference of the probability of any next two tokens from the target's own."""

    def truth(tail: tuple[int, ...]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, first_token, *tail]])
        with torch.no_grad():
            return warp(target.model(ids).logits[0, -1:], SAMPLING)[0]

    errors = [abs(sum(got.values()) - 1)]
    for a, b in itertools.product(range(VOCAB), repeat=2):
        mass = 0.0
        for committed, probability in got.items():
            if committed[:2] == (a, b):
                mass += probability
            elif committed == (a,):
                mass += probability * float(truth((a,))[b])
        errors.append(abs(mass - float(truth(())[a]) * float(truth((a,))[b])))
    return max(errors)


@pytest.fixture
def target(make_target: Callable[..., Target]) -> Target:
    return make_target("qwen3", torch.float64, vocab=VOCAB)


@pytest.fixture
def drafter(target: Target, make_drafter: Callable[..., DFlashDrafter]) -> DFlashDrafter:
    return make_drafter(target, block_size=BLOCK, mask_token_id=VOCAB - 1, seed=4)


def make(name: str, row: float) -> LengthPolicy:
    head = random_acceptance_head(32, BLOCK, seed=8, weight=0.3)
    if name == "survival":
        return SurvivalPolicy(head, row)
    costs = linear_costs(fixed=1.0, row=row, draft=0.2, block_size=BLOCK)
    return settled_policy(head, costs)


# name, threshold or seconds of a row, and the lengths of the two requests that follow
CASES = {
    "survival-low": ("survival", 0.02, [3, 4]),
    "survival-high": ("survival", 0.5, [2, 3]),
    "throughput-cheap-rows": ("throughput", 0.1, [2, 4]),
    "throughput-dear-rows": ("throughput", 1.0, [1, 2]),
}


@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
@pytest.mark.parametrize("case", CASES)
def test_the_targets_distribution_is_kept(
    case: str,
    draft_sampling: str,
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    drafter: DFlashDrafter,
) -> None:
    """Two requests together, so that under `throughput` the lengths of one depend on the other."""
    name, setting, expected = CASES[case]
    for prompts, length in ((PROMPTS, expected[0]), (PROMPTS[::-1], expected[1])):
        got, lengths, token = enumerate_round(
            monkeypatch, target, drafter, make(name, setting), draft_sampling, prompts
        )
        assert lengths == {length}, "drawn drafts must not move the length"
        assert worst_error(target, prompts[0], got, token) < 1e-9


def test_a_round_without_drafting_keeps_it_too(
    monkeypatch: pytest.MonkeyPatch, target: Target, drafter: DFlashDrafter
) -> None:
    policy = make("throughput", 0.01)
    monkeypatch.setattr(type(policy), "wants_draft", lambda self, load: False)
    got, lengths, token = enumerate_round(monkeypatch, target, drafter, policy, "sample", PROMPTS)
    assert lengths == {1}
    assert worst_error(target, PROMPTS[0], got, token) < 1e-9


class Peeking(FixedPolicy):
    """Knows the drafts that will be drawn, and does not let the first one be verified if it is 0."""

    drafts: tuple[int, ...] = ()

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        length = 1 if Peeking.drafts[0] == 0 else BLOCK
        return torch.full((len(hidden_NBH),), length)


def test_this_enumeration_would_notice(
    monkeypatch: pytest.MonkeyPatch, target: Target, drafter: DFlashDrafter
) -> None:
    def announce(drafts: tuple[int, ...]) -> None:
        Peeking.drafts = drafts

    got, _, token = enumerate_round(monkeypatch, target, drafter, Peeking(), "sample", PROMPTS[:1], announce)
    assert worst_error(target, PROMPTS[0], got, token) > 0.005

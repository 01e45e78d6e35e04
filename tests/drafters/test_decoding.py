"""The decoding loop gives exactly the target's own greedy text, and books every round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from drafters.decoding import DecodingSession, ServingDrafter
from drafters.dflash import DFlashDrafter
from drafters.errors import UserError
from drafters.length_head import LengthHead
from drafters.policies import AdaFlashPolicy, FixedPolicy, LengthPolicy, Load
from drafters.replay import draft_all_anchors
from drafters.target import Target
from drafters.verify import SamplingParams

BLOCK = 5


def start(trained: Any, index: int, max_new_tokens: int, eos_ids: Sequence[int] = ()) -> DecodingSession:
    return DecodingSession(
        trained.target,
        trained.prompts[index],
        sampling=SamplingParams(),
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
    )


def random_head(seed: int, features: str) -> LengthHead:
    """A head whose answers vary over the whole range."""
    generator = torch.Generator().manual_seed(seed)
    head = LengthHead(32, 8, features)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5)
    return head


POLICIES: dict[str, LengthPolicy] = {
    **{f"fixed-{n}": FixedPolicy(n) for n in range(1, BLOCK + 1)},
    "full": FixedPolicy(),
    "adaflash-hidden": AdaFlashPolicy(random_head(0, "hidden")),
    "adaflash-embedding": AdaFlashPolicy(random_head(0, "embedding"), gamma=1.3),
}


def assert_consistent(session: DecodingSession) -> None:
    position = session.prompt_length
    for i, record in enumerate(session.rounds):
        assert record.start == position, "the anchor is the last committed token"
        assert 1 <= record.verify_len <= BLOCK
        assert 0 <= record.accepted < record.verify_len
        assert len(record.draft_ids) == BLOCK - 1
        last = i == len(session.rounds) - 1
        assert record.committed == record.accepted + 1 or (last and record.committed <= record.accepted)
        served = session.tokens[position + 1 : position + 1 + record.committed]
        kept = min(record.accepted, record.committed)
        assert record.draft_ids[:kept] == served[:kept]
        position += record.committed
    assert position == len(session.tokens) - 1


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_the_targets_own(trained: Any, policy: str) -> None:
    lengths = set()
    for index, text in enumerate(trained.texts):
        session = start(trained, index, len(text))
        assert session.run(ServingDrafter(trained.drafter, POLICIES[policy], "v1")) == text
        assert session.finish_reason == "length"
        assert_consistent(session)
        lengths |= {r.verify_len for r in session.rounds}
    if policy.startswith("adaflash"):
        assert len(lengths) >= 3, "the head must really vary the length"
    else:
        assert lengths == {POLICIES[policy].length or BLOCK}  # type: ignore[attr-defined]


def test_prefix_of_the_text_at_every_length_limit(trained: Any) -> None:
    text = trained.texts[0]
    for limit in range(1, 16):
        session = start(trained, 0, limit)
        assert session.run(ServingDrafter(trained.drafter, FixedPolicy(), "v1")) == text[:limit]
        assert_consistent(session)


def test_end_of_text_inside_a_block(
    trained: Any, kind: str, eos_case: Callable[[str], tuple[int, int]], generate: Callable[..., list[int]]
) -> None:
    index, eos = eos_case(kind)
    expected = generate(trained.target, trained.prompts[index], 40, [eos])
    assert expected[-1] == eos
    assert len(expected) < 40
    session = start(trained, index, 40, [eos, 1000])
    assert session.run(ServingDrafter(trained.drafter, FixedPolicy(), "v1")) == expected
    assert session.finish_reason == "stop"
    assert_consistent(session)
    assert session.rounds[-1].committed < session.rounds[-1].accepted + 1


def test_end_of_text_in_the_prefill_and_at_the_limit(trained: Any) -> None:
    first = trained.texts[0][0]
    session = start(trained, 0, 40, [first])
    assert session.run(ServingDrafter(trained.drafter, FixedPolicy(), "v1")) == [first]
    assert (session.finish_reason, session.rounds) == ("stop", [])
    session = start(trained, 0, 1)
    assert session.run(ServingDrafter(trained.drafter, FixedPolicy(), "v1")) == [first]
    assert (session.finish_reason, session.rounds) == ("length", [])


@pytest.mark.parametrize("period", [1, 3])
def test_a_swap_between_any_two_rounds_changes_no_token(
    trained: Any, period: int, make_drafter: Callable[..., DFlashDrafter]
) -> None:
    other = make_drafter(trained.target, seed=9, num_layers=1)
    versions = [
        ServingDrafter(trained.drafter, FixedPolicy(), "trained"),
        ServingDrafter(other, FixedPolicy(), "other"),
    ]
    for index in (0, 1):
        session = start(trained, index, 40)
        session.prefill()
        turn = 0
        while not session.finished:
            serving = versions[turn // period % 2]
            assert session.step(serving).drafter_version == serving.drafter_version
            turn += 1
        assert session.output_ids == trained.texts[index]
        assert_consistent(session)
        assert turn > 5
        # each version drafts as if it had served alone: nothing of the other is left in its context
        for serving in versions:
            ((_, anchors, drafts),) = draft_all_anchors(
                serving.drafter, trained.target, [trained.documents[index]]
            )
            expected = dict(zip(anchors, drafts.tolist(), strict=True))
            for record in session.rounds:
                if record.drafter_version == serving.drafter_version:
                    assert record.draft_ids == expected[record.start]


def test_a_swap_may_change_the_block_size(trained: Any, make_drafter: Callable[..., DFlashDrafter]) -> None:
    versions = [
        ServingDrafter(trained.drafter, FixedPolicy(), "five"),
        ServingDrafter(make_drafter(trained.target, seed=9, block_size=3), FixedPolicy(), "three"),
    ]
    session = start(trained, 0, 40)
    session.prefill()
    while not session.finished:
        session.step(versions[len(session.rounds) % 2])
    assert session.output_ids == trained.texts[0]
    assert {len(r.draft_ids) for r in session.rounds} == {4, 2}


def test_the_policy_is_told_the_load(trained: Any) -> None:
    policy = AdaFlashPolicy(random_head(0, "hidden"), gamma=0.0, off_below_load=4)
    session = start(trained, 0, 10)
    session.prefill()
    serving = ServingDrafter(trained.drafter, policy, "v1")
    assert session.step(serving).verify_len == BLOCK
    assert session.step(serving, Load(running=4)).verify_len == 1


def test_sampling_follows_the_seed(trained: Any) -> None:
    def sample(seed: int | None, draft_sampling: str) -> list[int]:
        session = DecodingSession(
            trained.target,
            trained.prompts[0],
            sampling=SamplingParams(temperature=1.0, seed=seed),
            max_new_tokens=12,
        )
        session.run(ServingDrafter(trained.drafter, FixedPolicy(), "v1", draft_sampling))  # type: ignore[arg-type]
        assert_consistent(session)
        return session.output_ids

    for draft_sampling in ("argmax", "sample"):
        assert sample(1, draft_sampling) == sample(1, draft_sampling)
        assert sample(1, draft_sampling) != sample(2, draft_sampling)
        assert sample(None, draft_sampling) != sample(None, draft_sampling)


def test_bad_requests_are_refused(trained: Any, make_target: Callable[..., Target]) -> None:
    target = make_target()
    for prompt, new, message in (
        ([], 5, "empty"),
        ([1], 0, "max_new_tokens"),
        ([1] * 250, 7, "context of 256"),
    ):
        with pytest.raises(UserError, match=message):
            DecodingSession(target, prompt, sampling=SamplingParams(), max_new_tokens=new)

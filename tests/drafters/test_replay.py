"""Replay τ against real greedy decoding, and the walk itself against hand-written rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from drafters import replay as replay_module
from drafters.decoding import DecodingSession, ServingDrafter, acceptance_length
from drafters.packing import Document
from drafters.policies import FixedPolicy
from drafters.replay import (
    ReplayResult,
    iterate_packs,
    position_acceptance,
    replay,
    response_spans,
    total_acceptance_length,
    walk_rounds,
)
from drafters.verify import SamplingParams


def decode(
    trained: Any, prompt: list[int], max_new_tokens: int, eos_ids: Sequence[int] = ()
) -> DecodingSession:
    session = DecodingSession(
        trained.target, prompt, sampling=SamplingParams(), max_new_tokens=max_new_tokens, eos_ids=eos_ids
    )
    session.run(ServingDrafter(trained.drafter, FixedPolicy(), "v1"))
    return session


def as_document(session: DecodingSession, name: str) -> Document:
    length = len(session.tokens)
    return Document(
        session.tokens, [i >= session.prompt_length for i in range(length)], name, domain=f"of-{name}"
    )


def assert_same_rounds(result: ReplayResult, session: DecodingSession) -> None:
    assert result.round_starts == [r.start for r in session.rounds]
    assert result.committed == sum(r.committed for r in session.rounds) == len(session.output_ids) - 1
    last = len(session.tokens) - 1
    # in the last round serving may accept drafts past the end of the text, which nobody keeps
    assert result.accepted_per_round == [min(r.accepted, last - r.start) for r in session.rounds]
    assert result.rounds == len(session.rounds)


@pytest.mark.parametrize(("tokens_per_pass", "blocks_per_pass"), [(1024, 512), (100, 7), (1, 1)])
def test_replay_equals_greedy_decoding(
    trained: Any,
    eos_case: Callable[[str], tuple[int, int]],
    kind: str,
    tokens_per_pass: int,
    blocks_per_pass: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_module, "REPLAY_TOKENS", tokens_per_pass)
    monkeypatch.setattr(replay_module, "REPLAY_BLOCKS", blocks_per_pass)
    index, eos = eos_case(kind)
    sessions = [decode(trained, prompt, 13 + i) for i, prompt in enumerate(trained.prompts[:4])]
    sessions.append(decode(trained, trained.prompts[index], 40, [eos]))
    sessions.append(decode(trained, trained.prompts[0], 1))  # a single token: no round at all
    sessions.append(decode(trained, trained.prompts[1], 2))
    assert {s.finish_reason for s in sessions} == {"stop", "length"}
    results = replay(
        trained.drafter, trained.target, [as_document(s, f"d{i}") for i, s in enumerate(sessions)]
    )
    assert [(r.document_id, r.domain) for r in results] == [(f"d{i}", f"of-d{i}") for i in range(7)]
    for result, session in zip(results, sessions, strict=True):
        assert_same_rounds(result, session)
    assert math.isnan(results[5].acceptance_length)
    assert results[6].acceptance_length == 1
    assert total_acceptance_length(results) == pytest.approx(acceptance_length(sessions))
    assert total_acceptance_length(results) > 1.3, "the comparison needs accepted drafts"


def test_replay_does_not_depend_on_the_length_policy(trained: Any) -> None:
    """Serving with short verification walks other rounds, yet the text, and so its replay, is the same."""
    full = decode(trained, trained.prompts[0], 30)
    session = DecodingSession(
        trained.target, trained.prompts[0], sampling=SamplingParams(), max_new_tokens=30
    )
    session.run(ServingDrafter(trained.drafter, FixedPolicy(2), "v1"))
    assert len(session.rounds) > len(full.rounds)
    (result,) = replay(trained.drafter, trained.target, [as_document(session, "d")])
    assert_same_rounds(result, full)


def test_documents_without_anchors_replay_to_nothing(trained: Any) -> None:
    documents = [Document([1, 2, 3], [False, False, True], "one"), Document([1], [False], "none")]
    results = replay(trained.drafter, trained.target, documents)
    assert [(r.rounds, r.committed) for r in results] == [(0, 0), (0, 0)]
    assert math.isnan(total_acceptance_length(results))


def test_rounds_are_walked_by_hand() -> None:
    # prompt 0 1, response 10..19; the drafts at each anchor match the given number of tokens
    tokens = [0, 1, *range(10, 20)]
    document = Document(tokens, [i >= 2 for i in range(12)], "d")
    matching = {2: 1, 4: 3, 8: 0, 9: 3}
    anchors = document.anchor_positions()
    drafts = torch.full((len(anchors), 3), -1)
    for row, anchor in enumerate(anchors):
        for j in range(matching.get(anchor, 0)):
            if anchor + 1 + j < 12:
                drafts[row, j] = tokens[anchor + 1 + j]
    result = walk_rounds(document, anchors, drafts, 4)
    assert result.round_starts == [2, 4, 8, 9]
    # the last round could accept three, but the text ends after two more tokens
    assert result.accepted_per_round == [1, 3, 0, 2]
    assert (result.committed, result.rounds) == (9, 4)
    assert result.acceptance_length == 9 / 4
    assert result.reached_B == [0, 4, 3, 1]
    assert result.matched_B == [0, 3, 2, 1]
    assert position_acceptance([result]) == [3 / 4, 2 / 3, 1.0]


def test_a_match_after_a_mismatch_is_not_accepted() -> None:
    document = Document([0, 10, 11, 12, 13], [False, True, True, True, True], "d")
    drafts = torch.tensor([[99, 12, 13], [12, 99, -1], [13, -1, -1]])
    result = walk_rounds(document, [1, 2, 3], drafts, 4)
    assert result.accepted_per_round == [0, 1]
    assert result.round_starts == [1, 2]


def test_every_turn_of_a_conversation_starts_afresh() -> None:
    # two answers of three tokens: each has its own prefill token, never drafted
    document = Document(list(range(10)), [c == "#" for c in "..###..###"], "d")
    anchors = document.anchor_positions()
    assert anchors == [2, 3, 7, 8]
    drafts = torch.tensor([[3, 4, 5], [4, 5, 6], [0, 0, 0], [9, 0, 0]])
    result = walk_rounds(document, anchors, drafts, 4)
    assert result.round_starts == [2, 7, 8]
    assert result.accepted_per_round == [2, 0, 1]
    assert result.committed == 4


def test_response_spans() -> None:
    assert response_spans([False, True, True, False, True]) == [(1, 2), (4, 4)]
    assert response_spans([]) == []
    assert response_spans([True]) == [(0, 0)]


def test_packs_keep_order_and_size() -> None:
    documents = [Document([0] * n, [False] * n, f"d{n}") for n in (4, 4, 9, 1, 1, 7)]
    packs = list(iterate_packs(documents, 8))
    assert [[len(d.token_ids) for d in pack] for pack in packs] == [[4, 4], [9], [1, 1], [7]]


def test_aggregates_weigh_rounds_not_documents() -> None:
    results = [
        ReplayResult("a", "x", 4, 1, reached_B=[0, 1, 1], matched_B=[0, 1, 1]),
        ReplayResult("b", "x", 4, 4, reached_B=[0, 4, 0], matched_B=[0, 0, 0]),
    ]
    assert total_acceptance_length(results) == 8 / 5
    assert position_acceptance(results) == [1 / 5, 1.0]
    assert position_acceptance([]) == []

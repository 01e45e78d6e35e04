"""What an answer counts: rounds of records, sums of a server, slots, contexts."""

from __future__ import annotations

from typing import Any

import pytest

from drafters.errors import UserError
from pipeline.benchmark.answers import (
    Answer,
    Question,
    answer_from_record,
    answer_from_server,
    slot_counts,
    sums_by_context,
)
from serving_bridge.records import Round, Sampling, VerificationRecord

QUESTION = Question(
    document_id="d", turn=0, domain="math", language="x", prompt_ids=[1, 2, 3], max_new_tokens=9, seed=0
)


def record(output: int, rounds: list[tuple[int, int, int]], block_size: int = 4) -> VerificationRecord:
    """Rounds as (start, verify_len, accepted)."""
    return VerificationRecord(
        request_id="r",
        conversation_key="r",
        time=0.0,
        target_id="t",
        sampling=Sampling(temperature=0, top_p=1, top_k=0),
        prompt_ids=[1, 2, 3],
        output_ids=list(range(output)),
        rounds=[
            Round(start=s, drafter_version="v", verify_len=v, accepted=a, draft_ids=[0] * (block_size - 1))
            for s, v, a in rounds
        ],
        finish_reason="length",
        block_size=block_size,
    )


def test_rounds_with_drafts_and_without_add_up_to_the_text() -> None:
    # 8 tokens: the prefill's, 4 of a whole block, one decoded plainly, 2 of a block that the limit cut
    answer = answer_from_record(QUESTION, record(8, [(3, 4, 3), (8, 4, 3)]), 1.5, plain=False)
    assert (answer.committed, answer.rounds) == (7, 3)
    assert answer.accepted == [3, 2] and answer.verify_lens == [4, 4]
    # the second block's third slot lies past the end and says nothing
    assert slot_counts(answer) == ([2, 2, 1], [2, 2, 1])
    plain = answer_from_record(QUESTION, record(8, []), 1.0, plain=True)
    assert (plain.committed, plain.rounds, plain.block_size) == (7, 7, 1)
    one = answer_from_record(QUESTION, record(1, []), 1.0, plain=False)
    assert (one.committed, one.rounds) == (0, 0)


def test_a_slot_that_was_not_verified_was_not_reached() -> None:
    answer = answer_from_record(
        QUESTION, record(6, [(3, 2, 1), (5, 3, 0), (6, 1, 0), (7, 4, 1)]), 1, plain=False
    )
    # slot 1: three rounds verified it; slot 2: none, each time unverified, after a miss or past the end
    assert slot_counts(answer) == ([3, 0, 0], [2, 0, 0])


def test_contexts_are_those_of_rounds() -> None:
    answer = answer_from_record(
        QUESTION, record(12, [(3, 4, 3), (7, 4, 0), (8, 4, 2), (11, 4, 3)]), 1, plain=False
    )
    assert sums_by_context(answer, [7, 11]) == [(4, 1), (4, 2), (3, 1)]
    assert sums_by_context(answer, [100]) == [(11, 4), (0, 0)]


def server_answer(**meta: Any) -> dict[str, Any]:
    return {"output_ids": list(range(9)), "meta_info": {"finish_reason": {"type": "length"}, **meta}}


def test_a_server_tells_sums() -> None:
    found = answer_from_server(
        QUESTION,
        server_answer(spec_verify_ct=4, spec_accept_length=9 / 4, spec_correct_drafts_histogram=[2, 1, 0, 1]),
        2.0,
        block_size=4,
        url="u",
    )
    # not the server's own quotient, which counts the prefill's token
    assert (found.committed, found.rounds) == (8, 4)
    assert slot_counts(found) == ([4, 2, 1], [2, 1, 1])
    plain = answer_from_server(QUESTION, server_answer(), 2.0, block_size=1, url="u")
    assert (plain.committed, plain.rounds) == (8, 8)
    silent = answer_from_server(QUESTION, server_answer(spec_verify_ct=4), 2.0, block_size=4, url="u")
    assert slot_counts(silent) is None


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ({"text": "hello", "meta_info": {}}, "http://x: answers without token ids"),
        (
            server_answer(finish_reason={"type": "abort", "message": "no memory"}),
            r"gave up a request \(no memory\)",
        ),
        (server_answer(), "http://x: .* does not tell spec_verify_ct"),
    ],
)
def test_a_server_that_does_not_tell_enough(answer: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        answer_from_server(QUESTION, answer, 1.0, block_size=4, url="http://x")


def test_an_answer_of_one_token_has_no_rounds() -> None:
    answer = {"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}, "spec_verify_ct": 1}}
    found = answer_from_server(QUESTION, answer, 1.0, block_size=4, url="u")
    assert (found.committed, found.rounds, found.finish_reason) == (0, 0, "stop")


def test_an_answer_survives_its_file() -> None:
    import msgspec

    answer = answer_from_record(QUESTION, record(8, [(3, 4, 3)]), 1 / 3, plain=False)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=Answer) == answer

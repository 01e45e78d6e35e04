"""One answered turn: what was asked and said, the rounds behind it, and the time it took.

Whatever served it, τ counts alike: the prefill's token is committed by no round, a token decoded plainly is a round that commits
one. Shapes: B block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from drafters.errors import UserError
from serving_bridge.records import VerificationRecord


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of a conversation.

    committed, rounds: tokens committed after the prefill's, and verification rounds; τ is their quotient.
    seconds: from asking to the last token.
    starts, accepted, verify_lens: of each round with drafts that could commit something: anchor position in prompt and output
        together, accepted drafts inside the text, slots verified. Empty where the server does not tell.
    accepted_histogram: where it tells only this: rounds by number of accepted drafts.
    prepared: rounds whose block was drafted ahead.
    block_size: B; 1 for plain decoding.
    """

    document_id: str
    turn: int
    domain: str
    language: str
    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: Literal["stop", "length"]
    seconds: float
    committed: int
    rounds: int
    block_size: int
    starts: list[int] = []
    accepted: list[int] = []
    verify_lens: list[int] = []
    accepted_histogram: list[int] | None = None
    prepared: int = 0


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A turn to be answered, in token ids."""

    document_id: str
    turn: int
    domain: str
    language: str
    prompt_ids: list[int]
    max_new_tokens: int
    seed: int

    @property
    def request_id(self) -> str:
        return f"{self.document_id}#{self.turn}"


def answer_from_record(
    question: Question, record: VerificationRecord, seconds: float, *, plain: bool
) -> Answer:
    """An answer of the embedded engine."""
    last = len(record.prompt_ids) + len(record.output_ids) - 1
    rounds = [r for r in record.rounds if r.start < last]
    accepted = [min(r.accepted, last - r.start) for r in rounds]
    drafted = sum(min(r.accepted + 1, last - r.start) for r in rounds)
    committed = len(record.output_ids) - 1
    return _answer(
        question,
        record.output_ids,
        "stop" if record.finish_reason == "stop" else "length",
        seconds,
        committed=committed,
        # what no round with drafts committed was decoded plainly, token by token
        rounds=len(rounds) + committed - drafted,
        block_size=1 if plain else record.block_size,
        starts=[r.start for r in rounds],
        accepted=accepted,
        verify_lens=[r.verify_len for r in rounds],
        prepared=sum(r.prepared for r in rounds),
    )


def answer_from_server(
    question: Question, answer: dict[str, Any], seconds: float, *, block_size: int, url: str
) -> Answer:
    """An answer of an SGLang server, which tells sums only.

    Its own `spec_accept_length` counts the prefill's token, so τ is made from the counts.

    Raises:
        UserError: when it answers without token ids or counts.
    """
    meta = answer.get("meta_info") or {}
    output = answer.get("output_ids")
    if not isinstance(output, list) or not output:
        raise UserError(f"{url}: answers without token ids; start the server with --skip-tokenizer-init")
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise UserError(f"{url}: gave up a request ({reason.get('message') or 'no reason given'})")
    committed = len(output) - 1
    rounds = meta.get("spec_verify_ct") if committed else 0
    histogram = meta.get("spec_correct_drafts_histogram")
    if rounds is None:
        if block_size > 1 and committed:
            raise UserError(
                f"{url}: decodes speculatively but does not tell spec_verify_ct; use SGLang 0.5.23"
            )
        rounds = committed
    return _answer(
        question,
        output,
        "stop" if reason.get("type") == "stop" else "length",
        seconds,
        committed=committed,
        rounds=int(rounds),
        block_size=block_size,
        accepted_histogram=None if histogram is None else [int(n) for n in histogram],
    )


def slot_counts(answer: Answer) -> tuple[list[int], list[int]] | None:
    """(reached, accepted) of slots 1..B-1: rounds in which a slot was verified after all before it were accepted, and inside the
    text; and those of them in which it was accepted. None where the server does not tell.
    """
    drafts = answer.block_size - 1
    reached, accepted = [0] * drafts, [0] * drafts
    if answer.accepted_histogram is not None:
        for count, rounds in enumerate(answer.accepted_histogram[: drafts + 1]):
            for slot in range(min(count + 1, drafts)):
                reached[slot] += rounds
                accepted[slot] += rounds * (slot < count)
        return reached, accepted
    if drafts and answer.rounds and not answer.starts:
        return None
    last = len(answer.prompt_ids) + len(answer.output_ids) - 1
    for start, right, length in zip(answer.starts, answer.accepted, answer.verify_lens, strict=True):
        for slot in range(1, min(right + 1, length - 1, last - start) + 1):
            reached[slot - 1] += 1
            accepted[slot - 1] += slot <= right
    return reached, accepted


def sums_by_context(answer: Answer, bounds: Sequence[int]) -> list[tuple[int, int]]:
    """(committed, rounds) of the rounds whose anchor lies in each bucket of positions; bucket i ends before bounds[i]."""
    last = len(answer.prompt_ids) + len(answer.output_ids) - 1
    ends = [*bounds, last + 1]
    sums = []
    for low, high in pairwise([0, *ends]):
        chosen = [
            min(right + 1, last - start)
            for start, right in zip(answer.starts, answer.accepted, strict=True)
            if low <= start < high
        ]
        sums.append((sum(chosen), len(chosen)))
    return sums


def _answer(
    question: Question, output_ids: list[int], reason: Literal["stop", "length"], seconds: float, **rest: Any
) -> Answer:
    return Answer(
        document_id=question.document_id,
        turn=question.turn,
        domain=question.domain,
        language=question.language,
        prompt_ids=question.prompt_ids,
        output_ids=output_ids,
        finish_reason=reason,
        seconds=seconds,
        **rest,
    )

"""Verification records: what serving logs about one request, one JSON line each.

Needs only ``msgspec``, so that it can be imported next to a serving engine.

Positions are absolute indices into ``prompt_ids + output_ids``. The prefill yields the token at index
``len(prompt_ids)``, which is the anchor of the first round; a round that starts at ``s`` and accepts ``a`` drafts
commits the tokens ``s + 1 .. s + a + 1``, so the next round starts at ``s + a + 1``.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec

SCHEMA_VERSION = 1
MAX_LINE_BYTES = 16 * 1024 * 1024
"""Longest line a reader takes into memory; longer ones are refused on both sides of the log."""

_MAX_REASON_CHARS = 300
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>[^`]+)`(?: - at `\$\.?(?P<path>.*)`)?")

# The upper bound keeps a hostile or corrupt id from overflowing an int64 tensor.
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Position = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class RecordError(ValueError):
    """A line or record that cannot be used.

    ``reason`` is the full message; ``kind`` is its category, from a small fixed set, to count by: ``nul_bytes``,
    ``not_utf8``, ``not_json``, ``schema_version``, ``missing_field``, ``wrong_type``, ``inconsistent``,
    ``oversize`` and, from readers of files, ``torn``.
    """

    def __init__(self, reason: str, kind: str) -> None:
        self.reason = reason[:_MAX_REASON_CHARS]
        self.kind = kind
        super().__init__(self.reason)


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One verification round.

    start: absolute index of the anchor, the last committed token not yet in the target's KV cache.
    verify_len: slots the target verified, the anchor included (1 .. block_size).
    accepted: drafts accepted (0 .. verify_len - 1).
    draft_ids: all ``block_size - 1`` drafted ids, also those beyond ``verify_len``: labels made from them are not
        censored by the length policy that was in force. A prepared block may have one fewer.
    prepared: drafted ahead, while the round before was verified; for full acceptance without sight of its bonus token.
    target_top_k: optional, per verified slot the target's best (token id, finite log-probability) pairs.
    """

    start: Position
    drafter_version: str
    verify_len: Position
    accepted: Position
    draft_ids: list[TokenId]
    target_top_k: list[list[tuple[TokenId, float]]] | None = None
    prepared: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a request was decoded; temperature 0 is greedy, ``top_k`` <= 0 means no limit.

    requested_temperature: what the client asked for, where the server decoded greedily all the same.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int | None = None
    requested_temperature: float | None = None


class VerificationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished or cut-off request with all its verification rounds.

    time: unix seconds at the end of the request.
    length_policy: name of the policy that chose each ``verify_len``.
    """

    schema_version: int = SCHEMA_VERSION
    request_id: str
    conversation_key: str
    time: float
    target_id: str
    sampling: Sampling
    domain: str = "default"
    tenant: str | None = None
    prompt_ids: list[TokenId]
    output_ids: list[TokenId]
    rounds: list[Round]
    finish_reason: Literal["stop", "length", "abort"]
    block_size: Position
    length_policy: str | None = None


class _Header(msgspec.Struct):
    schema_version: int


_encoder = msgspec.json.Encoder()
_header_decoder = msgspec.json.Decoder(_Header)
_decoder = msgspec.json.Decoder(VerificationRecord)


def encode(record: VerificationRecord) -> bytes:
    """Encode as one JSON line, without the newline.

    Raises ``RecordError`` if the record holds something that has no place in a line, such as array scalars in place
    of ints, or if the line is longer than ``MAX_LINE_BYTES``. Consistency is the reader's business: see ``validate``.
    """
    try:
        line = _encoder.encode(record)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"record cannot be encoded: {error}", "wrong_type") from error
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"record of {len(line)} bytes exceeds {MAX_LINE_BYTES}", "oversize")
    return line


def decode(line: bytes) -> VerificationRecord:
    """Decode and validate one line; unknown fields are ignored.

    Raises ``RecordError``, and nothing else, whatever the bytes are.
    """
    if b"\0" in line:
        raise RecordError("line contains NUL bytes", "nul_bytes")
    try:
        version = _header_decoder.decode(line).schema_version
        if version > SCHEMA_VERSION:
            raise RecordError(f"schema version {version} is newer than {SCHEMA_VERSION}", "schema_version")
        if version < 1:
            raise RecordError(f"schema version {version} does not exist", "schema_version")
        record = _decoder.decode(line)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if not _is_utf8(line):
            raise RecordError("line is not UTF-8", "not_utf8") from error
        raise RecordError(f"not JSON: {error}", "not_json") from error
    validate(record)
    return record


def validate(record: VerificationRecord) -> None:
    """Check that the numbers of a record agree with each other; raise ``RecordError`` naming the first that does not.

    Every round but the last commits ``accepted + 1`` tokens; only the last one may be cut by the end of the output. The
    next begins where it ended, or later: a request that was taken off the device for want of memory and prefilled again,
    or decoded for a step without drafts, has tokens that no round committed.
    """
    if not record.output_ids:
        raise RecordError("output_ids is empty", "inconsistent")
    if record.block_size < 1:
        raise RecordError("block_size must be at least 1", "inconsistent")
    first, last = len(record.prompt_ids), _last_index(record)
    expected: int | None = None
    for index, this in enumerate(record.rounds):
        problem = _round_problem(this, record.block_size, first, last, expected)
        if problem is not None:
            raise RecordError(f"rounds[{index}]: {problem}", "inconsistent")
        expected = this.start + this.accepted + 1


def committed_tokens(record: VerificationRecord) -> int:
    """Return the tokens committed by verification rounds.

    The target's own token of each round counts; the prefill's token and tokens past EOS or the length limit do not.
    """
    last = _last_index(record)
    return sum(min(this.accepted + 1, last - this.start) for this in record.rounds)


def verification_rounds(record: VerificationRecord) -> int:
    """Return the number of rounds that could commit a token: one begun on the last output token lies past the end."""
    last = _last_index(record)
    return sum(this.start < last for this in record.rounds)


def acceptance_length(record: VerificationRecord) -> float | None:
    """Return τ = committed tokens / verification rounds of one record, or None without any round.

    Over many records add up ``committed_tokens`` and ``verification_rounds`` and divide once.
    """
    rounds = verification_rounds(record)
    return committed_tokens(record) / rounds if rounds else None


def _last_index(record: VerificationRecord) -> int:
    return len(record.prompt_ids) + len(record.output_ids) - 1


def _round_problem(this: Round, block_size: int, first: int, last: int, expected: int | None) -> str | None:
    if not first <= this.start <= last:
        return f"start {this.start} is outside the output [{first}, {last}]"
    if not 1 <= this.verify_len <= block_size:
        return f"verify_len {this.verify_len} is outside [1, {block_size}]"
    if this.accepted > this.verify_len - 1:
        return f"accepted {this.accepted} exceeds verify_len - 1 = {this.verify_len - 1}"
    short = this.prepared and this.verify_len < block_size
    if len(this.draft_ids) != block_size - 1 and not (short and len(this.draft_ids) == block_size - 2):
        return f"{len(this.draft_ids)} draft_ids, not block_size - 1 = {block_size - 1}"
    if expected is not None and this.start < expected:
        return f"start {this.start} lies within the round before, which ends at {expected}"
    return None


def _invalid(message: str) -> RecordError:
    missing = _MISSING_FIELD.fullmatch(message)
    if missing is None:
        return RecordError(f"wrong type: {message}", "wrong_type")
    path = ".".join(part for part in (missing["path"], missing["field"]) if part)
    return RecordError(f"missing field {path}", "missing_field")


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_bridge import records
from serving_bridge.records import (
    RecordError,
    Round,
    Sampling,
    VerificationRecord,
    acceptance_length,
    committed_tokens,
    decode,
    encode,
    verification_rounds,
)
from tests.serving_bridge.record_samples import make_record, make_round

REQUIRED = [
    "schema_version",
    "request_id",
    "conversation_key",
    "time",
    "target_id",
    "sampling",
    "prompt_ids",
    "output_ids",
    "rounds",
    "finish_reason",
    "block_size",
]


def as_json(**changes: Any) -> dict[str, Any]:
    return json.loads(encode(make_record())) | changes


def refusal(value: Any) -> RecordError:
    with pytest.raises(RecordError) as caught:
        decode(value if isinstance(value, bytes) else json.dumps(value).encode())
    return caught.value


token_ids = st.integers(0, 2**31 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=20)


@st.composite
def valid_records(draw: st.DrawFn) -> VerificationRecord:
    block_size = draw(st.integers(1, 6))
    prompt = draw(st.lists(token_ids, max_size=5))
    output = draw(st.lists(token_ids, min_size=1, max_size=12))
    last = len(prompt) + len(output) - 1
    rounds, start = [], len(prompt)
    while start <= last and draw(st.booleans()):
        verify_len = draw(st.integers(1, block_size))
        accepted = draw(st.integers(0, verify_len - 1))
        drafts = draw(st.lists(token_ids, min_size=block_size - 1, max_size=block_size - 1))
        top_k = draw(st.none() | st.lists(st.lists(st.tuples(token_ids, finite), max_size=2), max_size=2))
        rounds.append(
            Round(
                start=start,
                drafter_version=draw(text),
                verify_len=verify_len,
                accepted=accepted,
                draft_ids=drafts,
                target_top_k=top_k,
            )
        )
        start += accepted + 1
    return VerificationRecord(
        request_id=draw(text),
        conversation_key=draw(text),
        time=draw(finite),
        target_id=draw(text),
        sampling=Sampling(
            temperature=draw(finite),
            top_p=draw(finite),
            top_k=draw(token_ids),
            seed=draw(st.none() | token_ids),
        ),
        domain=draw(text),
        tenant=draw(st.none() | text),
        prompt_ids=prompt,
        output_ids=output,
        rounds=rounds,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        block_size=block_size,
        length_policy=draw(st.none() | text),
    )


@settings(deadline=None)
@given(valid_records())
def test_round_trip_is_exact_and_one_line(record: VerificationRecord) -> None:
    line = encode(record)
    assert b"\n" not in line
    assert decode(line) == record


def test_text_with_line_breaks_stays_on_one_line() -> None:
    record = make_record("a\nb\u2028c\r\0")
    assert b"\n" not in encode(record)
    assert decode(encode(record)) == record


def test_unknown_fields_are_tolerated() -> None:
    value = as_json(kv_pages=[1, 2], nested={"a": {"b": None}})
    value["rounds"][0]["draft_entropy"] = 0.5
    assert decode(json.dumps(value).encode()) == make_record()


def test_optional_fields_may_be_absent() -> None:
    value = as_json()
    for name in ("domain", "tenant", "length_policy"):
        del value[name]
    del value["sampling"]["seed"]
    record = decode(json.dumps(value).encode())
    assert (record.domain, record.tenant, record.length_policy, record.sampling.seed) == (
        "default",
        None,
        None,
        None,
    )


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_named(name: str) -> None:
    value = as_json()
    del value[name]
    error = refusal(value)
    assert (error.kind, error.reason) == ("missing_field", f"missing field {name}")


def test_missing_field_of_a_round_is_named_with_its_path() -> None:
    value = as_json()
    del value["rounds"][1]["draft_ids"]
    assert refusal(value).reason == "missing field rounds[1].draft_ids"


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"prompt_ids": "abc"}, "$.prompt_ids"),
        ({"output_ids": [1, 2.5]}, "$.output_ids[1]"),
        ({"output_ids": [1, -1]}, "$.output_ids[1]"),
        ({"prompt_ids": [10**12]}, "$.prompt_ids[0]"),
        ({"prompt_ids": [True]}, "$.prompt_ids[0]"),
        ({"time": None}, "$.time"),
        ({"finish_reason": "tired"}, "$.finish_reason"),
        ({"rounds": [{"start": "3"}]}, "$.rounds[0].start"),
        ({"schema_version": "1"}, "$.schema_version"),
    ],
)
def test_wrong_type_is_named_with_its_path(changes: dict[str, Any], path: str) -> None:
    error = refusal(as_json(**changes))
    assert error.kind == "wrong_type"
    assert path in error.reason


def test_newer_version_is_told_apart_even_if_nothing_else_fits() -> None:
    error = refusal({"schema_version": 7, "rounds": "now a table"})
    assert (error.kind, error.reason) == ("schema_version", "schema version 7 is newer than 1")
    assert refusal(as_json(schema_version=7)).kind == "schema_version"
    assert refusal(as_json(schema_version=0)).kind == "schema_version"


def test_tokens_between_rounds_are_those_that_no_round_committed() -> None:
    """A request prefilled again, or decoded for a step without drafts."""
    record = decode(encode(make_record(rounds=[make_round(3, 2), make_round(7, 0)])))
    assert committed_tokens(record) == 3 + 1


def test_a_prepared_block_may_lack_its_last_draft() -> None:
    record = make_record(block_size=5, rounds=[make_round(3, 2, prepared=True)])
    assert decode(encode(record)) == record and record.rounds[0].prepared


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (make_record(output_ids=[], rounds=[]), "output_ids is empty"),
        (make_record(block_size=0, rounds=[]), "block_size"),
        (make_record(block_size=5), "draft_ids"),
        (make_record(block_size=6, rounds=[make_round(3, 2, prepared=True)]), "draft_ids"),
        (make_record(block_size=5, rounds=[make_round(3, 2, verify_len=5, prepared=True)]), "draft_ids"),
        (make_record(rounds=[make_round(2, 0)]), "start 2 is outside the output [3, 9]"),
        (make_record(rounds=[make_round(10, 0)]), "start 10 is outside the output [3, 9]"),
        (make_record(rounds=[make_round(3, 0, verify_len=0)]), "verify_len 0"),
        (make_record(rounds=[make_round(3, 0, verify_len=5)]), "verify_len 5"),
        (make_record(rounds=[make_round(3, 2, verify_len=2)]), "accepted 2 exceeds"),
        (
            make_record(rounds=[make_round(6, 0), make_round(3, 2)]),
            "rounds[1]: start 3 lies within the round before",
        ),
        (make_record(rounds=[make_round(3, 2), make_round(5, 0)]), "which ends at 6"),
        (make_record(rounds=[make_round(3, 2), make_round(3, 2)]), "rounds[1]"),
        (make_record(rounds=[make_round(8, 3), make_round(9, 0)]), "which ends at 12"),
    ],
)
def test_inconsistent_numbers_are_refused(record: VerificationRecord, reason: str) -> None:
    error = refusal(encode(record))
    assert error.kind == "inconsistent"
    assert reason in error.reason


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"", "not_json"),
        (b"   ", "not_json"),
        (b"{", "not_json"),
        (b'{"schema_version": NaN}', "not_json"),
        (encode(make_record())[:-1], "not_json"),
        (encode(make_record()) * 2, "not_json"),
        (b'{"schema_version":1,"x":' + b"[" * 200_000, "not_json"),
        (b'{"schema_version":1,"x":"\0"}', "nul_bytes"),
        (b"\0" * 100, "nul_bytes"),
        (b'{"schema_version":1,"request_id":"\xff"}', "not_utf8"),
        (b"\x80\x04\x95", "not_utf8"),
        (b"[]", "wrong_type"),
        (b"null", "wrong_type"),
        (b'{"schema_version":1' + b"0" * 6000 + b"}", "wrong_type"),
    ],
)
def test_bytes_that_are_no_record_have_a_kind(line: bytes, kind: str) -> None:
    error = refusal(line)
    assert error.kind == kind
    assert len(error.reason) <= 300


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_record_error(line: bytes) -> None:
    refusal(line)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_records_raise_nothing_but_record_error(data: st.DataObject) -> None:
    line = bytearray(encode(make_record()))
    at = data.draw(st.integers(0, len(line) - 1))
    line[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    try:
        decode(bytes(line))
    except RecordError as error:
        assert error.kind in {
            "nul_bytes",
            "not_utf8",
            "not_json",
            "schema_version",
            "missing_field",
            "wrong_type",
            "inconsistent",
        }


def test_acceptance_length_counts_the_targets_token_but_not_the_prefills() -> None:
    record = make_record()
    assert committed_tokens(record) == 6 == len(record.output_ids) - 1
    assert acceptance_length(record) == 2.0


def test_tokens_past_the_end_are_not_committed() -> None:
    cut = make_record(rounds=[make_round(3, 2), make_round(6, 0), make_round(7, 3)])
    assert decode(encode(cut)) == cut
    assert committed_tokens(cut) == 6
    beyond = make_record(rounds=[*make_record().rounds, make_round(9, 3)])
    assert decode(encode(beyond)) == beyond
    assert committed_tokens(beyond) == 6
    assert verification_rounds(beyond) == 3
    assert acceptance_length(beyond) == 2.0


def test_acceptance_length_without_rounds_is_none() -> None:
    assert acceptance_length(make_record(output_ids=[2], rounds=[])) is None


def test_unencodable_and_oversize_records_are_refused_by_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordError, match="cannot be encoded"):
        encode(make_record(prompt_ids=[object()]))
    with pytest.raises(RecordError, match="cannot be encoded"):
        encode(make_record("\ud800"))
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 100)
    with pytest.raises(RecordError) as caught:
        encode(make_record())
    assert caught.value.kind == "oversize"


def test_records_and_spool_need_nothing_but_msgspec() -> None:
    code = (
        "import sys; before = set(sys.modules); import serving_bridge.records, serving_bridge.spool;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    # msgspec itself may bring typing_extensions.
    assert set(found.stdout.split()) - {"typing_extensions"} == {"msgspec", "serving_bridge"}

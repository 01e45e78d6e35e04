"""Records of a serving engine: always valid, never more than the client and the operator allow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_bridge.records import (
    Sampling,
    VerificationRecord,
    committed_tokens,
    decode,
    encode,
    validate,
)
from serving_bridge.sglang_plugin.recorder import Recorder, RequestInfo, RequestLog, in_share
from serving_bridge.sglang_plugin.settings import PluginSettings, SettingsError

BLOCK = 4
PROMPT = [5, 6, 7]
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0)
REDACTIONS = "redactions_of_this_test"


@dataclass
class Kept:
    """A writer that keeps what it is given."""

    records: list[VerificationRecord] = field(default_factory=list)
    dropped: int = 0

    @property
    def written(self) -> int:
        return len(self.records)

    def write(self, record: VerificationRecord) -> bool:
        self.records.append(record)
        return True

    def close(self) -> None:
        pass


def make_recorder(kept: Kept, **settings: Any) -> Recorder:
    return Recorder(
        kept,
        PluginSettings(**settings),
        target_id="tiny@r0#0123456789ab",
        block_size=BLOCK,
        length_policy="adaflash",
    )


def note(recorder: Recorder, log: RequestLog, start: int, accepted: int, verify_len: int = BLOCK) -> None:
    recorder.round(
        log,
        start=start,
        drafter_version="v1",
        verify_len=verify_len,
        accepted=accepted,
        draft_ids=[100, 101, 102],
        target_top_k=[[(1, -0.5)]] * verify_len,
    )


def finish(recorder: Recorder, log: RequestLog, output: int, request_id: str = "r0") -> None:
    recorder.finish(
        log,
        request_id=request_id,
        prompt_ids=PROMPT,
        output_ids=list(range(10, 10 + output)),
        sampling=GREEDY,
        finish_reason="stop",
    )


def serve(recorder: Recorder, custom_params: Any = None, request_id: str = "r0") -> RequestLog:
    """A request of two rounds: the prefill's token, then 3 and 1 more."""
    log = recorder.begin(request_id, custom_params)
    note(recorder, log, start=3, accepted=2)
    note(recorder, log, start=6, accepted=0)
    finish(recorder, log, output=5, request_id=request_id)
    return log


def install_redaction(monkeypatch: pytest.MonkeyPatch, redact: Any) -> str:
    module = ModuleType(REDACTIONS)
    module.__dict__["redact"] = redact
    monkeypatch.setitem(sys.modules, REDACTIONS, module)
    return f"{REDACTIONS}:redact"


# records


def test_a_record_holds_what_happened() -> None:
    kept = Kept()
    serve(make_recorder(kept), {"draftsmith_conversation": "c1"})
    (record,) = kept.records
    assert (record.request_id, record.conversation_key) == ("r0", "c1")
    assert (record.prompt_ids, record.output_ids) == (PROMPT, [10, 11, 12, 13, 14])
    assert [(r.start, r.accepted, r.verify_len) for r in record.rounds] == [(3, 2, 4), (6, 0, 4)]
    assert record.rounds[0].draft_ids == [100, 101, 102]
    assert record.rounds[0].target_top_k == [[(1, -0.5)]] * BLOCK
    assert (record.target_id, record.block_size, record.length_policy) == (
        "tiny@r0#0123456789ab", BLOCK, "adaflash",
    )  # fmt: skip
    assert (record.sampling, record.finish_reason) == (GREEDY, "stop")
    assert committed_tokens(record) == 4


@given(
    st.lists(st.tuples(st.integers(1, BLOCK), st.integers(0, BLOCK - 1)), min_size=1, max_size=6), st.data()
)
def test_records_are_valid_however_the_text_is_cut(
    rounds: list[tuple[int, int]], data: st.DataObject
) -> None:
    """A stop string may end the text before tokens that whole rounds committed."""
    kept = Kept()
    recorder = make_recorder(kept)
    log = recorder.begin("r0", None)
    start = len(PROMPT)
    for verify_len, accepted in rounds:
        accepted = min(accepted, verify_len - 1)
        note(recorder, log, start, accepted, verify_len)
        start += accepted + 1
    decoded = start - len(PROMPT) + 1
    output = data.draw(st.integers(1, decoded))
    finish(recorder, log, output)
    (record,) = kept.records
    validate(record)
    assert decode(encode(record)) == record
    assert committed_tokens(record) == output - 1


def test_rounds_after_the_end_of_the_text_are_left_out() -> None:
    kept = Kept()
    recorder = make_recorder(kept)
    log = recorder.begin("r0", None)
    for start in (3, 5, 7):
        note(recorder, log, start, accepted=1)
    finish(recorder, log, output=3)
    assert [r.start for r in kept.records[0].rounds] == [3, 5]


@pytest.mark.parametrize(("rounds", "output"), [(0, 3), (1, 0)])
def test_without_rounds_or_output_there_is_no_record(rounds: int, output: int) -> None:
    kept = Kept()
    recorder = make_recorder(kept)
    log = recorder.begin("r0", None)
    for _ in range(rounds):
        note(recorder, log, start=3, accepted=0)
    finish(recorder, log, output)
    assert kept.records == []
    assert recorder.skipped["no_rounds"] == 1


def test_a_record_does_not_change_with_the_engines_lists() -> None:
    kept = Kept()
    recorder = make_recorder(kept)
    log = recorder.begin("r0", None)
    note(recorder, log, start=3, accepted=0)
    output = [10, 11]
    recorder.finish(
        log, request_id="r0", prompt_ids=PROMPT, output_ids=output, sampling=GREEDY, finish_reason="length"
    )
    output.append(99)
    assert kept.records[0].output_ids == [10, 11]


# what the client says


def info(custom_params: Any, **settings: Any) -> RequestInfo:
    return RequestInfo.of("r0", custom_params, PluginSettings(**settings))


def test_the_client_names_conversation_domain_and_tenant() -> None:
    said = {
        "draftsmith_conversation": "c1", "draftsmith_domain": "code", "draftsmith_tenant": "t1", "other": 1,
    }  # fmt: skip
    assert info(said) == RequestInfo("c1", "code", "t1", True)


@pytest.mark.parametrize("said", [None, {}, [], "draftsmith_domain", 5, {"domain": "code", "log": False}])
def test_without_our_keys_there_are_defaults(said: Any) -> None:
    assert info(said) == RequestInfo("r0", "default", None, True)


@pytest.mark.parametrize("wrong", [None, 5, 0.5, True, "", [], {"a": 1}, b"x"])
def test_a_name_of_a_wrong_type_is_ignored(wrong: Any) -> None:
    said = {f"draftsmith_{key}": wrong for key in ("conversation", "domain", "tenant")}
    assert info(said) == RequestInfo("r0", "default", None, True)


@pytest.mark.parametrize(
    ("said", "by_default", "wanted"),
    [
        (True, False, True),
        (False, True, False),
        ("false", True, True),
        (0, True, True),
        (1, False, False),
        (None, False, False),
        ([], True, True),
    ],
)
def test_only_a_true_or_false_decides_about_logging(said: Any, by_default: bool, wanted: bool) -> None:
    assert info({"draftsmith_log": said}, log_by_default=by_default).log is wanted


def test_a_client_cannot_ask_for_more_than_the_share() -> None:
    assert not info({"draftsmith_log": True}, log_share=0.0).log


@pytest.mark.parametrize(
    ("request_id", "said"), [("r0", {"draftsmith_conversation": "\ud800"}), ("\ud800", None)]
)
def test_text_that_is_no_unicode_does_not_raise(request_id: str, said: Any) -> None:
    RequestInfo.of(request_id, said, PluginSettings())


def test_a_request_that_is_not_wanted_leaves_nothing() -> None:
    kept = Kept()
    recorder = make_recorder(kept)
    log = serve(recorder, {"draftsmith_log": False})
    assert kept.records == []
    assert log.rounds == []
    assert dict(recorder.skipped) == {"not_wanted": 1}


# the share


def test_a_share_keeps_whole_conversations() -> None:
    settings = PluginSettings(log_share=0.5)
    for number in range(20):
        said = {"draftsmith_conversation": f"c{number}"}
        turns = {RequestInfo.of(f"r{number}-{turn}", said, settings).log for turn in range(5)}
        assert len(turns) == 1


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_about_the_share_of_conversations_is_kept(share: float) -> None:
    kept = sum(in_share(f"c{number}", share) for number in range(4000))
    assert abs(kept / 4000 - share) < 0.03


@given(st.text(max_size=20))
def test_a_larger_share_only_adds(key: str) -> None:
    inside = [in_share(key, share) for share in (0.0, 0.2, 0.6, 1.0)]
    assert inside == sorted(inside)
    assert (inside[0], inside[-1]) == (False, True)


# redaction


def test_a_redaction_changes_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def redact(record: VerificationRecord) -> VerificationRecord:
        return msgspec.structs.replace(record, tenant="hidden")

    kept = Kept()
    serve(make_recorder(kept, redact=install_redaction(monkeypatch, redact)), {"draftsmith_tenant": "t1"})
    assert [record.tenant for record in kept.records] == ["hidden"]


def test_a_redaction_may_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    recorder = make_recorder(kept, redact=install_redaction(monkeypatch, lambda record: None))
    serve(recorder)
    assert kept.records == []
    assert recorder.status()["skipped"] == {"redacted_away": 1}


def test_a_redaction_that_fails_drops_counts_and_stays_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def redact(record: VerificationRecord) -> VerificationRecord:
        raise KeyError(record.request_id)

    kept = Kept()
    recorder = make_recorder(kept, redact=install_redaction(monkeypatch, redact))
    serve(recorder, request_id="r0")
    serve(recorder, request_id="r1")
    assert kept.records == []
    assert recorder.skipped["redaction_failed"] == 2


@pytest.mark.parametrize("returned", [{"request_id": "r0"}, True, "text"])
def test_a_redaction_that_returns_no_record_drops_and_counts(
    monkeypatch: pytest.MonkeyPatch, returned: Any
) -> None:
    kept = Kept()
    recorder = make_recorder(kept, redact=install_redaction(monkeypatch, lambda record: returned))
    serve(recorder)
    assert kept.records == []
    assert recorder.skipped["redaction_failed"] == 1


@pytest.mark.parametrize(
    "name", ["no_such_module:redact", "json:no_such_function", "json", ":redact", "json:"]
)
def test_a_redaction_that_cannot_be_imported_is_refused_at_once(name: str) -> None:
    with pytest.raises(SettingsError, match="redact"):
        make_recorder(Kept(), redact=name)


def test_a_redaction_that_is_no_function_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = install_redaction(monkeypatch, {"not": "a function"})
    with pytest.raises(SettingsError, match="redact"):
        make_recorder(Kept(), redact=name)


# status


def test_status_counts_what_was_written_and_skipped() -> None:
    kept = Kept(dropped=2)
    recorder = make_recorder(kept)
    serve(recorder)
    serve(recorder, {"draftsmith_log": False})
    assert recorder.status() == {"written": 1, "dropped": 2, "skipped": {"not_wanted": 1}}


def test_status_holds_the_writers_own_counters() -> None:
    kept = Kept()
    stats: Callable[[], dict[str, Any]] = lambda: {"buffered": 3}  # noqa: E731
    kept.__dict__["stats"] = stats
    assert make_recorder(kept).status()["buffered"] == 3

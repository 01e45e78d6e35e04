"""The response store: atomic batches, recovery, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from datamodules.responses import (
    META_FILE,
    ROWS_FILE,
    ResponseRow,
    ResponseStore,
    Sampling,
    StoreMeta,
    to_document,
)
from drafters.errors import UserError
from drafters.identity import TargetIdentity

TARGET = TargetIdentity("model", "r1", "a" * 64)


def meta(target: TargetIdentity = TARGET, **changes: Any) -> StoreMeta:
    base = StoreMeta(
        target=target.to_json(),
        target_id=target.target_id,
        sampling=Sampling(),
        max_new_tokens=8,
        template_hash="t",
        sources=["s1"],
    )
    return msgspec.structs.replace(base, **changes)


def row(key: str, **changes: Any) -> ResponseRow:
    base = ResponseRow(
        document_id=key,
        domain="math",
        conversation_key=key,
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        finish_reason="stop",
        target_id=TARGET.target_id,
        sampling=Sampling(),
    )
    return msgspec.structs.replace(base, **changes)


def filled(directory: Path, *batches: list[str]) -> Path:
    with ResponseStore(directory).open(meta()) as store:
        for batch in batches:
            store.append([row(key) for key in batch])
    return directory / ROWS_FILE


def keys(directory: Path) -> list[str]:
    return [r.conversation_key for r in ResponseStore(directory).rows()]


def test_round_trip(tmp_path: Path) -> None:
    filled(tmp_path, ["a", "b"], ["c"])
    store = ResponseStore(tmp_path)
    assert keys(tmp_path) == ["a", "b", "c"]
    assert store.done_keys() == {"a", "b", "c"}
    assert store.meta == meta()
    line = json.loads((tmp_path / ROWS_FILE).read_text().splitlines()[1])
    assert line == {
        "document_id": "b",
        "domain": "math",
        "conversation_key": "b",
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "finish_reason": "stop",
        "target_id": TARGET.target_id,
        "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0},
    }


def test_documents_carry_the_mask() -> None:
    document = to_document(row("a"))
    assert document.token_ids == [1, 2, 3, 4, 5]
    assert document.response_mask == [False, False, True, True, True]
    assert (document.document_id, document.domain, document.conversation_key) == ("a", "math", "a")
    turns = to_document(row("a", response_spans=[(0, 1), (2, 3)]))
    assert turns.response_mask == [False, False, True, False, True]


def test_truncated_rows_are_dropped_by_choice(tmp_path: Path) -> None:
    with ResponseStore(tmp_path).open(meta()) as store:
        store.append([row("a"), row("b", finish_reason="length")])
    store = ResponseStore(tmp_path)
    assert [d.document_id for d in store.documents(drop_truncated=True)] == ["a"]
    assert [d.document_id for d in store.documents(drop_truncated=False)] == ["a", "b"]
    summary = store.summary()
    assert (summary.rows, summary.truncated, summary.response_tokens) == (2, 1, 6)


def test_nothing_left_to_train_on(tmp_path: Path) -> None:
    with ResponseStore(tmp_path).open(meta()) as store:
        store.append([row("a", finish_reason="length")])
    with pytest.raises(UserError, match="1 rows, 1 of them truncated"):
        ResponseStore(tmp_path).documents(drop_truncated=True)


def test_a_kill_at_any_byte_loses_only_the_batch_under_way(tmp_path: Path) -> None:
    path = filled(tmp_path, ["a", "b"])
    first = path.read_bytes()
    path = filled(tmp_path, ["c", "d", "e"])
    whole = path.read_bytes()
    line_ends = [i for i, byte in enumerate(whole) if byte == ord("\n") and i >= len(first)]
    cuts = {*range(len(first), len(whole) - 1, 23), *line_ends[:-1], *(i + 1 for i in line_ends[:-1])}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        assert keys(tmp_path) == ["a", "b"]
        assert path.read_bytes() == whole[:cut], "reading must not change the file"
        torn_lines = ResponseStore(tmp_path).summary().torn_lines
        assert torn_lines == len(whole[len(first) : cut].splitlines())
        with ResponseStore(tmp_path).open(meta()) as store:
            assert store.done_keys() == {"a", "b"}
            assert store.recovered_lines == torn_lines
            store.append([row(key) for key in "cde"])
        assert path.read_bytes() == whole


def test_a_complete_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = filled(tmp_path, ["a"], ["b"])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert keys(tmp_path) == ["a", "b"]
    filled(tmp_path, ["c"])
    assert keys(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "damage",
    [
        b"garbage",
        b"{}",
        b"",
        b'{"document_id": 1}',
        msgspec.json.encode(row("x", response_spans=[(2, 1)])),
        msgspec.json.encode(row("x", response_spans=[(0, 4)])),
    ],
)
def test_damage_before_the_end_is_reported(tmp_path: Path, damage: bytes) -> None:
    path = filled(tmp_path, ["a"], ["b"], ["c"])
    lines = path.read_bytes().split(b"\n")
    lines[1] = damage
    path.write_bytes(b"\n".join(lines))
    before = path.read_bytes()
    with pytest.raises(UserError, match=rf"{ROWS_FILE}:2: not a response row"):
        keys(tmp_path)
    with pytest.raises(UserError, match=rf"{ROWS_FILE}:2"):
        ResponseStore(tmp_path).open(meta())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (meta(TargetIdentity("model", "r2", "a" * 64)), "responses of another target"),
        (meta(TargetIdentity("model", "r1", "b" * 64)), "responses of another target"),
        (meta(sampling=Sampling(temperature=0.5)), "sampling"),
        (meta(max_new_tokens=9), "max_new_tokens"),
        (meta(template_hash="u"), "template_hash"),
    ],
)
def test_refuses_to_mix(tmp_path: Path, other: StoreMeta, message: str) -> None:
    path = filled(tmp_path, ["a"])
    before = path.read_bytes(), (tmp_path / META_FILE).read_bytes()
    with pytest.raises(UserError, match=message):
        ResponseStore(tmp_path).open(other)
    assert (path.read_bytes(), (tmp_path / META_FILE).read_bytes()) == before
    filled(tmp_path, ["b"])  # and the lock was released


def test_rows_without_meta_are_not_adopted(tmp_path: Path) -> None:
    filled(tmp_path, ["a"])
    (tmp_path / META_FILE).unlink()
    with pytest.raises(UserError, match=r"meta.json is missing"):
        ResponseStore(tmp_path).open(meta())


def test_further_sources_are_noted(tmp_path: Path) -> None:
    filled(tmp_path, ["a"])
    with ResponseStore(tmp_path).open(meta(sources=["s2"])):
        pass
    with ResponseStore(tmp_path).open(meta(sources=["s2"])):
        pass
    assert ResponseStore(tmp_path).meta.sources == ["s1", "s2"]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        ResponseStore(tmp_path).open(meta()),
        pytest.raises(UserError, match="another process is writing"),
    ):
        ResponseStore(tmp_path).open(meta())
    filled(tmp_path, ["a"])


def test_a_directory_that_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="generate responses first"):
        keys(tmp_path)
    with pytest.raises(UserError, match="not a response store"):
        _ = ResponseStore(tmp_path).meta
    (tmp_path / META_FILE).write_text("[]")
    with pytest.raises(UserError, match="not the meta data"):
        _ = ResponseStore(tmp_path).meta

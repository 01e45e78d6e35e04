"""Reading conversations from files and datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from datamodules.prompts import SourceSpec, load_source, read_jsonl
from drafters.errors import UserError


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def test_the_three_row_shapes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mixed.jsonl",
        {
            "id": "m1",
            "domain": "math",
            "source": "book",
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"},
            ],
        },
        {"id": 7, "turns": ["one", "two"]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
    )
    first, second, third = read_jsonl(path)
    assert (first.id, first.domain, first.source) == ("m1", "math", "book")
    assert [m["role"] for m in first.messages] == ["system", "user", "assistant"]
    assert (second.id, second.domain, second.source) == ("7", "default", "mixed")
    assert second.messages == [
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
    ]
    assert third.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "r"},
    ]


def test_ids_without_a_given_one_depend_on_the_content_only(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", {"turns": ["x"]}, {"turns": ["y"]})
    b = write(tmp_path / "b.jsonl", {"turns": ["y"], "domain": "d"}, {"turns": ["x"]})
    ids_a = [c.id for c in read_jsonl(a)]
    assert [c.id for c in read_jsonl(b)] == ids_a[::-1]
    assert len(set(ids_a)) == 2


def test_domain_override_and_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"turns": [str(i)], "domain": "d"} for i in range(5)))
    assert [c.domain for c in read_jsonl(path, domain="other", limit=3)] == ["other"] * 3


def test_only_the_newline_byte_ends_a_line(tmp_path: Path) -> None:
    text = "before\u2028after\u2029\u0085\x1c end"
    path = tmp_path / "a.jsonl"
    line = json.dumps({"turns": [text]}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + line.encode() + b"\r\n\n" + line.encode())
    assert [c.messages[0]["content"] for c in read_jsonl(path)] == [text, text]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "one of the fields"),
        ([1], "expected a JSON object"),
        ({"messages": []}, "`messages` must be a non-empty list"),
        ({"messages": "x"}, "`messages` must be a non-empty list"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content must be a string"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, r"messages\[0\].role is 'narrator'"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty user message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user message"),
        ({"turns": ["ok", 3]}, r"turns\[1\]"),
        ({"conversations": [{"from": "human", "value": None}]}, r"conversations\[0\].value"),
        ({"turns": ["x"], "domain": 3}, "field `domain`"),
        ({"turns": ["x"], "id": ""}, "field `id`"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"turns": ["fine"]}, row)
    with pytest.raises(UserError, match=message) as caught:
        read_jsonl(path)
    assert str(caught.value).startswith(f"{path}:2:")


def test_bad_json_and_bad_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"turns": ["x"]}\n{"turns": \n')
    with pytest.raises(UserError, match=r"a.jsonl:2: not valid JSON"):
        read_jsonl(path)
    path.write_bytes(b'{"turns": ["\xff"]}\n')
    with pytest.raises(UserError, match=r"a.jsonl:1: not UTF-8"):
        read_jsonl(path)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent.jsonl: cannot read"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        read_jsonl(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"empty.jsonl: no conversations"):
        read_jsonl(tmp_path / "empty.jsonl")


def test_dataset_source(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [{"conversations": [{"from": "human", "value": str(i)}], "messages": None} for i in range(4)]

    monkeypatch.setattr("datasets.load_dataset", load)
    spec = SourceSpec(dataset="owner/blend", config="small", split="test", domain="chat", limit=2)
    conversations = load_source(spec)
    assert asked == [("owner/blend", "small", "test")]
    assert [c.messages[0]["content"] for c in conversations] == ["0", "1"]
    assert {(c.domain, c.source) for c in conversations} == {("chat", "owner/blend")}


def test_a_dataset_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise ConnectionError("could not reach the hub\nlong trace")

    monkeypatch.setattr("datasets.load_dataset", load)
    with pytest.raises(UserError, match=r"owner/blend.*could not reach the hub;.*network") as caught:
        load_source(SourceSpec(dataset="owner/blend"))
    assert "\n" not in str(caught.value)


def test_a_source_is_a_path_or_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exactly one"):
        load_source(SourceSpec())
    with pytest.raises(UserError, match="exactly one"):
        load_source(SourceSpec(path=tmp_path, dataset="x"))

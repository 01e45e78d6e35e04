"""Benchmarks as conversations, without the hub; the guess at a language; thinking in prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from datamodules.benchmarks import BenchmarkSpec, load_benchmark
from datamodules.chat import render_prompt
from datamodules.dialogue import Dialogue
from datamodules.language import guess_language
from datamodules.prompts import Conversation
from drafters.errors import UserError
from tests.datamodules.chat_fixtures import byte_level_tokenizer, user

Hub = dict[str, list[dict[str, Any]]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Hub], list[tuple[Any, ...]]]:
    """Put rows in the hub's place, by data set; tells how it was asked and how far it was read."""

    def install(rows: Hub) -> list[tuple[Any, ...]]:
        calls: list[tuple[Any, ...]] = []

        def load(
            name: str, config: str | None, *, split: str, streaming: bool, **more: Any
        ) -> Iterator[dict[str, Any]]:
            calls.append((name, config, split, streaming, more))
            if name not in rows:
                raise ConnectionError("no route to the hub\nand more")
            return iter(rows[name])

        monkeypatch.setattr(datasets, "load_dataset", load)
        return calls

    return install


def texts(conversations: list[Conversation]) -> list[list[str]]:
    return [[m["content"] for m in c.messages] for c in conversations]


def test_a_template_of_fields(hub: Callable[[Hub], list[Any]]) -> None:
    calls = hub({"org/sums": [{"q": f"{n}+{n}?", "input": ""} for n in range(3)]})
    spec = BenchmarkSpec(
        "sums", "Sums", dataset="org/sums", config="main", domain="math", prompt="{q}\n\\boxed{{}}\n{input}"
    )
    found = load_benchmark(spec)
    assert texts(found) == [["0+0?\n\\boxed{}"], ["1+1?\n\\boxed{}"], ["2+2?\n\\boxed{}"]]
    assert [c.id for c in found] == ["sums-0", "sums-1", "sums-2"]
    assert {c.domain for c in found} == {"math"}
    assert calls == [("org/sums", "main", "test", True, {})]


def test_turns_conversations_and_domains_of_rows(hub: Callable[[Hub], list[Any]]) -> None:
    talk = [
        {"from": "human", "value": "first"},
        {"from": "gpt", "value": "answer"},
        {"from": "bing", "value": "of no known role"},
        {"from": "user", "value": "second"},
    ]
    hub(
        {
            "json": [{"turns": ["a", "b"], "category": "qa"}],
            "share": [{"conversations": talk}, {"conversations": [{"from": "gpt", "value": "alone"}]}],
        }
    )
    turns = BenchmarkSpec(
        "t", "T", dataset="json", data_files=("x.jsonl",), turns="turns", domain_field="category"
    )
    (found,) = load_benchmark(turns)
    assert (texts([found]), found.domain) == ([["a", "b"]], "qa")
    shared = load_benchmark(
        BenchmarkSpec("s", "S", dataset="share", domain="chat", conversations="conversations")
    )
    assert texts(shared) == [["first", "second"]]


def test_rows_of_a_prompt_files_shape_need_no_description(hub: Callable[[Hub], list[Any]]) -> None:
    hub({"org/any": [{"id": "k", "domain": "qa", "messages": [{"role": "user", "content": "hi"}]}]})
    (found,) = load_benchmark(BenchmarkSpec("org/any", "any", dataset="org/any"))
    assert (found.id, found.domain, texts([found])) == ("k", "qa", [["hi"]])


def test_rows_bound_what_is_read_and_limit_spreads_over_it(hub: Callable[[Hub], list[Any]]) -> None:
    class Endless(list[dict[str, Any]]):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for n in range(8):
                yield {"q": str(n)}
            raise AssertionError("read further than asked")

    hub({"big": Endless()})
    spec = BenchmarkSpec("big", "Big", dataset="big", rows=8, domain="d", prompt="{q}")
    assert texts(load_benchmark(spec, 4)) == [["0"], ["2"], ["4"], ["6"]]
    assert len(load_benchmark(spec, 99)) == 8


def test_a_blend_takes_equal_shares(hub: Callable[[Hub], list[Any]]) -> None:
    hub({name: [{"q": f"{name}{n}"} for n in range(6)] for name in "ab"})
    parts = tuple(BenchmarkSpec(n, n, dataset=n, domain=f"of-{n}", prompt="{q}") for n in "ab")
    found = load_benchmark(BenchmarkSpec("mix", "Mix", blend=parts), 5)
    assert [c.domain for c in found] == ["of-a", "of-b", "of-a", "of-b", "of-a"]
    assert len({c.id for c in found}) == 5


def test_a_blend_of_unequal_parts_goes_as_far_as_the_shortest(hub: Callable[[Hub], list[Any]]) -> None:
    hub({name: [{"q": f"{name}{n}"} for n in range(count)] for name, count in (("a", 7), ("b", 3))})
    parts = tuple(BenchmarkSpec(n, n, dataset=n, domain=f"of-{n}", prompt="{q}") for n in "ab")
    found = load_benchmark(BenchmarkSpec("mix", "Mix", blend=parts))
    assert [c.domain for c in found] == ["of-a", "of-b"] * 3


def test_ids_that_repeat_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text('{"id": "x", "turns": ["a"]}\n{"id": "x", "turns": ["b"]}\n')
    assert [c.id for c in load_benchmark(BenchmarkSpec("t", "T", path=path))] == ["x", "x~2"]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (BenchmarkSpec("gone", "G", dataset="gone", prompt="{q}"), "benchmark gone: cannot load gone"),
        (BenchmarkSpec("k", "K", dataset="here", prompt="{question}"), "no field 'question', but q"),
        (BenchmarkSpec("k", "K", dataset="here", turns="turns"), "benchmark k, row 0"),
        (BenchmarkSpec("e", "E", dataset="empty", prompt="{q}"), "benchmark e: no rows"),
    ],
)
def test_what_cannot_be_loaded_is_said(
    spec: BenchmarkSpec, named: str, hub: Callable[[Hub], list[Any]]
) -> None:
    hub({"here": [{"q": "1"}], "empty": []})
    with pytest.raises(UserError) as error:
        load_benchmark(spec)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How many eggs, and why?", "Latin script"),
        ("Wie viele Eier übrig blieben?", "Latin script"),
        ("Сколько яиц?", "Cyrillic script"),
        ("一共有多少个鸡蛋", "Chinese"),
        ("卵は全部でいくつありますか", "Japanese"),
        ("달걀은 몇 개입니까?", "Korean"),
        ("كم عدد البيض؟", "Arabic script"),
        ("12 + 30 = ?", "other"),
        ("解释 print 这个函数的全部用法和返回值以及参数", "Chinese"),
    ],
)
def test_language_is_guessed_from_letters(text: str, language: str) -> None:
    assert guess_language(text) == language


THINKING = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


def test_thinking_is_a_variable_of_the_template() -> None:
    tokenizer = byte_level_tokenizer(THINKING)

    def rendered(thinking: bool | None) -> str:
        return str(tokenizer.decode(render_prompt(tokenizer, [user("hi")], thinking=thinking)))

    assert rendered(None) == rendered(True) == "user:hi\nassistant:"
    assert rendered(False) == "user:hi\nassistant:<think></think>"
    without = byte_level_tokenizer("{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match=r"thinking: the chat template of .* has no variable enable_thinking"):
        render_prompt(without, [user("hi")], thinking=False)


def test_thinking_holds_for_later_turns_also_after_a_truncated_answer() -> None:
    tokenizer = byte_level_tokenizer(THINKING)
    talk = Conversation("c", "d", [user("one"), user("two")], "test")
    dialogue = Dialogue.begin(talk, tokenizer, thinking=False, after_length=True)
    dialogue.accept([5, 6], "length", "cut")
    assert dialogue.ask_next(tokenizer, None)
    asked = tokenizer.decode(dialogue.prompt_ids)
    assert asked == "user:one\nassistant:cut\nuser:two\nassistant:<think></think>"
    stopping = Dialogue.begin(talk, tokenizer)
    stopping.accept([5, 6], "length", "cut")
    assert not stopping.ask_next(tokenizer, None)

"""Prompts and response masks for the shapes of chat templates."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors

from datamodules.chat import render_conversation, render_prompt
from drafters.errors import UserError
from tests.datamodules.chat_fixtures import (
    CHATML,
    CHATML_WITH_MARKERS,
    CHATML_WITH_SHORT_MARKERS,
    CHATML_WITHOUT_GENERATION_PROMPT,
    LLAMA3,
    MISTRAL,
    PLAIN,
    QWEN3,
    assistant,
    byte_level_tokenizer,
    masked_runs,
    system,
    user,
)

TWO_TURNS = [
    system("be kind"),
    user("hello"),
    assistant("hello hello"),
    user("bye"),
    assistant("hello"),
]


def make(template: str | None) -> Any:
    if template == LLAMA3:
        return byte_level_tokenizer(template, bos="<|begin_of_text|>", eos="<|eot_id|>")
    if template in (MISTRAL, PLAIN):
        return byte_level_tokenizer(template, bos="<s>", eos="</s>")
    return byte_level_tokenizer(template)


def test_every_token_of_a_chatml_conversation() -> None:
    tokenizer = make(CHATML)
    ids, mask = render_conversation(
        tokenizer, [user("hello"), assistant("hell hello"), user("he"), assistant("l")]
    )
    newline = "Ċ"
    expected = [
        *[("<|im_start|>", 0), ("u", 0), ("s", 0), ("e", 0), ("r", 0), (newline, 0)],
        *[("hello", 0), ("<|im_end|>", 0), (newline, 0)],
        *[("<|im_start|>", 0), *((c, 0) for c in "assistant"), (newline, 0)],
        *[("hell", 1), ("Ġhello", 1), ("<|im_end|>", 1), (newline, 0)],
        *[("<|im_start|>", 0), ("u", 0), ("s", 0), ("e", 0), ("r", 0), (newline, 0)],
        *[("he", 0), ("<|im_end|>", 0), (newline, 0)],
        *[("<|im_start|>", 0), *((c, 0) for c in "assistant"), (newline, 0)],
        *[("l", 1), ("<|im_end|>", 1), (newline, 0)],
    ]
    assert list(zip(tokenizer.convert_ids_to_tokens(ids), map(int, mask), strict=True)) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["hello hello<|im_end|>", "hello<|im_end|>"]),
        (CHATML_WITHOUT_GENERATION_PROMPT, ["hello hello<|im_end|>", "hello<|im_end|>"]),
        (CHATML_WITH_MARKERS, ["hello hello<|im_end|>", "hello<|im_end|>"]),
        (CHATML_WITH_SHORT_MARKERS, ["hello hello<|im_end|>", "hello<|im_end|>"]),
        (LLAMA3, ["hello hello<|eot_id|>", "hello<|eot_id|>"]),
        # The model itself writes the space that follows [/INST].
        (MISTRAL, [" hello hello</s>", " hello</s>"]),
        (QWEN3, ["hello hello<|im_end|>", "<think>\n\n</think>\n\nhello<|im_end|>"]),
        # No end-of-turn token: the newline of the template is not the assistant's.
        (PLAIN, ["hello hello", "hello"]),
    ],
    ids=["chatml", "no-prompt", "markers", "short-markers", "llama3", "mistral", "qwen3", "plain"],
)
def test_masked_tokens_are_the_answers(template: str, expected: list[str]) -> None:
    tokenizer = make(template)
    ids, mask = render_conversation(tokenizer, TWO_TURNS)
    assert masked_runs(tokenizer, ids, mask) == expected
    assert ids == tokenizer.apply_chat_template(TWO_TURNS, tokenize=True, return_dict=False)


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN3])
def test_answer_starts_where_the_prompt_of_serving_ends(template: str) -> None:
    tokenizer = make(template)
    ids, mask = render_conversation(tokenizer, TWO_TURNS)
    for index in (2, 4):
        prompt = render_prompt(tokenizer, TWO_TURNS[:index])
        assert ids[: len(prompt)] == prompt
        assert mask[len(prompt)]
        assert not mask[len(prompt) - 1]


def test_thinking_is_masked_where_the_template_shows_it() -> None:
    tokenizer = make(QWEN3)
    thought = "<think>\nhe\n</think>\n\n"
    ids, mask = render_conversation(
        tokenizer,
        [user("hello"), assistant(thought + "hello"), user("bye"), assistant(thought + "hell")],
    )
    assert masked_runs(tokenizer, ids, mask) == [
        "hello<|im_end|>",
        "<think>\nhe\n</think>\n\nhell<|im_end|>",
    ]


def test_a_token_across_the_start_of_a_turn_is_left_out() -> None:
    tokenizer = make(CHATML)
    ids, mask = render_conversation(tokenizer, [user("hello"), assistant("\nhello")])
    crossing = tokenizer.convert_tokens_to_ids("ĊĊ")
    assert not mask[ids.index(crossing)]
    assert masked_runs(tokenizer, ids, mask) == ["hello<|im_end|>"]


def test_offsets_without_the_leading_space_still_show_the_crossing_token() -> None:
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer = byte_level_tokenizer(template, bos="<s>", eos="</s>")
    ids, mask = render_conversation(tokenizer, [user("a"), assistant("hello hello")])
    assert masked_runs(tokenizer, ids, mask) == [" hello</s>"]


def test_a_character_of_several_tokens_stays_whole() -> None:
    tokenizer = make(CHATML)
    # The newline before it merges with the header, so offsets are used.
    ids, mask = render_conversation(tokenizer, [user("hello"), assistant("\n🙂 hello")])
    assert masked_runs(tokenizer, ids, mask) == ["🙂 hello<|im_end|>"]


def test_content_that_repeats_elsewhere_does_not_mislead() -> None:
    tokenizer = make(CHATML)
    messages = [user("hello"), assistant("PLACEHOLDER"), user("PLACEHOLDER"), assistant("hello")]
    ids, mask = render_conversation(tokenizer, messages)
    assert masked_runs(tokenizer, ids, mask) == ["PLACEHOLDER<|im_end|>", "hello<|im_end|>"]
    assert mask.count(True) == len("PLACEHOLDER") + 3


def test_empty_answer_and_answer_before_any_question() -> None:
    tokenizer = make(CHATML)
    ids, mask = render_conversation(tokenizer, [assistant("hello"), user("he"), assistant("")])
    assert masked_runs(tokenizer, ids, mask) == ["hello<|im_end|>", "<|im_end|>"]


def test_conversation_without_answers_has_an_empty_mask() -> None:
    _, mask = render_conversation(make(CHATML), [user("hello")])
    assert not any(mask)


def test_special_tokens_come_from_the_template_only() -> None:
    tokenizer = make(LLAMA3)
    bos = "<|begin_of_text|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    prompt = render_prompt(tokenizer, [user("hello")])
    ids, _ = render_conversation(tokenizer, [user("hello"), assistant("hello")])
    assert prompt.count(tokenizer.bos_token_id) == ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(prompt).endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")


def test_tokenizer_without_template() -> None:
    with pytest.raises(UserError, match="no chat template"):
        render_prompt(make(None), [user("hello")])


def test_template_that_refuses() -> None:
    tokenizer = make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        render_prompt(tokenizer, [user("hello")])


def test_template_that_drops_a_turn() -> None:
    last_only = "{{ '<|im_start|>' + messages[-1]['content'] + '<|im_end|>' }}"
    with pytest.raises(UserError, match="message 2"):
        render_conversation(make(last_only), TWO_TURNS)


def test_tokenizer_without_offsets_is_refused_only_when_they_are_needed() -> None:
    class Slow:
        is_fast = False

        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def __call__(self, text: str, add_special_tokens: bool) -> Any:
            return self._tokenizer(text, add_special_tokens=add_special_tokens)

    slow = Slow(make(CHATML))
    _, mask = render_conversation(slow, [user("hello"), assistant("hello")])
    assert mask.count(True) == 2
    with pytest.raises(UserError, match="fast tokenizer"):
        render_conversation(slow, [user("hello"), assistant("\nhello")])

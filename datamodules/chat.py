"""Chat templates applied exactly once, and which tokens the assistant itself would produce.

The mask of a conversation is found in three steps: render the whole conversation once, find the characters of each
assistant turn in that text, map them to tokens of that text. Token ids are never edited or re-made from pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from drafters.errors import UserError

Span = tuple[int, int]

THINKING_VARIABLE = "enable_thinking"

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def render_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, thinking: bool | None = None
) -> list[int]:
    """Token ids of the messages followed by the header of the assistant's next turn.

    Special tokens come from the template alone; the tokenizer adds none of its own. `thinking` sets the template's variable
    `enable_thinking`; None leaves it to the template.

    Raises:
        UserError: no chat template, it has no such variable, or it refuses the messages.
    """
    variables: dict[str, Any] = {}
    if thinking is not None:
        if THINKING_VARIABLE not in template_text(tokenizer):
            raise UserError(
                f"thinking: the chat template of {tokenizer.name_or_path!r} has no variable {THINKING_VARIABLE}; leave "
                "thinking unset for this model"
            )
        variables[THINKING_VARIABLE] = thinking
    return _encode(tokenizer, _render(tokenizer, messages, add_generation_prompt=True, **variables))


def render_conversation(
    tokenizer: Any, messages: Sequence[Mapping[str, str]]
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation and its response mask, both of the same length.

    The mask is True on what the model would generate after each generation prompt: the content (with a think block that
    the template shows) and the end-of-turn token. It is False on headers, user and system tokens, and on white
    space that the template writes after the end-of-turn token.

    Turns are located by the template's `{% generation %}` markers if it has them, else by rendering: a turn starts
    where the generation prompt that the template writes after the earlier messages ends, and ends where the text
    that follows its content begins. Both also hold when the template rewrites earlier turns (drops their
    think blocks, say). A boundary is mapped to tokens by encoding the text before it, which must give a prefix of
    the ids; if a merge crosses the boundary, the tokenizer's character offsets decide, and the crossing token, which
    the model cannot have produced alone, is not part of the mask.

    Raises:
        UserError: no chat template, the template refuses the messages, or a turn's tokens cannot be told exactly.
    """
    text = _render(tokenizer, messages, add_generation_prompt=False)
    ids = _encode(tokenizer, text)
    spans = _marked_spans(tokenizer, messages, text)
    if not spans:
        spans = [
            _turn_span(tokenizer, messages, index, text)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    mask = [False] * len(ids)
    boundaries = _TokenBoundaries(tokenizer, text, ids)
    for start, end in spans:
        first, stop = boundaries.first_from(start), boundaries.count_until(end)
        mask[first:stop] = [True] * (stop - first)
    return ids, mask


def template_text(tokenizer: Any) -> str:
    """The chat template that renders plain conversations.

    Raises:
        UserError: the tokenizer has none.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "use a chat model, or add chat_template.jinja to its directory"
        ) from error


def _render(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool, **variables: Any
) -> str:
    from jinja2 import TemplateError

    template = template_text(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **variables,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise UserError(f"the chat template refuses the conversation: {error}") from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _marked_spans(tokenizer: Any, messages: Sequence[Mapping[str, str]], text: str) -> list[Span]:
    """Characters between generation markers, [] for a template without them (or with none active)."""
    template = template_text(tokenizer)
    if not _GENERATION_MARKER.search(template):
        return []
    # Not the tokenizer's own mask: it loses a span whose first character no token's offsets cover.
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, marked = cast(
        tuple[list[str], list[list[Span]]],
        render_jinja_template(
            conversations=[[dict(message) for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        ),
    )
    if rendered[0] != text:
        raise UserError("the chat template renders differently with its generation markers on")
    ends = _end_of_turn_tokens(tokenizer)
    spans = []
    for start, end in marked[0]:
        body = text[start:end].rstrip()
        if body.endswith(ends):
            spans.append((start, start + len(body)))
        elif body:
            spans.append((start, _past_end_of_turn(text, end, ends)))
    return spans


def _turn_span(tokenizer: Any, messages: Sequence[Mapping[str, str]], index: int, text: str) -> Span:
    """Characters of assistant turn `index` in the rendered conversation, end-of-turn token included."""
    before, after = _around_content(tokenizer, messages, index, add_generation_prompt=False)
    content_start = len(before) if before is not None and text.startswith(before) else None
    start = _generation_start(tokenizer, messages, index, text, content_start)
    if after is not None and text.endswith(after) and start is not None:
        content_end = len(text) - len(after)
        if start <= content_end:
            return start, _past_end_of_turn(text, content_end, _end_of_turn_tokens(tokenizer))
    raise UserError(
        f"message {index}: the chat template does not show where this assistant turn starts and ends (it "
        "drops the turn or renders its surroundings depending on its content); use a template with "
        "{% generation %} markers"
    )


def _generation_start(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    index: int,
    text: str,
    content_start: int | None,
) -> int | None:
    """Where the model starts to speak in turn `index`: after the generation prompt, else at the content.

    The generation prompt is what a rendering of the earlier messages alone has after the last of them; it
    is looked up at the same place of the whole text, so earlier text may be rewritten.
    """
    if index == 0:
        return content_start
    earlier = messages[:index]
    try:
        _, prompt = _around_content(tokenizer, earlier, index - 1, add_generation_prompt=True)
        _, bare = _around_content(tokenizer, earlier, index - 1, add_generation_prompt=False)
        _, rest = _around_content(tokenizer, messages, index - 1, add_generation_prompt=False)
    except UserError:  # a template may refuse a conversation that is cut here
        return content_start
    if prompt is None or rest is None or not rest.startswith(prompt) or not text.endswith(rest):
        return content_start
    start = len(text) - len(rest) + len(prompt)
    # A template that ignores add_generation_prompt writes the header, if any, as part of the turn.
    if prompt == bare and content_start is not None and text[start:content_start].strip():
        return content_start
    return start


def _around_content(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], index: int, *, add_generation_prompt: bool
) -> tuple[str, str] | tuple[None, None]:
    """Rendered text before and after the content of message `index`; Nones if it is not shown once.

    A placeholder is rendered in the content's place, so content that repeats elsewhere cannot mislead.
    """
    placeholder = "PLACEHOLDER"
    while any(placeholder in message["content"] for message in messages):
        placeholder += "X"
    changed = [dict(message) for message in messages]
    changed[index]["content"] = placeholder
    parts = _render(tokenizer, changed, add_generation_prompt=add_generation_prompt).split(placeholder)
    return (parts[0], parts[1]) if len(parts) == 2 else (None, None)


def _end_of_turn_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Special tokens that may end a turn: all but a begin-of-text token that is not also the end's."""
    special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    special |= set(tokenizer.all_special_tokens)
    if tokenizer.bos_token != tokenizer.eos_token:
        special.discard(str(tokenizer.bos_token))
    return tuple(sorted(special, key=len, reverse=True))


def _past_end_of_turn(text: str, content_end: int, ends: tuple[str, ...]) -> int:
    """End of the end-of-turn token that follows the content; `content_end` if none does."""
    following = text[content_end:]
    token_start = content_end + len(following) - len(following.lstrip())
    for token in ends:
        if text.startswith(token, token_start):
            return token_start + len(token)
    return content_end


class _TokenBoundaries:
    """Maps character positions of a rendered text to positions in its token ids."""

    def __init__(self, tokenizer: Any, text: str, ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._ids = ids
        self._extents: list[Span] | None = None

    def first_from(self, position: int) -> int:
        """Index of the first token that begins at or after the character `position`."""
        return self._index(position, lambda extent: extent[0] < position)

    def count_until(self, position: int) -> int:
        """Number of leading tokens that end at or before the character `position`."""
        return self._index(position, lambda extent: extent[1] <= position)

    def _index(self, position: int, before: Callable[[Span], bool]) -> int:
        prefix = _encode(self._tokenizer, self._text[:position])
        if self._ids[: len(prefix)] == prefix:
            return len(prefix)
        return sum(before(extent) for extent in self._token_extents())

    def _token_extents(self) -> list[Span]:
        """Characters of each token, without gaps."""
        if self._extents is None:
            if not self._tokenizer.is_fast:
                raise UserError(
                    "a token crosses the boundary of an assistant turn, and this tokenizer has no character "
                    "offsets to place it; use a fast tokenizer"
                )
            offsets = self._tokenizer(self._text, add_special_tokens=False, return_offsets_mapping=True)[
                "offset_mapping"
            ]
            # Byte-level tokenizers may report a token without its leading space: that space is the gap.
            ends = [0, *(end for _, end in offsets)]
            self._extents = [
                (min(start, previous), end)
                for (previous, _), (start, end) in zip(pairwise(ends), offsets, strict=True)
            ]
        return self._extents

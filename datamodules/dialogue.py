"""Conversations whose answers the target is giving, turn by turn.

Later turns are prompted with the target's own answers, rendered by the chat template from their text as a chat server
does it. If that rendering begins with exactly the ids so far, the turns form one document; if not (the template rewrites
history, or an answer does not tokenise back to the generated ids), a new document starts with the rendered prompt, so
generated ids are never replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datamodules.chat import render_prompt
from datamodules.prompts import Conversation, Message
from datamodules.responses import FinishReason, ResponseRow, Sampling
from drafters.errors import UserError


@dataclass
class GeneratedDocument:
    """A prompt and what follows it; `spans` are the ranges of `response_ids` that the target produced."""

    first_turn: int
    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish_reason: FinishReason = "stop"


@dataclass
class Dialogue:
    """A conversation under way: `history` is what has been said, `pending` is still to be asked.

    `thinking` is handed to the chat template; `after_length` also asks on after an answer that ran into the token limit.
    """

    conversation: Conversation
    history: list[Message]
    pending: list[list[Message]]
    prompt_ids: list[int]
    documents: list[GeneratedDocument]
    thinking: bool | None = None
    after_length: bool = False

    @classmethod
    def begin(
        cls,
        conversation: Conversation,
        tokenizer: Any,
        *,
        thinking: bool | None = None,
        after_length: bool = False,
    ) -> Dialogue:
        """The dialogue before its first answer."""
        first, *pending = user_turns(conversation)
        prompt_ids = render_prompt(tokenizer, first, thinking=thinking)
        documents = [GeneratedDocument(0, prompt_ids)]
        return cls(conversation, first, pending, prompt_ids, documents, thinking, after_length)

    def accept(self, ids: list[int], reason: FinishReason, text: str) -> None:
        """Add the target's answer to the current prompt."""
        document = self.documents[-1]
        start = len(document.response_ids)
        document.response_ids += ids
        document.spans.append((start, start + len(ids)))
        document.finish_reason = reason
        self.history = [*self.history, {"role": "assistant", "content": text}]

    def ask_next(self, tokenizer: Any, max_prompt_tokens: int | None) -> bool:
        """Make the prompt of the next turn; False if there is none."""
        document = self.documents[-1]
        if not self.pending or (document.finish_reason == "length" and not self.after_length):
            return False
        history = self.history + self.pending[0]
        prompt_ids = render_prompt(tokenizer, history, thinking=self.thinking)
        if max_prompt_tokens is not None and len(prompt_ids) > max_prompt_tokens:
            return False
        self.history, self.prompt_ids = history, prompt_ids
        self.pending = self.pending[1:]
        known = document.prompt_ids + document.response_ids
        if prompt_ids[: len(known)] == known:
            document.response_ids += prompt_ids[len(known) :]
        else:
            turn = sum(message["role"] == "assistant" for message in history)
            self.documents.append(GeneratedDocument(turn, prompt_ids))
        return True

    def rows(self, target_id: str, sampling: Sampling) -> list[ResponseRow]:
        """Rows for the store; documents after the first are named after the turn they start with."""
        key = self.conversation.id
        return [
            ResponseRow(
                document_id=f"{key}#turn{d.first_turn}" if d.first_turn else key,
                domain=self.conversation.domain,
                conversation_key=key,
                prompt_ids=d.prompt_ids,
                response_ids=d.response_ids,
                finish_reason=d.finish_reason,
                target_id=target_id,
                sampling=sampling,
                response_spans=d.spans if len(d.spans) > 1 else None,
            )
            for d in self.documents
        ]


def user_turns(conversation: Conversation) -> list[list[Message]]:
    """Messages without the assistant's, cut after each user message.

    Raises:
        UserError: no user message.
    """
    turns: list[list[Message]] = [[]]
    for message in conversation.messages:
        if message["role"] == "assistant":
            continue
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    if len(turns) == 1:
        raise UserError(f"conversation {conversation.id!r} ({conversation.source}): no user message")
    return turns[:-1]

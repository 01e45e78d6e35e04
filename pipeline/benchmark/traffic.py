"""Conversations asked in a closed loop: so many under way at a time, each turn after the answer to the one before."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from datamodules.dialogue import Dialogue
from datamodules.language import guess_language
from datamodules.prompts import Conversation
from drafters.errors import UserError
from pipeline.benchmark.answers import Answer, Question
from pipeline.config import BenchmarkConfig


class Completer(Protocol):
    """What answers turns."""

    def prepare(self, concurrency: int) -> None: ...

    def complete(self, question: Question) -> Answer: ...

    def verified_share(self) -> float | None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class Played:
    """Answers in the conversations' order, and seconds from the first question to the last answer.

    `short` conversations ended before their last turn, whose prompt did not fit.
    """

    answers: list[Answer]
    wall_seconds: float
    short: int = 0


@dataclass
class Asker:
    """Turns conversations into questions.

    Attributes:
        tokenizer: the target's; used by one thread at a time, as fast tokenizers demand.
        config: the section.
        seed: of the run; each turn's seed follows from it and the conversation, whatever the method or order.
        positions: longest request in tokens; None for no limit.
    """

    tokenizer: Any
    config: BenchmarkConfig
    seed: int
    positions: int | None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def longest_prompt(self) -> int | None:
        """Prompts that leave room for the answer.

        Raises:
            UserError: when no prompt does.
        """
        if self.positions is None:
            return None
        room = self.positions - self.config.max_new_tokens
        if room < 1:
            raise UserError(
                f"benchmark.max_new_tokens: {self.config.max_new_tokens} leaves no room for a prompt in a context of "
                f"{self.positions} tokens"
            )
        return room

    def fitting(self, conversations: Sequence[Conversation]) -> tuple[list[Conversation], int]:
        """Conversations whose first prompt fits, and how many do not."""
        room = self.longest_prompt
        kept = [c for c in conversations if room is None or len(self._begin(c).prompt_ids) <= room]
        return kept, len(conversations) - len(kept)

    def play(
        self,
        completer: Completer,
        conversations: Sequence[Conversation],
        concurrency: int,
        on_done: Callable[[], object] = lambda: None,
    ) -> Played:
        """Ask all conversations.

        Raises:
            UserError: the first failure; nothing further is asked then.
        """
        # first prompts before the clock starts: a server's user has them at hand
        dialogues = [self._begin(conversation) for conversation in conversations]
        stop = threading.Event()
        started = time.perf_counter()
        with ThreadPoolExecutor(concurrency, thread_name_prefix="user") as pool:
            futures = [pool.submit(self._talk, completer, dialogue, stop) for dialogue in dialogues]
            for future in futures:
                future.add_done_callback(lambda _: on_done())
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                completer.abort()
                raise
            answers = [future.result() for future in futures]
        return Played(
            [answer for of_one in answers for answer in of_one],
            time.perf_counter() - started,
            sum(bool(dialogue.pending) for dialogue in dialogues),
        )

    def warm_up(self, completer: Completer, conversation: Conversation) -> None:
        """Decode a little, so that what happens once is not timed."""
        tokens = min(self.config.warmup_tokens, self.config.max_new_tokens)
        if tokens:
            completer.complete(self._question(self._begin(conversation), 0, tokens))

    def _begin(self, conversation: Conversation) -> Dialogue:
        with self._lock:
            return Dialogue.begin(
                conversation, self.tokenizer, thinking=self.config.thinking, after_length=True
            )

    def _talk(self, completer: Completer, dialogue: Dialogue, stop: threading.Event) -> list[Answer]:
        answers: list[Answer] = []
        while not stop.is_set():
            question = self._question(dialogue, len(answers), self.config.max_new_tokens)
            answer = completer.complete(question)
            answers.append(answer)
            if not dialogue.pending:
                return answers
            with self._lock:
                spoken = answer.output_ids[:-1] if answer.finish_reason == "stop" else answer.output_ids
                text = str(self.tokenizer.decode(spoken, skip_special_tokens=True))
                dialogue.accept(answer.output_ids, answer.finish_reason, text)
                if not dialogue.ask_next(self.tokenizer, self.longest_prompt):
                    return answers
        return answers

    def _question(self, dialogue: Dialogue, turn: int, max_new_tokens: int) -> Question:
        conversation = dialogue.conversation
        digest = hashlib.sha256(f"{self.seed}\x1f{conversation.id}\x1f{turn}".encode()).digest()
        return Question(
            document_id=conversation.id,
            turn=turn,
            domain=conversation.domain,
            language=conversation.language or guess_language(_asked(conversation)),
            prompt_ids=dialogue.prompt_ids,
            max_new_tokens=max_new_tokens,
            seed=int.from_bytes(digest[:4]),
        )


def _asked(conversation: Conversation) -> str:
    return "\n".join(m["content"] for m in conversation.messages if m["role"] == "user")

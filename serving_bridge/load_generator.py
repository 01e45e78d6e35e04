"""A small closed-loop load generator: some requests at a time against a running server, until the prompts are used up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from serving_bridge.server import SwapError
from serving_bridge.sglang_http import SGLangClient


@dataclass(frozen=True)
class LoadRequest:
    """One request in token ids."""

    request_id: str
    prompt_ids: list[int]
    conversation: str
    domain: str


@dataclass
class LoadGenerator:
    """Plays users from threads of its own.

    Attributes:
        client: makes one for each thread.
        max_new_tokens: of each answer.
        stop_ids: tokens that end an answer.
        concurrency: requests under way at a time.
        on_done: told the number of finished requests after each.
    """

    client: Callable[[], SGLangClient]
    max_new_tokens: int
    stop_ids: Sequence[int]
    concurrency: int = 4
    on_done: Callable[[int], object] = lambda done: None
    done: int = 0
    failures: list[str] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, requests: Sequence[LoadRequest]) -> None:
        """Begin; `over` tells when all were answered."""
        queue: SimpleQueue[LoadRequest] = SimpleQueue()
        for request in requests:
            queue.put(request)
        self._threads = [
            threading.Thread(target=self._play, args=(queue,), name=f"user-{n}", daemon=True)
            for n in range(self.concurrency)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def over(self) -> bool:
        """Whether nothing is under way any more."""
        return not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait for the last answer."""
        for thread in self._threads:
            thread.join()

    def _play(self, queue: SimpleQueue[LoadRequest]) -> None:
        client = self.client()
        while True:
            try:
                request = queue.get_nowait()
            except Empty:
                return
            try:
                client.generate(self._body(request))
            except SwapError as error:
                with self._lock:
                    self.failures.append(str(error))
            with self._lock:
                self.done += 1
                done = self.done
            self.on_done(done)

    def _body(self, request: LoadRequest) -> dict[str, object]:
        return {
            "rid": request.request_id,
            "input_ids": request.prompt_ids,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": self.max_new_tokens,
                "stop_token_ids": list(self.stop_ids),
                "custom_params": {
                    "draftsmith_domain": request.domain,
                    "draftsmith_conversation": request.conversation,
                },
            },
        }

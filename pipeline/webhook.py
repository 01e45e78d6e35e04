"""Events posted as JSON to a webhook, from a thread of its own: neither training nor serving waits for the receiver."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from drafters.errors import UserError
from pipeline.alarms import KEPT_REFUSALS, AlarmBoard
from pipeline.config import AlarmsConfig
from pipeline.console import say

FIRST_PAUSE_S = 0.5
"""Between the first and the second attempt; it doubles from there."""


class DeliveryFailed(Exception):
    """The receiver did not take an event."""


class DeliveryRefused(DeliveryFailed):
    """The receiver will not take it another time either."""


class Webhook:
    """Posts one event at a time, a few attempts each.

    Args:
        url: http(s) address; it may be a secret and is named in messages by its host only.
        timeout_s: for connecting, and for the answer's head. Bodies and redirects are not followed.
        attempts: at most; what the receiver refuses for good (4xx but 408 and 429) gets one.
        sleep: between attempts.
    """

    def __init__(
        self, url: str, timeout_s: float, attempts: int, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._url, self._timeout_s, self._attempts, self._sleep = url, timeout_s, attempts, sleep
        self.host = urlsplit(url).hostname or ""
        self.patience_s = attempts * timeout_s + FIRST_PAUSE_S * (2 ** (attempts - 1) - 1)

    def post(self, event: dict[str, Any]) -> None:
        """Deliver one event.

        Raises:
            DeliveryFailed: naming the host and what the last attempt met; `DeliveryRefused` for what it refuses for good.
        """
        import requests

        problem = ""
        for attempt in range(self._attempts):
            if attempt:
                self._sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                with requests.post(
                    self._url, json=event, timeout=self._timeout_s, allow_redirects=False, stream=True
                ) as answer:
                    status = answer.status_code
            except requests.RequestException as error:
                problem = type(error).__name__
                continue
            if 200 <= status < 300:
                return
            problem = f"status {status}"
            if status < 500 and status not in (408, 429):
                raise DeliveryRefused(f"{self.host}: {problem}")
        raise DeliveryFailed(f"{self.host}: {problem}")


class Courier:
    """Delivers events in order from a daemon thread; nothing it meets reaches the caller.

    `refused` says that the first event that was not delivered was refused for good.
    """

    def __init__(self, webhook: Webhook, events: Sequence[dict[str, Any]]) -> None:
        self._webhook = webhook
        self._events = list(events)
        self._sent: list[dict[str, Any]] = []
        self._problem = ""
        self.refused = False
        self._thread = threading.Thread(target=self._run, name="alarm-courier", daemon=True)
        self._thread.start()

    def finish(self) -> tuple[list[dict[str, Any]], str]:
        """Wait as long as one event's attempts may take; what was delivered by then, and what went wrong last."""
        self._thread.join(self._webhook.patience_s)
        problem = self._problem or (f"{self._webhook.host}: no answer yet" if self._thread.is_alive() else "")
        return list(self._sent), problem

    def _run(self) -> None:
        for event in self._events:
            try:
                self._webhook.post(event)
            except Exception as error:
                # by name only: other libraries put the address into their messages
                self._problem = str(error) if isinstance(error, DeliveryFailed) else type(error).__name__
                self.refused = isinstance(error, DeliveryRefused)
                # the rest goes to the same receiver: it waits for the next run
                return
            self._sent.append(event)


def settle(board: AlarmBoard, courier: Courier) -> None:
    """Wait for a courier, and note on the board what it delivered and what was refused."""
    sent, problem = courier.finish()
    board.delivered(sent)
    dropped = board.refused() if courier.refused else None
    if dropped is not None:
        say(f"alarms: given up after {KEPT_REFUSALS} refusals ({problem}): {dropped['text']}")
    elif problem:
        say(f"alarms: {len(board.undelivered)} not delivered, they go out with the next run ({problem})")


def webhook_for(config: AlarmsConfig) -> Webhook | None:
    """The webhook that the environment names, if it does.

    Raises:
        UserError: the address is not http(s).
    """
    url = os.environ.get(config.webhook_env, "").strip()
    if not url:
        return None
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
        raise UserError(f"environment variable {config.webhook_env}: not an http:// or https:// address")
    return Webhook(url, config.timeout_s, config.attempts)

"""A thin client of a running SGLang server: its control endpoints, with keys, deadlines and clear errors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests

from serving_bridge.server import ServerLost, SwapError
from serving_bridge.sglang_plugin import STATUS_KEY

CONTROL_PATHS = {
    "/pause_generation",
    "/continue_generation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/weights_checker",
}
"""Endpoints that take the admin key where a server has one."""
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
RESUME_ATTEMPTS = 6
RESUME_WAIT_S = 0.2
"""Doubled at each attempt: about six seconds in all."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens, and the keys it asks for.

    Control endpoints change what a server runs, so an address off this machine needs a key.
    """

    url: str
    api_key: str | None = None
    admin_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"{self.url}: not the address of a server; write http://HOST:PORT")
        if parts.hostname not in LOOPBACK and not (self.admin_key or self.api_key):
            raise ValueError(
                f"{self.url}: not on this machine, so its control endpoints must be protected; start the server with "
                "--admin-api-key and set the key here"
            )


class SGLangClient:
    """Calls that answer or raise; nothing is retried here.

    Args:
        address: of the server.
        timeout_s: for a single call.
    """

    def __init__(self, address: ServerAddress, timeout_s: float = 30.0) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._session = requests.Session()
        # a proxy or a .netrc of the environment must neither see nor replace the key
        self._session.trust_env = False

    @property
    def url(self) -> str:
        return self.address.url.rstrip("/")

    def server_info(self) -> dict[str, Any]:
        """Start-up arguments and live state."""
        info: dict[str, Any] = self._call("GET", "/server_info")
        return info

    def weight_version(self) -> str:
        """What the server calls its weights, as the latest update named them."""
        return str(self._call("GET", "/model_info").get("weight_version", "unknown"))

    def plugin_status(self) -> dict[str, Any] | None:
        """What draftsmith's plugin tells of itself; None for a server without it."""
        return plugin_status_of(self.server_info())

    def checksum(self, selector: str) -> str:
        """Of the weights of `draft` or `target`, one for all ranks."""
        answer = self._call("POST", "/weights_checker", {"action": "checksum", "selector": selector})
        try:
            sums = [str(rank["per_gpu_checksum"]) for rank in answer["ranks"]]
        except (KeyError, TypeError):
            sums = []
        if not sums:
            raise SwapError(f"{self.url}/weights_checker: answers without checksums of the {selector}")
        return "+".join(sums)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post to a control endpoint.

        Raises:
            SwapError: when the server refuses.
            ServerLost: when it does not answer.
        """
        answer: dict[str, Any] = self._call("POST", path, body)
        if answer.get("success") is False:
            raise SwapError(f"{self.url}{path}: {answer.get('message') or answer}")
        return answer

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """One request, for traffic and tests."""
        answer: dict[str, Any] = self._call("POST", "/generate", body)
        return answer

    @contextlib.contextmanager
    def paused(self) -> Iterator[Pause]:
        """Requests wait where they are; they go on whatever happens inside."""
        pause = Pause()
        started = time.perf_counter()
        try:
            self.post("/pause_generation", {"mode": "in_place"})
            yield pause
        finally:
            self._resume()
            pause.milliseconds = (time.perf_counter() - started) * 1000

    def resume(self) -> None:
        """Let requests go on; harmless where nothing is paused."""
        self.post("/continue_generation", {})

    def _resume(self) -> None:
        for attempt in range(RESUME_ATTEMPTS):
            try:
                self.resume()
                return
            except SwapError as error:
                # a paused server serves nobody: the one call worth repeating
                if attempt == RESUME_ATTEMPTS - 1:
                    raise ServerLost(f"{error}; should the server be paused, restart it") from error
                time.sleep(RESUME_WAIT_S * 2**attempt)

    def _headers(self, path: str) -> dict[str, str]:
        # with two keys, each class of endpoints takes its own alone
        first, second = self.address.api_key, self.address.admin_key
        if path in CONTROL_PATHS:
            first, second = second, first
        key = first or second
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._session.request(
                method, self.url + path, json=body, headers=self._headers(path), timeout=self.timeout_s
            )
        except requests.RequestException as error:
            reason = type(error).__name__
            raise ServerLost(f"{self.url}{path}: no answer ({reason}); is the server running?") from error
        if response.status_code in {401, 403}:
            raise SwapError(
                f"{self.url}{path}: the server refuses the key; give the admin key it was started with"
            )
        try:
            answer = response.json()
        except ValueError:
            answer = {"message": response.text[:200]}
        if response.status_code >= 400:
            said = (
                answer.get("message") or answer.get("error") or answer if isinstance(answer, dict) else answer
            )
            raise SwapError(f"{self.url}{path}: {response.status_code}: {said}")
        return answer


@dataclass
class Pause:
    """How long requests waited; set when they go on."""

    milliseconds: float = 0.0


def plugin_status_of(server_info: dict[str, Any]) -> dict[str, Any] | None:
    """The plugin's part of a `/server_info` answer."""
    for state in server_info.get("internal_states") or []:
        if isinstance(state, dict) and isinstance(state.get(STATUS_KEY), dict):
            return dict(state[STATUS_KEY])
    return None

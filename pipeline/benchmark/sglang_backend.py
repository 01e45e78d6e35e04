"""Running SGLang servers as what benchmarks are run against. Each server is one method: what it was started with."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drafters.errors import UserError
from pipeline.benchmark.answers import Answer, Question, answer_from_server
from pipeline.benchmark.methods import AR, DrafterChoice, Method
from pipeline.config import Config
from pipeline.fleet import client_for
from serving_bridge.server import SwapError
from serving_bridge.sglang_http import SGLangClient, plugin_status_of

ALGORITHMS = {"NONE": AR, "DFLASH": "fixed", "ADAFLASH": "adaflash", "D3D": "d3d-sync"}
"""Methods by SGLang's names; other algorithms are measured under their own in small letters."""


@dataclass(frozen=True)
class RunningServer:
    """A server and what it says of itself; `identity` changes when what it serves does."""

    url: str
    method: Method
    block_size: int
    drafter_version: str
    identity: dict[str, Any]
    target_id: str | None
    context_length: int | None
    samples: bool


def find_servers(config: Config, urls: Sequence[str]) -> list[RunningServer]:
    """The servers at these addresses; each must answer.

    Raises:
        UserError: none named, one that does not answer, or two that run the same method.
    """
    if not urls:
        raise UserError("--url: the backend sglang needs the address of a running server, http://HOST:PORT")
    servers = []
    for url in urls:
        try:
            client = client_for(config, url)
            servers.append(_examined(url, client.server_info(), client.weight_version()))
        except SwapError as error:
            raise UserError(f"--url {url}: {error}") from error
    labels = [server.method.label for server in servers]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"--url: two servers run {repeated[0]}; evaluate them one after another")
    return servers


def _examined(url: str, info: dict[str, Any], weights: str) -> RunningServer:
    algorithm = str(info.get("speculative_algorithm") or "NONE")
    status = plugin_status_of(info) or {}
    drafter = status.get("drafter") or {}
    block_size = status.get("block_size") or info.get("speculative_num_draft_tokens")
    plain = algorithm == "NONE"
    if not plain and not block_size:
        raise UserError(f"--url {url}: does not tell the size of its blocks (speculative_num_draft_tokens)")
    context = info.get("context_length")
    return RunningServer(
        url=url,
        method=Method(ALGORITHMS.get(algorithm, algorithm.lower())),
        block_size=1 if plain else int(block_size or 1),
        drafter_version="" if plain else str(drafter.get("drafter_version") or weights),
        identity={
            "url": url,
            "model_path": info.get("model_path"),
            "algorithm": algorithm,
            "draft": info.get("speculative_draft_model_path"),
            "drafter_version": drafter.get("drafter_version"),
            "weight_version": weights,
            "block_size": block_size,
            "settings": {key: value for key, value in sorted(info.items()) if _shapes_serving(key)},
        },
        target_id=status.get("target_id"),
        context_length=int(context) if context else None,
        # without the kernel, this build decodes sampled requests greedily
        samples=bool(status.get("sampling_verified", True)),
    )


SERVING_SETTINGS = {
    "version", "dtype", "quantization", "kv_cache_dtype", "tp_size", "dp_size", "pp_size", "max_running_requests",
    "attention_backend", "sampling_backend", "disable_radix_cache", "disable_cuda_graph", "disable_overlap_schedule",
    "chunked_prefill_size", "mem_fraction_static", "device",
}  # fmt: skip
"""What a server was started with that its figures depend on, beside everything speculative."""


def _shapes_serving(key: str) -> bool:
    return key in SERVING_SETTINGS or key.startswith("speculative_")


def choose_servers(servers: Sequence[RunningServer], methods: Sequence[Method] | None) -> list[RunningServer]:
    """Those that run the methods asked for, in their order; all if none is asked for.

    Raises:
        UserError: a method that no server runs.
    """
    if methods is None:
        return sorted(servers, key=lambda server: not server.method.plain)
    by_label = {server.method.label: server for server in servers}
    for method in methods:
        if method.label not in by_label:
            running = ", ".join(f"{server.url} runs {server.method.label}" for server in servers)
            raise UserError(f"--method {method.label}: no server given runs it ({running})")
    return [by_label[method.label] for method in methods]


def require_served(servers: Sequence[RunningServer], drafters: Sequence[DrafterChoice]) -> None:
    """Benchmarks leave servers as they are, so a drafter must be served already.

    Raises:
        UserError: for one that is not.
    """
    for server in servers:
        if drafters and not server.method.plain:
            versions = [drafter.drafter_version for drafter in drafters]
            if server.drafter_version not in versions:
                raise UserError(
                    f"--drafter: {server.url} serves {server.drafter_version}, not {', '.join(versions)}; swap it in first "
                    "(`draftsmith deploy swap`), or leave --drafter out"
                )


class SGLangBackend:
    """Talks to the servers; `stop_ids` end an answer."""

    def __init__(self, config: Config, stop_ids: Sequence[int]) -> None:
        self.config = config
        self.stop_ids = list(stop_ids)

    @contextlib.contextmanager
    def serving(self, server: RunningServer) -> Iterator[ServerSession]:
        """A session with one server."""
        yield ServerSession(self.config, server, self.stop_ids)


class ServerSession:
    """Asks one server, with a connection for each thread."""

    def __init__(self, config: Config, server: RunningServer, stop_ids: list[int]) -> None:
        self.config = config
        self.server = server
        self.stop_ids = stop_ids
        self._local = threading.local()
        self._rows_before = self._rows()

    def prepare(self, concurrency: int) -> None:
        """Rows that are verified count from here on; how many requests run together is the server's business."""
        self._rows_before = self._rows()

    def complete(self, question: Question) -> Answer:
        """Answer one turn.

        Raises:
            UserError: when the server does not answer, or without what is needed.
        """
        started = time.perf_counter()
        try:
            answer = self._client().generate(self._body(question))
        except SwapError as error:
            raise UserError(str(error)) from error
        seconds = time.perf_counter() - started
        return answer_from_server(
            question, answer, seconds, block_size=self.server.block_size, url=self.server.url
        )

    def verified_share(self) -> float | None:
        """Of drafted rows, how many were verified since `prepare`; all but the plugin's servers do not tell."""
        before, now = self._rows_before, self._rows()
        if before is None or now is None or now[1] == before[1]:
            return None
        return (now[0] - before[0]) / (now[1] - before[1])

    def abort(self) -> None:
        """What is under way ends by itself; a server has other users, whom aborting all would hit."""

    def _rows(self) -> tuple[int, int] | None:
        try:
            status = self._client().plugin_status()
        except SwapError as error:
            raise UserError(str(error)) from error
        if status is None or "drafted_rows" not in status:
            return None
        return int(status["verified_rows"]), int(status["drafted_rows"])

    def _client(self) -> SGLangClient:
        client: SGLangClient | None = getattr(self._local, "client", None)
        if client is None:
            client = client_for(self.config, self.server.url)
            client.timeout_s = self.config.benchmark.request_timeout_s
            self._local.client = client
        return client

    def _body(self, question: Question) -> dict[str, Any]:
        settings = self.config.benchmark
        return {
            # the same turn is asked again by other methods and runs
            "rid": f"{question.request_id}-{uuid.uuid4().hex[:12]}",
            "input_ids": question.prompt_ids,
            "sampling_params": {
                "temperature": settings.temperature,
                "top_p": settings.top_p,
                "top_k": settings.top_k or -1,
                "max_new_tokens": question.max_new_tokens,
                "stop_token_ids": self.stop_ids,
                # benchmarks must not be learned from
                "custom_params": {"draftsmith_log": False},
            },
        }

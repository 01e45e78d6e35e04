"""The control endpoints of an SGLang server, with draftsmith's plugin or without, in this process."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from serving_bridge.sglang_http import CONTROL_PATHS
from serving_bridge.sglang_plugin.drafter_store import DrafterStore
from tests.serving_bridge.swap_samples import BLOCK_SIZE, FakeDraftModel, make_store, snapshot

Answer = tuple[int, Any]
DROP: Answer = (0, None)
"""The connection ends without an answer."""

Interference = Callable[[dict[str, Any]], Answer | None]
"""Is shown the body of a call; what it returns is answered in place of the server's own answer."""

INFO, MODEL_INFO, CHECK = "/server_info", "/model_info", "/weights_checker"
GENERATE = "/generate"
PAUSE, CONTINUE = "/pause_generation", "/continue_generation"
BEGIN, TENSORS, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"


@dataclass
class FakeSGLang:
    """A server.

    store: of the plugin; None for a stock server, whose weights are the payload it was sent last.
    generate: answers requests; None for a server that is asked for nothing.
    before, after: interferences by path, or by `stage`, `commit`, `rollback`; `after` runs when the call has been done.
    """

    model: FakeDraftModel | None = None
    store: DrafterStore | None = None
    key: str | None = None
    admin_key: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)
    target: str = "target-0"
    stock_weights: str = "tensors of v1"
    before: dict[str, Interference] = field(default_factory=dict)
    after: dict[str, Interference] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    paused: bool = False
    updating: bool = False
    weight_version: str = "v1"
    url: str = ""
    generate: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    # what tests look at

    @property
    def version(self) -> str:
        return self.store.served.version if self.store is not None else self.weight_version

    def draft_checksum(self) -> str:
        if self.model is None:
            return hashlib.sha256(self.stock_weights.encode()).hexdigest()
        digest = hashlib.sha256()
        for name, tensor in sorted(snapshot(self.model).items()):
            digest.update(name.encode() + tensor.float().numpy().tobytes())
        return digest.hexdigest()

    def controls(self) -> list[str]:
        """Calls that change something."""
        return [path for path in self.calls if path not in (INFO, MODEL_INFO, CHECK)]

    def bodies_of(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.bodies if called == path]

    def forget_staged(self, first: Path, root: Path) -> None:
        """As after a restart with the same drafter."""
        assert self.model is not None
        self.store = make_store(self.model, first, root)

    # what the server does

    def answer(self, path: str, body: dict[str, Any], authorization: str | None) -> Answer:
        self.calls.append(path)
        self.bodies.append((path, body))
        # as SGLang does: with two keys, each class of endpoints takes its own alone
        key = self.admin_key if self.admin_key is not None and path in CONTROL_PATHS else self.key
        if key is not None and authorization != f"Bearer {key}":
            return 401, {"error": "Unauthorized"}
        names = [path]
        if path == TENSORS and body.get("load_format") == "draftsmith":
            names.append(self._order(body)["step"])
        for name in names:
            if name in self.before and (instead := self.before[name](body)) is not None:
                return instead
        answer = self._answer(path, body)
        for name in names:
            if name in self.after and (instead := self.after[name](body)) is not None:
                return instead
        return answer

    def _order(self, body: dict[str, Any]) -> dict[str, Any]:
        order: dict[str, Any] = json.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        return order

    def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path == INFO:
            return 200, self.server_info()
        if path == MODEL_INFO:
            # /server_info holds what the server was started with
            return 200, {"weight_version": self.weight_version}
        if path == CHECK:
            checksum = {"draft": self.draft_checksum(), "target": self.target}[body["selector"]]
            return 200, {"success": True, "message": "", "ranks": [{"per_gpu_checksum": checksum}]}
        if path == GENERATE and self.generate is not None:
            return 200, self.generate(body)
        if path == PAUSE:
            assert body == {"mode": "in_place"}
            self.paused = True
        elif path == CONTINUE:
            self.paused = False
        elif not self.paused:
            return self._done(False, "without a pause this call would wait for all requests")
        elif path == BEGIN:
            assert body == {"selector": "draft"}
            self.updating = True
        elif path == END:
            self.updating = False
        elif path == TENSORS:
            assert (body["selector"], body["flush_cache"]) == ("draft", False)
            return self._update(body)
        else:
            return 404, {"detail": "Not Found"}
        return 200, {"message": "done", "status": "ok"}

    def _update(self, body: dict[str, Any]) -> Answer:
        if body["load_format"] == "draftsmith" and self.store is not None:
            payload = base64.b64decode(body["serialized_named_tensors"][0])
            self.steps.append(self._order(body)["step"])
            return self._done(*self.store.handle(payload))
        if body["load_format"] is not None or not self.updating:
            return self._done(False, "unknown load format, or no update has begun")
        self.stock_weights = body["serialized_named_tensors"][0]
        self.weight_version = body["weight_version"]
        return self._done(True, "loaded")

    def _done(self, success: bool, message: str) -> Answer:
        return 200 if success else 400, {"success": success, "message": message}

    def server_info(self) -> dict[str, Any]:
        states: list[dict[str, Any]] = [{"avg_spec_accept_length": 2.0}]
        if self.store is not None:
            states[0]["draftsmith"] = {
                "missing_hooks": [],
                "block_size": BLOCK_SIZE,
                "drafter": self.store.status(),
                **self.plugin,
            }
        return {"weight_version": "default", "tp_size": 1, "internal_states": states, **self.info}


@contextlib.contextmanager
def serving(fake: FakeSGLang) -> Iterator[FakeSGLang]:
    """Let it listen on a free port of the loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer: small ones wait for each other

        def do_GET(self) -> None:
            self.respond({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.respond(json.loads(self.rfile.read(length) or b"{}"))

        def respond(self, body: dict[str, Any]) -> None:
            answer = fake.answer(self.path, body, self.headers.get("Authorization"))
            if answer == DROP:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            content = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()

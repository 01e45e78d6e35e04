"""Records from a server without the plugin: a proxy that clients talk to in the server's place.

It passes everything on and notes answered `/generate` calls whose prompt came as token ids and whose answer came whole.
A stock server tells which tokens it gave, not how it came to them: such records have no rounds, so nothing is known of
where rounds began, what was drafted, or which drafter did it. Training works, with anchors anywhere in the answer; the
canary and the length head's labels do not.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import requests

from serving_bridge.records import RecordError, Sampling, VerificationRecord, decode, encode
from serving_bridge.sglang_plugin.recorder import RequestInfo
from serving_bridge.sglang_plugin.settings import PluginSettings
from serving_bridge.transport import LogWriter

MAX_BODY_BYTES = 16 * 2**20
"""Longest request that is taken in."""

_NOT_PASSED_ON = {"connection", "content-length", "host", "transfer-encoding", "content-encoding"}
_REASONS: dict[str, Literal["stop", "length", "abort"]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}


class Collector:
    """Makes records of calls and their answers.

    Args:
        writer: where records go.
        target_id: of the served target.
        block_size: that records carry; of no consequence without rounds.
        settings: which requests are noted.
    """

    def __init__(
        self,
        writer: LogWriter,
        *,
        target_id: str,
        block_size: int = 1,
        settings: PluginSettings | None = None,
    ) -> None:
        self.writer = writer
        self.target_id = target_id
        self.block_size = block_size
        self.settings = settings or PluginSettings()
        self.counts: Counter[str] = Counter()

    def note(self, body: Mapping[str, Any], answer: Any) -> None:
        """Write a record of one call, or count why not."""
        self.counts[self._note(body, answer)] += 1

    def _note(self, body: Mapping[str, Any], answer: Any) -> str:
        if body.get("stream"):
            return "streamed"
        prompt = body.get("input_ids")
        if not isinstance(prompt, list) or not prompt or not all(isinstance(t, int) for t in prompt):
            return "prompt_not_in_ids"
        try:
            record = self._record(body, prompt, answer)
            if record is None:
                return "not_wanted"
            # the answer is another program's: it must be a record that a reader will take
            self.writer.write(decode(encode(record)))
        except (KeyError, TypeError, ValueError, RecordError):
            return "answer_not_understood"
        return "recorded"

    def _record(self, body: Mapping[str, Any], prompt: list[int], answer: Any) -> VerificationRecord | None:
        meta = answer["meta_info"]
        request_id = str(meta["id"])
        asked = dict(body.get("sampling_params") or {})
        info = RequestInfo.of(request_id, asked.get("custom_params"), self.settings)
        if not info.log:
            return None
        return VerificationRecord(
            request_id=request_id,
            conversation_key=info.conversation_key,
            time=time.time(),
            target_id=self.target_id,
            sampling=Sampling(
                temperature=float(asked.get("temperature", 1.0)),
                top_p=float(asked.get("top_p", 1.0)),
                top_k=int(asked.get("top_k", 0)),
            ),
            domain=info.domain,
            tenant=info.tenant,
            prompt_ids=prompt,
            output_ids=list(answer["output_ids"]),
            rounds=[],
            finish_reason=_REASONS[meta["finish_reason"]["type"]],
            block_size=self.block_size,
        )


@contextlib.contextmanager
def collecting_proxy(
    collector: Collector, upstream: str, port: int, timeout_s: float = 600.0
) -> Iterator[ThreadingHTTPServer]:
    """A proxy on the loopback, to be run with `serve_forever`; keys of clients are passed on."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            if length > MAX_BODY_BYTES:
                self._answer(413, {}, b'{"error": "request too large"}')
                return
            self._pass_on(self.rfile.read(length))

        def _pass_on(self, body: bytes) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _NOT_PASSED_ON}
            try:
                reply = requests.request(
                    self.command, upstream.rstrip("/") + self.path, data=body, headers=headers, timeout=timeout_s,
                    stream=True,
                )  # fmt: skip
            except requests.RequestException as error:
                self._answer(502, {}, json.dumps({"error": f"{upstream}: {type(error).__name__}"}).encode())
                return
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in _NOT_PASSED_ON}
            if "text/event-stream" in reply.headers.get("Content-Type", ""):
                self._note(body, b"", reply)
                self._stream(reply, kept)
            else:
                self._note(body, reply.content, reply)
                self._answer(reply.status_code, kept, reply.content)

        def _note(self, body: bytes, content: bytes, reply: requests.Response) -> None:
            if self.path == "/generate" and reply.ok:
                with contextlib.suppress(ValueError):
                    collector.note(json.loads(body), json.loads(content) if content else None)

        def _stream(self, reply: requests.Response, headers: Mapping[str, str]) -> None:
            self.send_response(reply.status_code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            for chunk in reply.iter_content(None):
                self.wfile.write(chunk)
                self.wfile.flush()
            self.close_connection = True

        def _answer(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Requests are users' data; nothing of them is printed."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        yield server

"""Records from a stock server: what passes through the proxy is passed on unchanged, and noted if it can be."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import requests

from serving_bridge.collector import MAX_BODY_BYTES, Collector, collecting_proxy
from serving_bridge.records import VerificationRecord, validate


class Kept:
    """A writer that keeps everything."""

    def __init__(self) -> None:
        self.records: list[VerificationRecord] = []
        self.dropped = 0

    @property
    def written(self) -> int:
        return len(self.records)

    def write(self, record: VerificationRecord) -> bool:
        self.records.append(record)
        return True

    def close(self) -> None:
        pass


ANSWER: dict[str, Any] = {
    "output_ids": [7, 8, 9],
    "meta_info": {"id": "r1", "finish_reason": {"type": "length", "length": 3}},
}


class Upstream(BaseHTTPRequestHandler):
    seen: list[tuple[str, str | None, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.path, self.headers.get("Authorization"), body))
        if body.get("stream"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b"data: 1\n\ndata: 2\n\n")
            return
        status = 400 if body.get("fail") else 200
        content = json.dumps(ANSWER).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Collector:
    return Collector(Kept(), target_id="t")


@pytest.fixture
def proxy(collector: Collector) -> Iterator[str]:
    Upstream.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Upstream) as upstream:
        url = f"http://127.0.0.1:{upstream.server_port}"
        with collecting_proxy(collector, url, 0) as server:
            threads = [threading.Thread(target=s.serve_forever, args=(0.01,)) for s in (upstream, server)]
            for thread in threads:
                thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            upstream.shutdown()
            for thread in threads:
                thread.join()


def records(collector: Collector) -> list[VerificationRecord]:
    assert isinstance(collector.writer, Kept)
    return collector.writer.records


def ask(proxy: str, body: dict[str, Any], path: str = "/generate", **options: Any) -> requests.Response:
    return requests.post(proxy + path, json=body, timeout=10, **options)


def test_a_call_is_passed_on_and_becomes_a_record(proxy: str, collector: Collector) -> None:
    body = {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 0, "custom_params": {"draftsmith_domain": "code"}},
    }
    answer = ask(proxy, body, headers={"Authorization": "Bearer k"})
    assert answer.json() == ANSWER
    assert Upstream.seen == [("/generate", "Bearer k", body)]
    (record,) = records(collector)
    validate(record)
    assert (record.prompt_ids, record.output_ids, record.rounds) == ([1, 2], [7, 8, 9], [])
    assert (record.domain, record.finish_reason, record.sampling.temperature) == ("code", "length", 0.0)


@pytest.mark.parametrize(
    ("body", "path", "count"),
    [
        ({"text": "hello"}, "/generate", "prompt_not_in_ids"),
        ({"input_ids": [[1], [2]]}, "/generate", "prompt_not_in_ids"),
        ({"input_ids": [1], "stream": True}, "/generate", "streamed"),
        (
            {"input_ids": [1], "sampling_params": {"custom_params": {"draftsmith_log": False}}},
            "/generate",
            "not_wanted",
        ),
        ({"input_ids": [1], "fail": True}, "/generate", None),
        ({"input_ids": [1]}, "/v1/completions", None),
    ],
)
def test_what_cannot_be_noted_is_passed_on_and_counted(
    body: dict[str, Any], path: str, count: str | None, proxy: str, collector: Collector
) -> None:
    answer = ask(proxy, body, path)
    assert answer.status_code == (400 if body.get("fail") else 200)
    assert answer.text == ("data: 1\n\ndata: 2\n\n" if body.get("stream") else json.dumps(ANSWER))
    assert Upstream.seen[0][2] == body
    assert records(collector) == []
    assert dict(collector.counts) == ({} if count is None else {count: 1})


@pytest.mark.parametrize(
    "answer",
    [None, [], {}, {"output_ids": [1]}, {**ANSWER, "output_ids": []}, {**ANSWER, "output_ids": ["a"]}],
)
def test_an_answer_of_another_shape_is_counted_not_kept(answer: Any, collector: Collector) -> None:
    collector.note({"input_ids": [1]}, answer)
    assert records(collector) == [] and collector.counts["answer_not_understood"] == 1


def test_a_server_that_is_down_and_a_request_too_large(proxy: str, collector: Collector) -> None:
    with collecting_proxy(collector, "http://127.0.0.1:9", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        answer = ask(f"http://127.0.0.1:{server.server_port}", {"input_ids": [1]})
        server.shutdown()
        thread.join()
    assert answer.status_code == 502 and "127.0.0.1:9" in answer.json()["error"]
    headers = {"Content-Length": str(MAX_BODY_BYTES + 1)}
    assert requests.post(f"{proxy}/generate", data=b"", headers=headers, timeout=10).status_code == 413

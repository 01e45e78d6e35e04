"""`evaluate` against a server: a fake one whose answers and counts are the embedded engine's, as SGLang reports them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafters.policies import FixedPolicy, LengthPolicy, PlainPolicy
from pipeline.cli import main
from pipeline.config import load_config
from pipeline.models import TargetBundle, load_target
from serving_bridge.local_engine import LocalEngine, Request
from serving_bridge.records import VerificationRecord
from tests.pipeline.tiny_run import write_prompts
from tests.serving_bridge.fake_sglang import FakeSGLang, serving

WORDS = ["--benchmark", "mine=mine.jsonl", "--max-new-tokens", "12"]


def meta_of(record: VerificationRecord, drafts: int) -> dict[str, Any]:
    """`meta_info` as SGLang 0.5.23 makes it."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": record.finish_reason},
        "prompt_tokens": len(record.prompt_ids),
        "completion_tokens": len(record.output_ids),
        "e2e_latency": 0.01,
    }
    if record.rounds:
        histogram = [0] * (drafts + 1)
        for this in record.rounds:
            histogram[this.accepted] += 1
        correct = sum(this.accepted for this in record.rounds)
        meta |= {
            "spec_verify_ct": len(record.rounds),
            "spec_num_correct_drafts": correct,
            "spec_num_proposed_drafts": drafts * len(record.rounds),
            "spec_accept_rate": correct / (drafts * len(record.rounds)),
            "spec_accept_length": len(record.output_ids) / len(record.rounds),
            "spec_correct_drafts_histogram": histogram,
        }
    return meta


class EngineServer:
    """Answers `/generate` with an engine of the run's own target and drafter."""

    def __init__(self, bundle: TargetBundle, drafter: Path, policy: LengthPolicy) -> None:
        self.engine = LocalEngine(
            bundle.target, drafter, policy=lambda loaded: policy, eos_ids=bundle.eos_ids, threads=1
        )
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()

    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.bodies.append(body)
        sampling = body["sampling_params"]
        request = Request(body["rid"], body["input_ids"], sampling["max_new_tokens"])
        record = self.engine.submit(request).result().record
        return {"text": "", "output_ids": record.output_ids, "meta_info": meta_of(record, 3)}


@pytest.fixture
def servers(run: Path) -> Iterator[dict[str, Any]]:
    """A server with drafts and one without."""
    write_prompts(run / "mine.jsonl", "math", range(400, 406))
    bundle = load_target(load_config(run / "tiny.yaml"))
    drafter = run / "out/train/drafter"
    engines = {
        "fixed": EngineServer(bundle, drafter, FixedPolicy()),
        "ar": EngineServer(bundle, drafter, PlainPolicy()),
    }
    common = {"model_path": "the/target", "context_length": 512}
    infos = {
        "fixed": {**common, "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4},
        "ar": {**common, "speculative_algorithm": None},
    }
    fakes = {name: FakeSGLang(info=infos[name], generate=engine) for name, engine in engines.items()}
    with serving(fakes["fixed"]), serving(fakes["ar"]):
        yield {"fakes": fakes, "engines": engines, "urls": [fakes[name].url for name in ("fixed", "ar")]}
    for engine in engines.values():
        engine.engine.stop()


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return int(stop.value.code or 0)


def cells(run: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((run / "out/benchmark/report/report.json").read_text())
    return {f"{cell['method']}/{cell['concurrency']}": cell for cell in report["cells"]}


def urls(servers: dict[str, Any]) -> list[str]:
    return ["--backend", "sglang", *(word for url in servers["urls"] for word in ("--url", url))]


def test_a_server_gives_the_figures_that_the_embedded_engine_gives(
    run: Path, servers: dict[str, Any]
) -> None:
    assert call("evaluate", "tiny.yaml", *WORDS, *urls(servers), "--concurrency", "1,2") == 0
    served = cells(run)
    assert list(served) == ["ar/1", "ar/2", "fixed/1", "fixed/2"]
    words = ["--method", "ar,fixed", "--drafter", "out/train/drafter"]
    assert call("evaluate", "tiny.yaml", *WORDS, *words) == 0
    local = cells(run)
    for method in ("ar", "fixed"):
        ours, theirs = local[f"{method}/1"], served[f"{method}/1"]
        assert theirs["acceptance_length"] == pytest.approx(ours["acceptance_length"], rel=1e-12)
        assert theirs["acceptance_rate"] == ours["acceptance_rate"]
        assert theirs["output_tokens"] == ours["output_tokens"]
        for domain, group in ours["by_domain"].items():
            assert theirs["by_domain"][domain]["acceptance_length"] == group["acceptance_length"]
    assert served["fixed/1"]["block_size"] == 4 and served["fixed/1"]["speedup"] is not None
    # a server's counts of single slots include drafts past the end of the text
    first = [served["fixed/1"], local["fixed/1"]]
    assert first[0]["positions"]["rounds"] == first[1]["positions"]["rounds"]
    assert first[0]["positions"]["accepted"][0] >= first[1]["positions"]["accepted"][0]
    assert served["fixed/1"]["by_context"] == [] and served["fixed/1"]["verify_len"] is None


def test_requests_are_kept_out_of_the_log_and_never_share_an_id(run: Path, servers: dict[str, Any]) -> None:
    assert call("evaluate", "tiny.yaml", *WORDS, *urls(servers), "--concurrency", "1,2") == 0
    bodies = servers["engines"]["fixed"].bodies
    assert len(bodies) == 2 * (6 + 1)
    assert len({body["rid"] for body in bodies}) == len(bodies)
    for body in bodies:
        sampling = body["sampling_params"]
        assert sampling["custom_params"] == {"draftsmith_log": False}
        assert sampling["temperature"] == 0 and sampling["stop_token_ids"]
    # nothing changed on the server
    assert servers["fakes"]["fixed"].controls() == ["/generate"] * len(bodies)


def test_the_length_policy_of_the_plugin_is_measured_in_rows(run: Path, servers: dict[str, Any]) -> None:
    fake, engine = servers["fakes"]["fixed"], servers["engines"]["fixed"]
    identity = load_target(load_config(run / "tiny.yaml")).target.identity

    def state() -> dict[str, Any]:
        rounds = 10 * len(engine.bodies)
        return {
            "drafter": {"drafter_version": "v7"},
            "block_size": 4,
            "target_id": identity.target_id,
            "sampling_verified": False,
            "verified_rows": 3 * rounds,
            "drafted_rows": 4 * rounds,
        }

    fake.info = {"speculative_algorithm": "ADAFLASH", "context_length": 512}
    fake.before["/server_info"] = lambda body: (
        200,
        {**fake.info, "internal_states": [{"draftsmith": state()}]},
    )
    words = ["--backend", "sglang", "--url", fake.url]
    assert call("evaluate", "tiny.yaml", *WORDS, *words) == 0
    cell = cells(run)["adaflash/1"]
    assert cell["verify_len"] == pytest.approx(3.0) and cell["drafter"] == "v7"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--method", "adaflash"], "--method adaflash: no server given runs it"),
        (["--drafter", "out/train/drafter"], "serves v1, not tiny-train"),
    ],
)
def test_what_the_servers_do_not_run(
    run: Path, servers: dict[str, Any], words: list[str], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call("evaluate", "tiny.yaml", *WORDS, *urls(servers), *words) == 2
    assert named in capfd.readouterr().err


def test_two_servers_of_one_method_and_another_target(
    run: Path, servers: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    one = servers["urls"][0]
    words = [*WORDS, "--backend", "sglang"]
    assert call("evaluate", "tiny.yaml", *words, "--url", one, "--url", one) == 2
    assert "two servers run fixed" in capfd.readouterr().err
    fake = servers["fakes"]["fixed"]
    fake.info = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4}
    fake.before["/server_info"] = lambda body: (
        200,
        {
            **fake.info,
            "internal_states": [
                {"draftsmith": {"target_id": "other@r0", "verified_rows": 0, "drafted_rows": 0}}
            ],
        },
    )
    assert call("evaluate", "tiny.yaml", *words, "--url", one) == 2
    assert f"--url {one}: serves other@r0" in capfd.readouterr().err


def test_a_server_that_dies_is_one_message_and_finished_cells_stay(
    run: Path, servers: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    fake, engine = servers["fakes"]["fixed"], servers["engines"]["fixed"]
    fake.before["/generate"] = lambda body: (
        (500, {"error": "out of memory"}) if len(engine.bodies) > 9 else None
    )
    words = [*WORDS, *urls(servers), "--concurrency", "1,2"]
    capfd.readouterr()
    assert call("evaluate", "tiny.yaml", *words) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "/generate: 500: out of memory" in errors[0]
    del fake.before["/generate"]
    before = {name: len(server.bodies) for name, server in servers["engines"].items()}
    assert call("evaluate", "tiny.yaml", *words) == 0
    asked = {name: len(server.bodies) - before[name] for name, server in servers["engines"].items()}
    assert asked == {"ar": 0, "fixed": 7}

"""`retrain run-once` on a finished run: what it decides, what it leaves, and its exit codes."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import pipeline.release
from pipeline.canary import CanaryVerdict
from pipeline.cli import app, main
from pipeline.config import load_config
from pipeline.gate import Verdict
from pipeline.lineage import DataWindow, Lineage
from pipeline.lock import trainer_lock
from pipeline.online import OnlineState
from pipeline.registry import CANDIDATE, RegisteredVersion, Registry
from pipeline.stages.context import registry_for
from pipeline.stages.retrain import no_reference
from pipeline.survey import Survey
from pipeline.swaps import drafter_version_of
from serving_bridge.records import VerificationRecord
from serving_bridge.server import SwapError, SwapReport
from serving_bridge.spool import SpoolReader, SpoolWriter

WORDS = ["retrain", "run-once", "tiny.yaml", "--spool", "out/spool"]


def call(*words: str) -> int:
    """The exit code of `run-once` with further words."""
    result = CliRunner().invoke(app, [*WORDS, *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code


def summary() -> dict[str, Any]:
    return json.loads(Path("out/retrain/result.json").read_text())


def registry() -> Registry:
    config = load_config(Path("tiny.yaml"))
    name = json.loads(Path("out/result.json").read_text())["metrics"]["registry"]["model_name"]
    found = registry_for(config.model_copy(update={"tracking": config.tracking}), "unused")
    return Registry(found.tracking_uri, name)


def champion() -> int:
    found = registry().champion()
    assert found is not None
    return found.version


def served() -> list[VerificationRecord]:
    """All records of the run."""
    reader = SpoolReader("out/spool", "look", quarantine=False)
    return [delivery.record for delivery in reader.read(10_000)]


def add_traffic(count: int, domain: str = "code", first: int = 0) -> None:
    """Records of new requests with texts that the target served before."""
    old = [record for record in served() if len(record.output_ids) > 3]
    writer = SpoolWriter("out/spool", fsync=False)
    for number in range(first, first + count):
        record = old[number % len(old)]
        name = f"later-{number}"
        assert writer.write(
            VerificationRecord(
                request_id=name,
                conversation_key=name,
                time=2e9 + number,
                target_id=record.target_id,
                sampling=record.sampling,
                domain=domain,
                prompt_ids=record.prompt_ids,
                output_ids=record.output_ids,
                rounds=record.rounds,
                finish_reason=record.finish_reason,
                block_size=record.block_size,
            )
        )
    writer.close()


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Fix what the gate says: on a random target no drafter is surely better than another."""

    def say(accepted: bool) -> None:
        monkeypatch.setattr(
            pipeline.release, "judge", lambda *_, **__: Verdict(accepted, "as the test wants", {})
        )

    return say


def settled_rounds() -> int:
    return len(OnlineState.load(Path("out/online/state.json")).outcomes)


def test_too_few_records_are_nothing_to_do(run: Path) -> None:
    before, rounds = champion(), settled_rounds()
    cursor = SpoolReader("out/spool", "trainer", quarantine=False).cursor
    assert call("--set", "retrain.min_records=1000") == 3
    found = summary()
    assert found["metrics"]["outcome"] == "nothing_to_do" and found["metrics"]["exit_code"] == 3
    assert "1000 are needed" in found["metrics"]["reason"]
    assert (champion(), settled_rounds()) == (before, rounds)
    assert SpoolReader("out/spool", "trainer", quarantine=False).cursor == cursor


def test_one_round_takes_all_that_came_and_the_gate_decides(
    run: Path, verdict: Callable[[bool], None]
) -> None:
    verdict(True)
    add_traffic(30)
    before, rounds = champion(), settled_rounds()
    assert call() == 0
    metrics = summary()["metrics"]
    assert metrics["outcome"] == "promoted" and settled_rounds() == rounds + 1
    assert metrics["champion_before"] == before and metrics["champion_after"] == champion() != before
    # the round was of everything that waited, not of online.trigger records
    assert metrics["round"]["counts"]["admitted"] >= metrics["records"]["training"] > 5
    lineage = registry().lineage(champion())
    assert lineage is not None and lineage.data is not None
    assert lineage.parent == before and lineage.stage == "online"
    assert set(lineage.data.domains) == {"code"}
    assert lineage.data.until is not None and lineage.data.until > 2e9
    assert set(lineage.baseline) == {"code"}  # offline guards are no part of the baseline
    # the registered configuration is the one that was given, not the limits of this call
    assert lineage.config_hash == json.loads(Path("out/retrain/result.json").read_text())["config_hash"]
    assert call() == 3
    verdict(False)
    add_traffic(12, first=100)
    assert call() == 4
    assert summary()["metrics"]["outcome"] == "refused"


def test_refusals_and_locks_are_no_failures_for_schedulers(
    run: Path, verdict: Callable[[bool], None]
) -> None:
    verdict(False)
    add_traffic(10)
    before = champion()
    assert call("--failures-only") == 0
    assert summary()["metrics"]["exit_code"] == 4 and champion() == before
    with trainer_lock(Path("out/online")):
        result = CliRunner().invoke(app, WORDS)
        assert result.exit_code == 5 and f"process {os.getpid()} on " in result.stderr
        assert call("--failures-only") == 0


def champion_of_traffic(verdict: Callable[[bool], None]) -> None:
    """A round whose challenger becomes champion: its data are a sample of traffic, all of domain `code`."""
    verdict(True)
    add_traffic(30, first=1000)
    assert call() == 0


def test_drift_trains_where_the_records_alone_would_not(run: Path, verdict: Callable[[bool], None]) -> None:
    champion_of_traffic(verdict)
    verdict(False)
    few = [
        "--set", "retrain.enough_records=5000", "--set", "retrain.max_records=6000",
        "--set", "retrain.drift.min_baseline_documents=1",
    ]  # fmt: skip
    lineage = registry().lineage(champion())
    assert lineage is not None and lineage.data is not None and lineage.baseline
    known = min(lineage.baseline)
    # old texts under a domain with a baseline, so that τ can be compared; no limit is passed
    add_traffic(80, domain=known)
    lax = ["--set", "retrain.drift.max_tau_drop=0.99", "--set", "retrain.drift.max_population_shift=50"]
    assert call(*few, *lax) == 3
    checks = {check["name"]: check for check in summary()["metrics"]["checks"]}
    assert [checks[name]["fires"] for name in ("volume", "acceptance", "population")] == [False] * 3
    tau = summary()["metrics"]["tau"]
    assert tau["documents"] >= 16 and tau["now"] >= 1
    assert tau["drop"] == pytest.approx(1 - tau["now"] / tau["expected"])

    add_traffic(80, domain="law", first=200)
    assert "law" not in lineage.data.domains
    assert call(*few, "--set", "retrain.drift.max_tau_drop=0.99") == 4
    checks = {check["name"]: check for check in summary()["metrics"]["checks"]}
    assert checks["population"]["fires"] is True
    assert "population stability index" in summary()["metrics"]["decision"]["reason"]


def test_accepted_challenger_waits_where_a_person_decides(run: Path, verdict: Callable[[bool], None]) -> None:
    verdict(True)
    add_traffic(10)
    before = champion()
    assert call("--set", "retrain.deploy=false") == 0
    metrics = summary()["metrics"]
    assert metrics["round"]["outcome"] == "waiting" and champion() == before
    waiting = registry().get(metrics["round"]["version"])
    assert CANDIDATE in waiting.aliases and waiting.tags["gate_outcome"] == "accepted"
    registry().promote(waiting.version, reason="by hand")
    assert champion() == waiting.version


def test_interrupted_round_goes_on_without_any_new_record(run: Path, verdict: Callable[[bool], None]) -> None:
    verdict(True)
    add_traffic(10)
    state = Path("out/online/state.json")

    class Crash(BaseException):
        """The process is gone."""

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.release.ReleaseDesk.submit", crash)
        with pytest.raises(Crash):
            call()
    assert json.loads(state.read_text())["phase"] == "gate"
    rounds = settled_rounds()
    assert call("--set", "retrain.min_records=1000", "--set", "retrain.max_records=2000") == 0
    assert "interrupted" in summary()["metrics"]["decision"]["reason"]
    assert settled_rounds() == rounds + 1


class _Hook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(json.loads(body))  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


def test_alarm_reaches_the_webhook_once_and_is_kept_while_it_is_away(
    run: Path, verdict: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    champion_of_traffic(verdict)
    server: Any = HTTPServer(("127.0.0.1", 0), _Hook)
    server.got, server.status = [], 404
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("DRAFTSMITH_ALARM_WEBHOOK", f"http://127.0.0.1:{server.server_port}/")
    add_traffic(60, domain="law", first=200)
    add_traffic(10, first=300)
    idle = ["--set", "retrain.min_records=1000"]
    try:
        assert call(*idle) == 3
        assert server.got == [] and summary()["metrics"]["alarms"]["raised"] == []
        assert call(*idle) == 3  # nothing came, so that this is not a second value
        assert summary()["metrics"]["alarms"]["raised"] == []
        add_traffic(5, domain="law", first=400)
        assert call(*idle) == 3  # the second value in a row raises it
        (event,) = summary()["metrics"]["alarms"]["events"]
        assert event["alarm"] == "population_shift" and event["event"] == "raised"
        assert summary()["metrics"]["alarms"]["undelivered"] == 1
        server.status = 200
        assert call(*idle) == 3
        assert [(e["alarm"], e["run"]) for e in server.got] == [("population_shift", "tiny")] * 2
        assert summary()["metrics"]["alarms"] == {
            "raised": ["population_shift"],
            "events": [],
            "undelivered": 0,
        }
        assert call(*idle) == 3
        assert len(server.got) == 2
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--output", "elsewhere"], "no champion yet"),
        (["--set", "tracking.uri=http://127.0.0.1:9"], "tracking.uri"),
        (["--set", "retrain.min_records=0"], "retrain.min_records"),
        (["--spool", "tiny.yaml"], "tiny.yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Path, words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*WORDS, *words])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and named in message and message.count("\n") == 1


def test_damaged_checkpoint_is_named_and_damaged_alarms_are_set_aside(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out/retrain").mkdir(exist_ok=True)
    Path("out/retrain/alarms.json").write_text("{")
    assert call("--set", "retrain.min_records=1000") == 3
    assert Path("out/retrain/alarms.json.damaged").read_text() == "{"
    checkpoint = Path("out/online/last.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(SystemExit) as stop:
        main(WORDS)
    assert stop.value.code == 2 and "last.ckpt" in capsys.readouterr().err


def test_damaged_lineage_hides_drift_and_ends_no_retraining(
    run: Path, verdict: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    champion_of_traffic(verdict)
    monkeypatch.setattr(Registry, "artifact_text", lambda *_: "{")
    verdict(False)
    add_traffic(12)
    assert call() == 4
    checks = {check["name"]: check for check in summary()["metrics"]["checks"]}
    for name in ("acceptance", "population"):
        assert checks[name]["fires"] is None and "lineage.json" in checks[name]["finding"]


def test_champion_of_offline_data_is_no_reference_for_a_shift(run: Path) -> None:
    registry().promote(1)
    add_traffic(60)
    assert call("--set", "retrain.min_records=1000") == 3
    check = summary()["metrics"]["checks"][2]
    assert check["fires"] is None and "offline data" in check["finding"]
    assert summary()["metrics"]["population"] is None


@pytest.mark.parametrize(
    ("recent", "problem"),
    [
        ({"default": 60}, "no domain in common"),
        ({}, "no new records"),
        ({"default": 60, "math": 1}, None),
    ],
)
def test_untagged_traffic_is_no_shift(recent: dict[str, int], problem: str | None) -> None:
    champion = RegisteredVersion(3, (), {}, None, 0)
    lineage = Lineage(data=DataWindow("online round 1", {"math": 20, "code": 30}, 1.0, 2.0))
    found = no_reference(champion, lineage, Survey(deque(), domains=Counter(recent)))
    assert found is None if problem is None else problem in str(found)


class _Server:
    """Serves what it is told, unless it `refuses`."""

    drafter_version = "of the command line"
    refuses = ""

    def resume(self) -> None:
        """It was not paused."""

    def swap(self, directory: Path) -> SwapReport:
        new = drafter_version_of(directory)
        if self.refuses and self.refuses != new:
            raise SwapError("will not serve it")
        old, self.drafter_version = self.drafter_version, new
        return SwapReport(old, new, "d", "t", 0.1)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> _Server:
    found = _Server()
    monkeypatch.setattr("pipeline.fleet.connect", lambda *_: [found])
    return found


def test_servers_follow_the_champion_and_say_what_they_do_not_take(
    run: Path, verdict: Callable[[bool], None], server: _Server
) -> None:
    name = registry().get(champion()).tags["drafter_version"]
    assert call("--set", "retrain.min_records=1000") == 3
    assert server.drafter_version == name
    verdict(True)
    add_traffic(10)
    before = champion()
    server.refuses = name
    assert call() == 6
    metrics = summary()["metrics"]
    assert metrics["outcome"] == "swap_failed" and "will not serve it" in metrics["reason"]
    assert champion() == before and server.drafter_version == name
    add_traffic(10, first=100)
    assert call("--failures-only") == 6


def test_a_round_that_was_put_off_is_settled_before_the_next_begins(
    run: Path, verdict: Callable[[bool], None], server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict(True)
    add_traffic(30)
    rounds, before = settled_rounds(), champion()
    stopped = CanaryVerdict(False, "told to stop", stopped=True)
    monkeypatch.setattr("pipeline.online.watch", lambda *_, **__: stopped)
    for attempt in range(2):
        assert call() == 3
        assert "stopped before a round was complete" in summary()["metrics"]["reason"]
        assert (settled_rounds(), champion()) == (rounds, before)
        checkpoint = torch.load("out/online/last.ckpt", weights_only=True)
        assert checkpoint["StreamingDataModule"]["round_index"] == rounds + 1
        assert server.drafter_version == registry().get(before).tags["drafter_version"]
        add_traffic(30, first=200 + 100 * attempt)
    monkeypatch.setattr("pipeline.online.watch", lambda *_, **__: CanaryVerdict(True, "live is fine"))
    assert call() == 0
    assert settled_rounds() == rounds + 1 and champion() != before
    assert server.drafter_version == registry().get(champion()).tags["drafter_version"]


def test_domains_of_clients_are_text_and_not_markup(run: Path, verdict: Callable[[bool], None]) -> None:
    champion_of_traffic(verdict)
    add_traffic(1)
    add_traffic(40, domain="[/bold] law [red]", first=100)
    result = CliRunner().invoke(app, [*WORDS, "--set", "retrain.min_records=1000"])
    assert result.exit_code == 3
    assert "[/bold] law [red]" in " ".join(result.output.split())

"""Alarms: hysteresis, persistence, and delivery to a receiver that is slow, broken or away."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.errors import UserError
from pipeline.alarms import KEPT_EVENTS, KEPT_REFUSALS, AlarmBoard, AlarmState, Hysteresis, rules_for
from pipeline.config import AlarmsConfig
from pipeline.webhook import Courier, DeliveryFailed, Webhook, settle, webhook_for

RULE = Hysteresis(raise_at=0.10, clear_at=0.05, raise_after=2, clear_after=3)


def run(rule: Hysteresis, values: list[float | None]) -> tuple[list[tuple[int, str]], AlarmState]:
    state, changes = AlarmState(), []
    for place, value in enumerate(values):
        state, change = rule.update(state, value)
        if change is not None:
            changes.append((place, change))
    return changes, state


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ([0.2, 0.2], [(1, "raised")]),
        ([0.2, 0.0, 0.2, 0.0], []),
        ([0.2, 0.07, 0.2], []),  # between the thresholds a streak begins anew
        ([0.2, None, 0.2], [(2, "raised")]),  # an unknown value says nothing
        ([0.2, 0.2, 0.2, 0.2], [(1, "raised")]),
        ([0.1, 0.1, 0.05, 0.05, 0.05], [(1, "raised"), (4, "cleared")]),  # the thresholds themselves count
        ([0.2, 0.2, 0.0, 0.0, 0.07, 0.0, 0.0], [(1, "raised")]),
        ([0.2, 0.2, 0.08, 0.12, 0.08, 0.12], [(1, "raised")]),  # noise around raise_at does not flap
        ([0.2, 0.2, 0.0, 0.0, 0.0, 0.2, 0.2], [(1, "raised"), (4, "cleared"), (6, "raised")]),
    ],
)
def test_hysteresis(values: list[float | None], changes: list[tuple[int, str]]) -> None:
    assert run(RULE, values)[0] == changes


@given(st.lists(st.one_of(st.none(), st.floats(0, 0.3)), max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_every_change_follows_its_run_of_values(
    values: list[float | None], raise_after: int, clear_after: int
) -> None:
    rule = Hysteresis(0.1, 0.05, raise_after, clear_after)
    changes, state = run(rule, values)
    kinds = [change for _, change in changes]
    assert kinds == ["raised", "cleared"] * (len(kinds) // 2) + ["raised"] * (len(kinds) % 2)
    assert state.raised is (len(kinds) % 2 == 1)
    for place, change in changes:
        known = [value for value in values[: place + 1] if value is not None]
        if change == "raised":
            assert min(known[-raise_after:]) >= 0.1
        else:
            assert max(known[-clear_after:]) <= 0.05


def test_board_counts_over_runs_and_keeps_events_until_they_are_delivered(tmp_path: Path) -> None:
    rules = {"tau_drop": Hysteresis(0.1, 0.05, 2, 1)}
    path = tmp_path / "alarms" / "alarms.json"
    clock = lambda: datetime(2026, 1, 2, 3, 4, tzinfo=UTC)  # noqa: E731
    assert AlarmBoard.load(path).observe(rules, {"tau_drop": 0.3}, {"run": "r"}, clock) == []
    (event,) = AlarmBoard.load(path).observe(rules, {"tau_drop": 0.4}, {"run": "r"}, clock)
    assert event == {
        "run": "r",
        "alarm": "tau_drop",
        "event": "raised",
        "value": 0.4,
        "threshold": 0.1,
        "time": "2026-01-02T03:04:00+00:00",
        "text": "draftsmith r: alarm tau_drop raised, 0.4 is at or above 0.1",
    }
    board = AlarmBoard.load(path)
    assert board.states["tau_drop"].raised and board.undelivered == [event]
    board.delivered([event])
    assert AlarmBoard.load(path).undelivered == []
    (cleared,) = AlarmBoard.load(path).observe(rules, {"tau_drop": 0.0}, {"run": "r"}, clock)
    assert cleared["event"] == "cleared" and cleared["threshold"] == 0.05


def test_undelivered_events_do_not_grow_for_ever(tmp_path: Path) -> None:
    rules = {"a": Hysteresis(1, 0)}
    board = AlarmBoard(tmp_path / "alarms.json")
    for number in range(2 * KEPT_EVENTS):
        board.observe(rules, {"a": float(number % 2 == 0)}, {})
    assert len(AlarmBoard.load(board.path).undelivered) == KEPT_EVENTS


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"states": {"a": 1}, "undelivered": []}'])
def test_damaged_board_is_set_aside(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "alarms.json"
    path.write_text(content)
    board = AlarmBoard.load(path)
    assert "WARNING" in capsys.readouterr().out
    assert board.states == {} and not path.exists()
    assert path.with_name("alarms.json.damaged").read_text() == content
    board.observe({"a": Hysteresis(1, 0)}, {"a": 1.0}, {})
    assert AlarmBoard.load(path).states["a"].raised


def test_the_same_records_are_not_counted_twice_and_a_new_champion_begins_anew(tmp_path: Path) -> None:
    rules = {"a": Hysteresis(0.1, 0.05, 2, 1)}
    path = tmp_path / "alarms.json"

    def observe(value: float | None, of: str, champion: int) -> list[str]:
        board = AlarmBoard.load(path)
        events = board.observe(rules, {"a": value}, {}, seen={"a": of}, champion=champion)
        return [event["event"] for event in events]

    assert observe(0.3, "60 records", 1) == []
    assert observe(0.3, "60 records", 1) == []
    assert observe(0.3, "61 records", 2) == []  # the first of the new champion
    assert observe(None, "62 records", 2) == []
    assert observe(0.3, "62 records", 2) == ["raised"]  # what was not measured is not yet seen
    assert observe(0.0, "62 records", 2) == []
    assert observe(0.0, "63 records", 2) == ["cleared"]


def test_event_that_is_refused_for_good_makes_way_for_the_next(tmp_path: Path) -> None:
    board = AlarmBoard(
        tmp_path / "alarms.json", undelivered=[{"n": 1, "text": "one"}, {"n": 2, "text": "two"}]
    )
    with receiving([404]) as receiver:
        for _ in range(KEPT_REFUSALS):
            board = AlarmBoard.load(board.path) if board.path.exists() else board
            assert [event["n"] for event in board.undelivered] == [1, 2]
            settle(board, Courier(Webhook(receiver.url, 5, 1), board.undelivered))
    assert [event["n"] for event in AlarmBoard.load(board.path).undelivered] == [2]
    with receiving([500]) as receiver:  # what may go well later is never given up
        for _ in range(2 * KEPT_REFUSALS):
            settle(board, Courier(Webhook(receiver.url, 5, 1), board.undelivered))
    assert [event["n"] for event in AlarmBoard.load(board.path).undelivered] == [2]


def test_rules_come_from_the_configuration() -> None:
    config = AlarmsConfig.model_validate({"raise_after": 3, "tau_drop": {"raise_at": 0.3}})
    rules = rules_for(config)
    assert rules["tau_drop"] == Hysteresis(0.3, 0.05, 3, 2)
    assert rules["population_shift"] == Hysteresis(0.25, 0.1, 3, 2)
    assert run(rules["failing_runs"], [1.0, 1.0, 1.0, 0.0])[0] == [(2, "raised"), (3, "cleared")]
    with pytest.raises(ValueError, match="clear_at"):
        AlarmsConfig.model_validate({"tau_drop": {"raise_at": 0.1, "clear_at": 0.2}})


class Receiver(ThreadingHTTPServer):
    """Answers with the given statuses in turn, the last for ever; `hold` keeps it from answering."""

    def __init__(self, statuses: list[int], hold: threading.Event | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses, self.hold = statuses, hold
        self.got: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook/secret"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.hold is not None:
            self.server.hold.wait(30)
        self.server.got.append(json.loads(body))
        status = self.server.statuses[min(len(self.server.got), len(self.server.statuses)) - 1]
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@contextmanager
def receiving(statuses: list[int], hold: threading.Event | None = None) -> Iterator[Receiver]:
    server = Receiver(statuses, hold)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        if hold is not None:
            hold.set()
        server.shutdown()
        server.server_close()


def test_event_arrives_as_json() -> None:
    with receiving([204]) as receiver:
        Webhook(receiver.url, 5, 3).post({"alarm": "tau_drop", "text": "τ fell"})
        assert receiver.got == [{"alarm": "tau_drop", "text": "τ fell"}]


def test_failures_of_the_receiver_are_retried_with_growing_pauses() -> None:
    pauses: list[float] = []
    with receiving([500, 503, 429, 200]) as receiver:
        Webhook(receiver.url, 5, 4, pauses.append).post({"n": 1})
        assert len(receiver.got) == 4
    assert pauses == [0.5, 1.0, 2.0]


@pytest.mark.parametrize(("status", "attempts"), [(404, 1), (302, 1), (500, 3)])
def test_what_is_refused_for_good_is_not_repeated(status: int, attempts: int) -> None:
    with receiving([status]) as receiver:
        with pytest.raises(DeliveryFailed, match=f"status {status}") as failure:
            Webhook(receiver.url, 5, 3, lambda _: None).post({"n": 1})
        assert len(receiver.got) == attempts
    assert "secret" not in str(failure.value)


def test_receiver_that_is_away_costs_the_attempts_and_tells_no_secret() -> None:
    with receiving([200]) as receiver:
        url = receiver.url
    with pytest.raises(DeliveryFailed, match=r"127\.0\.0\.1: ConnectionError") as failure:
        Webhook(url, 1, 2, lambda _: None).post({})
    assert "secret" not in str(failure.value)


def test_courier_returns_though_the_receiver_never_answers() -> None:
    hold = threading.Event()
    with receiving([200], hold) as receiver:
        courier = Courier(Webhook(receiver.url, 0.2, 1), [{"n": 1}, {"n": 2}])
        sent, problem = courier.finish()
        assert sent == [] and problem
        assert receiver.got == []  # so it was not the receiver that ended the wait


def test_courier_keeps_order_and_says_what_is_left() -> None:
    with receiving([200, 404]) as receiver:
        sent, problem = Courier(Webhook(receiver.url, 5, 1), [{"n": 1}, {"n": 2}, {"n": 3}]).finish()
        assert sent == [{"n": 1}]
        assert "404" in problem
        assert [event["n"] for event in receiver.got] == [1, 2]


def test_webhook_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AlarmsConfig(webhook_env="MY_HOOK")
    monkeypatch.delenv("MY_HOOK", raising=False)
    assert webhook_for(config) is None
    monkeypatch.setenv("MY_HOOK", "ftp://host/secret")
    with pytest.raises(UserError, match="MY_HOOK") as error:
        webhook_for(config)
    assert "secret" not in str(error.value)
    monkeypatch.setenv("MY_HOOK", "https://host/secret")
    found = webhook_for(config)
    assert found is not None and found.host == "host"

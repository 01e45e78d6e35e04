"""One scheduled run: `retrain run-once` as a process, so that its memory is given back and its crash is its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from pipeline.alarms import AlarmBoard, rules_for
from pipeline.config import AlarmsConfig
from pipeline.console import say
from pipeline.result import write_json
from pipeline.webhook import Courier, webhook_for

ORDINARY = frozenset({0, 3, 4, 5})
"""Exit codes of runs that did not fail: done, nothing to do, refused, locked."""

PATIENCE_S = 60.0
"""Between SIGTERM and SIGKILL for a run that takes too long."""

LAST_RUN = "last_run.json"


@dataclass(frozen=True)
class LastRun:
    """What `last_run.json` says. `code` is negative for a run that a signal ended."""

    command: list[str]
    started: float
    seconds: float
    code: int
    failed: bool


def run_scheduled(
    command: list[str],
    directory: str,
    cwd: str,
    run: str,
    alarms: dict[str, Any],
    kill_after_s: float | None,
    rhythm: str = "",
) -> None:
    """What the scheduler calls; arguments are plain values, because its store keeps them.

    Args:
        command: to run.
        directory: where `last_run.json` and the alarm about failing runs are kept.
        cwd: to run it in.
        run: name, for alarms.
        alarms: an `AlarmsConfig`.
        kill_after_s: longest run; None waits for ever.
        rhythm: of the schedule; kept so that a changed one is noticed.
    """
    started, begun = time.time(), time.monotonic()
    code = run_process(command, cwd, kill_after_s)
    last = LastRun(command, started, time.monotonic() - begun, code, code not in ORDINARY)
    say(f"run ended with {describe_code(code)} after {last.seconds:.0f} s")
    place = Path(directory)
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / LAST_RUN, asdict(last))
        raise_alarm(place / "alarms.json", AlarmsConfig.model_validate(alarms), run, last)
    except (UserError, OSError) as error:
        # the schedule goes on whatever becomes of its notes
        say(f"the run could not be noted: {error}")


def run_process(command: Sequence[str], cwd: str, kill_after_s: float | None) -> int:
    """Run to the end, apart from this process's signals; its exit code, 127 if it cannot be started."""
    try:
        process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        say(f"{command[0]} cannot be run: {error}")
        return 127
    say(f"run started as process {process.pid}")
    try:
        return process.wait(kill_after_s)
    except subprocess.TimeoutExpired:
        say(f"run takes longer than {kill_after_s:.0f} s and is stopped")
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(PATIENCE_S)
    process.kill()
    return process.wait()


def raise_alarm(path: Path, config: AlarmsConfig, run: str, last: LastRun) -> None:
    """Feed the alarm `failing_runs`, and send what is due."""
    board = AlarmBoard.load(path)
    about = {"run": run, "exit_code": last.code}
    values = {"failing_runs": 1.0 if last.failed else 0.0}
    for event in board.observe(rules_for(config), values, about):
        say(f"ALARM {event['text']} ({describe_code(last.code)})")
    if not board.undelivered:
        return
    webhook = webhook_for(config)
    if webhook is None:
        board.delivered(board.undelivered)
        return
    sent, problem = Courier(webhook, board.undelivered).finish()
    board.delivered(sent)
    if problem:
        say(f"alarms: {len(board.undelivered)} not delivered ({problem})")


def describe_code(code: int) -> str:
    """An exit code, or the signal that ended a process."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"

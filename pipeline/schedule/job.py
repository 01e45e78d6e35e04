"""One scheduled run: `retrain run-once` as a process, so that its memory is given back and its crash is its own."""

from __future__ import annotations

import contextlib
import json
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
from pipeline.webhook import Courier, settle, webhook_for

WORKED = frozenset({0, 3, 4})
"""Exit codes of runs that were complete: done, nothing to do, refused."""

LOCKED = 5
"""Exit code of a run that found another trainer at work: it did nothing, and says neither that runs work nor that they fail."""

LAST_RUN = "last_run.json"


@dataclass(frozen=True)
class LastRun:
    """What `last_run.json` says. `code` is negative for a run that a signal ended; `locked_in_a_row`
    counts the latest runs that did nothing because another trainer worked, this one included.
    """

    command: list[str]
    started: float
    seconds: float
    code: int
    failed: bool
    locked_in_a_row: int = 0


def run_scheduled(
    command: list[str],
    directory: str,
    cwd: str,
    run: str,
    alarms: dict[str, Any],
    kill_after_s: float | None,
    patience_s: float = 60.0,
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
        patience_s: between SIGTERM and SIGKILL for a run that takes longer.
        rhythm: of the schedule; kept so that a changed one is noticed.
    """
    started, begun = time.time(), time.monotonic()
    code = run_process(command, cwd, kill_after_s, patience_s)
    place = Path(directory)
    last = LastRun(
        command,
        started,
        time.monotonic() - begun,
        code,
        failed=code not in WORKED and code != LOCKED,
        locked_in_a_row=_locked_before(place / LAST_RUN) + 1 if code == LOCKED else 0,
    )
    say(f"run ended with {describe_code(code)} after {last.seconds:.0f} s")
    try:
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / LAST_RUN, asdict(last))
        raise_alarm(place / "alarms.json", AlarmsConfig.model_validate(alarms), run, last)
    except (UserError, OSError) as error:
        # the schedule goes on whatever becomes of its notes
        say(f"the run could not be noted: {error}")


def run_process(
    command: Sequence[str], cwd: str, kill_after_s: float | None, patience_s: float = 60.0
) -> int:
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
        return process.wait(patience_s)
    process.kill()
    return process.wait()


def raise_alarm(path: Path, config: AlarmsConfig, run: str, last: LastRun) -> None:
    """Feed the alarm `failing_runs`, and send what is due."""
    board = AlarmBoard.load(path)
    about = {"run": run, "exit_code": last.code}
    failing = last.failed or last.locked_in_a_row >= config.locked_after
    values: dict[str, float | None] = {
        "failing_runs": 1.0 if failing else None if last.locked_in_a_row else 0.0
    }
    for event in board.observe(rules_for(config), values, about):
        say(f"ALARM {event['text']} ({describe_code(last.code)})")
    if not board.undelivered:
        return
    webhook = webhook_for(config)
    if webhook is not None:
        settle(board, Courier(webhook, board.undelivered))


def describe_code(code: int) -> str:
    """An exit code, or the signal that ended a process."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _locked_before(note: Path) -> int:
    try:
        return int(json.loads(note.read_text())["locked_in_a_row"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0

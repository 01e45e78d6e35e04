"""The schedule: crontab's meaning, starts missed while it was down, crashes of runs and of itself, and a clean stop."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from drafters.errors import UserError
from pipeline.cli import app, main
from pipeline.config import Config, ScheduleConfig
from pipeline.lock import Locked
from pipeline.schedule.job import LAST_RUN, run_process, run_scheduled
from pipeline.schedule.rhythm import next_times, trigger_for, weekdays
from pipeline.schedule.service import (
    ScheduleBroken,
    look_after,
    next_start,
    open_scheduler,
    schedule_directory,
    serve,
)

needs_apscheduler = pytest.mark.skipif(
    importlib.util.find_spec("apscheduler") is None, reason="APScheduler (extra `schedule`) is not installed"
)
PATIENCE_S = 60
APPEND = "import sys; open(sys.argv[1], 'a').write('run\\n')"


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("*", "*"),
        ("0", "sun"),
        ("7", "sun"),
        ("1-5", "mon,tue,wed,thu,fri"),
        ("5-7", "sun,fri,sat"),
        ("fri-sun", "sun,fri,sat"),
        ("0-6", "*"),
        ("*/2", "sun,tue,thu,sat"),
        ("1-5/2", "mon,wed,fri"),
        ("MON,3", "mon,wed"),
    ],
)
def test_weekdays_mean_what_crontab_means(field: str, names: str) -> None:
    assert weekdays(field) == names


@pytest.mark.parametrize("field", ["8", "mo", "", "5-1", "*-3", "1-5/0", "1;2", "L"])
def test_what_is_no_weekday_is_refused(field: str) -> None:
    with pytest.raises(ValueError):
        weekdays(field)


def times(now: str, count: int = 3, **settings: Any) -> list[str]:
    moments = next_times(ScheduleConfig(**settings), count, datetime.fromisoformat(now))
    return [moment.isoformat() for moment in moments]


@needs_apscheduler
def test_cron_counts_weekdays_from_sunday() -> None:
    # 2026-01-02 is a Friday; APScheduler's own reading of `0` would be Monday
    assert times("2026-01-02T12:00:00+00:00", 2, cron="30 3 * * 0") == [
        "2026-01-04T03:30:00+00:00",
        "2026-01-11T03:30:00+00:00",
    ]


@needs_apscheduler
def test_cron_fires_by_the_clock_of_its_timezone() -> None:
    """Over the change to summer time on 29 March 2026 the hour on the wall stays."""
    assert times("2026-03-28T00:00:00+00:00", 2, cron="30 3 * * *", timezone="Europe/Berlin") == [
        "2026-03-28T03:30:00+01:00",
        "2026-03-29T03:30:00+02:00",
    ]


@needs_apscheduler
def test_intervals_do_not_depend_on_when_the_scheduler_started() -> None:
    early, late = (times(f"2026-01-02T00:{m}:00+00:00", every_minutes=30) for m in ("01", "29"))
    assert early == late
    assert early[0] == "2026-01-02T00:30:00+00:00" and early[1] == "2026-01-02T01:00:00+00:00"


@needs_apscheduler
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "schedule.cron"),
        ({"cron": "30 3 * *"}, "4 fields"),
        ({"cron": "61 3 * * *"}, "schedule.cron"),
        ({"cron": "30 3 1 * 1"}, "both day and weekday"),
        ({"cron": "30 3 * * 8"}, "0-7"),
        ({"cron": "0 0 30 2 *"}, "never comes"),
        ({"cron": "0 0 * * *", "timezone": "Mars/Olympus"}, "schedule.timezone"),
        ({"cron": "0 0 * * *", "timezone": "../etc/passwd"}, "schedule.timezone"),
    ],
)
def test_schedules_that_make_no_sense_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        trigger_for(ScheduleConfig(**settings))


def test_without_apscheduler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apscheduler.schedulers.background", None)
    with pytest.raises(UserError, match=r"draftsmith\[schedule\]"):
        trigger_for(ScheduleConfig(every_minutes=1))


def config_in(directory: Path, **schedule: Any) -> Config:
    return Config.model_validate(
        {
            "name": "nightly",
            "output": str(directory),
            "target": {"model": "tiny:llama"},
            "data": {"train": [{"path": "prompts.jsonl"}]},
            "schedule": schedule,
        }
    )


def test_scheduler_process_stays_light() -> None:
    """It lives for months beside the trainer; what takes memory is loaded by its runs."""
    script = (
        "import sys, pipeline.schedule.service, pipeline.schedule.job\n"
        "print(sorted({'torch', 'mlflow', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"


class Clock:
    """The time that APScheduler sees."""

    def __init__(self, moment: str) -> None:
        self.set(moment)

    def set(self, moment: str) -> None:
        self.now = datetime.fromisoformat(moment)

    def stand_in(self) -> type[datetime]:
        clock = self

        class FakeDatetime(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return clock.now.astimezone(tz)

        return FakeDatetime


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock("2026-01-02T02:00:00+00:00")
    for module in ("apscheduler.schedulers.base", "apscheduler.executors.base", "pipeline.schedule.service"):
        monkeypatch.setattr(f"{module}.datetime", clock.stand_in())
    return clock


class Session:
    """A scheduler from its start to its shutdown, as one process would have it."""

    def __init__(self, config: Config, command: list[str]) -> None:
        from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED

        self.events: queue.Queue[Any] = queue.Queue()
        self.scheduler = open_scheduler(config, command)
        self.names = {EVENT_JOB_EXECUTED: "ran", EVENT_JOB_MISSED: "missed", EVENT_JOB_ERROR: "error"}
        self.scheduler.add_listener(self.events.put, sum(self.names))

    @property
    def due(self) -> str:
        found = next_start(self.scheduler)
        assert found is not None
        return found.astimezone(UTC).isoformat()

    def next_event(self) -> str:
        return self.names[self.events.get(timeout=PATIENCE_S).code]

    def close(self) -> list[str]:
        """Shut down; what happened besides what was asked for."""
        self.scheduler.shutdown(wait=True)
        left = []
        while not self.events.empty():
            left.append(self.names[self.events.get().code])
        return left


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A file with a line for each run."""
    return tmp_path / "runs.txt"


@pytest.fixture
def command(runs: Path) -> list[str]:
    return [sys.executable, "-c", APPEND, str(runs)]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@needs_apscheduler
def test_start_missed_while_down_is_made_up_for(
    tmp_path: Path, clock: Clock, command: list[str], runs: Path
) -> None:
    config = config_in(tmp_path / "out", cron="30 3 * * *")
    first = Session(config, command)
    first.scheduler.resume()
    assert first.due == "2026-01-02T03:30:00+00:00"
    assert first.close() == [] and lines(runs) == 0

    clock.set("2026-01-02T04:00:00+00:00")
    second = Session(config, command)
    assert second.due == "2026-01-02T03:30:00+00:00"
    second.scheduler.resume()
    assert second.next_event() == "ran"
    assert second.due == "2026-01-03T03:30:00+00:00"
    assert second.close() == [] and lines(runs) == 1

    third = Session(config, command)  # made up for once, not at each start
    third.scheduler.resume()
    assert third.due == "2026-01-03T03:30:00+00:00"
    clock.set("2026-01-03T03:30:00+00:00")
    third.scheduler.wakeup()
    assert third.next_event() == "ran"
    assert third.close() == [] and lines(runs) == 2


@needs_apscheduler
def test_many_missed_starts_are_one_run(tmp_path: Path, clock: Clock, command: list[str], runs: Path) -> None:
    config = config_in(tmp_path / "out", every_minutes=10)
    Session(config, command).close()
    clock.set("2026-01-02T02:55:00+00:00")
    session = Session(config, command)
    session.scheduler.resume()
    assert session.next_event() == "ran"
    assert session.due == "2026-01-02T03:00:00+00:00"
    assert session.close() == [] and lines(runs) == 1


@needs_apscheduler
def test_start_missed_for_longer_than_the_grace_is_left_out(
    tmp_path: Path, clock: Clock, command: list[str], runs: Path
) -> None:
    config = config_in(tmp_path / "out", cron="30 3 * * *", misfire_grace_s=600)
    Session(config, command).close()
    clock.set("2026-01-05T03:45:00+00:00")
    session = Session(config, command)
    session.scheduler.resume()
    assert session.next_event() == "missed"
    assert session.due == "2026-01-06T03:30:00+00:00"
    assert session.close() == [] and lines(runs) == 0


@needs_apscheduler
def test_another_command_keeps_the_next_start_and_another_rhythm_does_not(
    tmp_path: Path, clock: Clock, command: list[str], runs: Path
) -> None:
    Session(config_in(tmp_path / "out", cron="30 3 * * *"), ["false"]).close()
    clock.set("2026-01-02T03:40:00+00:00")
    session = Session(config_in(tmp_path / "out", cron="30 3 * * *"), command)
    assert session.due == "2026-01-02T03:30:00+00:00"
    session.scheduler.resume()
    assert session.next_event() == "ran"
    assert lines(runs) == 1
    session.close()

    session = Session(config_in(tmp_path / "out", cron="0 5 * * *"), command)
    assert session.due == "2026-01-02T05:00:00+00:00"
    session.close()


@needs_apscheduler
def test_start_that_falls_into_a_run_is_left_out(tmp_path: Path, clock: Clock, runs: Path) -> None:
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n{APPEND}"
    session = Session(config_in(tmp_path / "out", every_minutes=10), [sys.executable, "-c", waits, str(runs)])
    from apscheduler.events import EVENT_JOB_MAX_INSTANCES

    skipped: queue.Queue[Any] = queue.Queue()
    session.scheduler.add_listener(skipped.put, EVENT_JOB_MAX_INSTANCES)
    session.scheduler.resume()
    for minute in (10, 20):
        clock.set(f"2026-01-02T02:{minute}:00+00:00")
        session.scheduler.wakeup()
        if minute == 10:
            wait_for(lambda: session.due == "2026-01-02T02:20:00+00:00")
    skipped.get(timeout=PATIENCE_S)
    go.touch()
    assert session.next_event() == "ran"
    assert session.close() == [] and lines(runs) == 1


@needs_apscheduler
@pytest.mark.parametrize("rhythm", [{"cron": "30 3 * * *"}, {"every_minutes": 60}])
def test_a_clock_that_was_ahead_delays_no_start(
    tmp_path: Path, clock: Clock, command: list[str], rhythm: dict[str, Any]
) -> None:
    config = config_in(tmp_path / "out", jitter_s=60, **rhythm)
    clock.set("2031-06-01T12:00:00+00:00")
    Session(config, command).close()
    clock.set("2026-01-02T02:00:00+00:00")
    session = Session(config, command)
    assert session.due < "2026-01-02T03:32"
    # and while it runs
    clock.set("2026-01-02T04:00:00+00:00")
    due = session.due
    look_after(session.scheduler, config.schedule)
    assert session.due == due  # a start that is due is left alone
    job = session.scheduler.get_job("retrain")
    job.modify(next_run_time=datetime(2031, 6, 2, tzinfo=UTC))
    look_after(session.scheduler, config.schedule)
    assert "2026-01-02T04" < session.due < "2026-01-03T03:32"
    session.scheduler.remove_job("retrain")
    with pytest.raises(ScheduleBroken, match="gone from the store"):
        look_after(session.scheduler, config.schedule)
    session.close()


@needs_apscheduler
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_write_to_the_store_ends_the_schedule_and_the_next_one_goes_on(
    tmp_path: Path, command: list[str], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore

    monkeypatch.setattr("pipeline.schedule.service.WATCH_S", 0.05)
    config = config_in(tmp_path / "out", every_minutes=0.005)
    failures = []
    update = SQLAlchemyJobStore.update_job

    def fails_once(store: Any, job: Any) -> None:
        if not failures:
            failures.append(job.id)
            raise OSError("disk full")
        update(store, job)

    monkeypatch.setattr(SQLAlchemyJobStore, "update_job", fails_once)
    stop = threading.Event()
    with pytest.raises(ScheduleBroken, match="thread has ended"):
        serve(config, command, stop)
    done = lines(runs)

    def stop_when_it_goes_on() -> None:
        try:
            wait_for(lambda: lines(runs) > done + 1)
        finally:
            stop.set()

    watcher = threading.Thread(target=stop_when_it_goes_on)
    watcher.start()
    serve(config, command, stop)
    watcher.join()
    assert failures == ["retrain"] and lines(runs) > done + 1


@needs_apscheduler
def test_runs_that_share_a_store_keep_apart(
    tmp_path: Path, clock: Clock, command: list[str], runs: Path
) -> None:
    store = f"sqlite:///{tmp_path / 'shared.db'}"
    other = Session(config_in(tmp_path / "other", cron="0 5 * * *", store=store), ["false"])
    mine = Session(config_in(tmp_path / "out", cron="30 4 * * *", store=store), command)
    assert (other.due[11:16], mine.due[11:16]) == ("05:00", "04:30")
    clock.set("2026-01-02T05:00:00+00:00")
    mine.scheduler.resume()
    assert mine.next_event() == "ran"
    assert mine.close() == [] and lines(runs) == 1
    assert other.due[11:16] == "05:00" and other.close() == []


@needs_apscheduler
def test_job_store_is_private_and_a_bad_one_is_named(tmp_path: Path, command: list[str]) -> None:
    config = config_in(tmp_path / "out", every_minutes=10)
    Session(config, command).close()
    directory = schedule_directory(config)
    assert directory.stat().st_mode & 0o777 == 0o700
    for store in ("sqlite:////proc/none/jobs.db", "nonsense", "nodialect://host/db"):
        with pytest.raises(UserError, match=r"schedule\.store"):
            open_scheduler(config_in(tmp_path / "out", every_minutes=10, store=store), command)


@needs_apscheduler
def test_one_scheduler_at_a_time(tmp_path: Path, command: list[str]) -> None:
    import threading

    from pipeline.lock import exclusive

    config = config_in(tmp_path / "out", every_minutes=10)
    with (
        exclusive(schedule_directory(config) / "scheduler.lock", "taken"),
        pytest.raises(Locked, match="another scheduler"),
    ):
        serve(config, command, threading.Event())


def scheduled(
    directory: Path, code: str, *words: str, kill_after_s: float | None = None, patience_s: float = 60
) -> dict[str, Any]:
    """What is noted of a run of this Python code."""
    run_scheduled(
        [sys.executable, "-c", code, *words],
        str(directory),
        str(directory.parent),
        "nightly",
        {},
        kill_after_s,
        patience_s,
    )
    note: dict[str, Any] = json.loads((directory / LAST_RUN).read_text())
    return note


@pytest.mark.parametrize(
    ("code", "expected", "failed"),
    [
        ("", 0, False),
        ("raise SystemExit(3)", 3, False),
        ("raise SystemExit(4)", 4, False),
        ("raise SystemExit(5)", 5, False),
        ("raise SystemExit(2)", 2, True),
        ("1/0", 1, True),
        ("import os; os.kill(os.getpid(), 9)", -9, True),
    ],
)
def test_every_end_of_a_run_is_noted_and_none_is_raised(
    tmp_path: Path, code: str, expected: int, failed: bool
) -> None:
    note = scheduled(tmp_path / "schedule", code)
    assert (note["code"], note["failed"]) == (expected, failed)


def test_run_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    assert run_process([str(tmp_path / "absent")], str(tmp_path), None) == 127


def test_run_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    assert scheduled(tmp_path / "schedule", "import time; time.sleep(600)", kill_after_s=0.2)["code"] == -15
    ready = tmp_path / "ready"
    stubborn = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(600)"
    # until the process ignores the signal, being stopped by it says nothing
    while not ready.exists():
        note = scheduled(tmp_path / "schedule", stubborn, str(ready), kill_after_s=2, patience_s=0.2)
    assert note["code"] == -9


def test_failing_runs_raise_an_alarm_and_one_that_works_clears_it(tmp_path: Path) -> None:
    directory = tmp_path / "schedule"
    seen = []
    for code in ("1/0", "1/0", "1/0", "raise SystemExit(3)"):
        scheduled(directory, code)
        seen.append(json.loads((directory / "alarms.json").read_text())["states"]["failing_runs"]["raised"])
    assert seen == [False, True, True, False]


def test_runs_that_are_locked_out_prove_nothing_until_there_are_many(tmp_path: Path) -> None:
    directory = tmp_path / "schedule"
    seen = []
    for code in (1, 5, 1, 0, 5, 5, 5, 5, 0):
        scheduled(directory, f"raise SystemExit({code})")
        seen.append(json.loads((directory / "alarms.json").read_text())["states"]["failing_runs"]["raised"])
    # a locked run neither clears a streak nor adds to it; the third in a row begins to count, and the second such raises
    assert seen == [False, False, True, False, False, False, False, True, False]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Worker:
    """Schedulers in processes, on one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[str] | None = None

    def start(self, code: str, *words: str, every_s: float = 0.3) -> subprocess.Popen[str]:
        config = self.directory / "mine.yaml"
        sections = config_in(self.directory / "out", every_minutes=every_s / 60).dump()
        config.write_text(yaml.safe_dump(sections))
        script = Path(__file__).with_name("schedule_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(config), sys.executable, "-c", code, *words],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        return self.process

    def end(self, how: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    if worker.process is not None and worker.process.poll() is None:
        worker.process.kill()
        worker.process.communicate()


@needs_apscheduler
@pytest.mark.slow
def test_schedule_survives_crashes_of_its_runs_and_its_own(worker: Worker, runs: Path) -> None:
    crashes = f"{APPEND}\nimport os; os.kill(os.getpid(), 9)"
    worker.start(crashes, str(runs))
    wait_for(lambda: lines(runs) >= 2)
    assert worker.end(signal.SIGKILL) == -9
    done = lines(runs)
    worker.start(crashes, str(runs))
    wait_for(lambda: lines(runs) >= done + 2)
    assert worker.end(signal.SIGTERM) == 0
    note = json.loads((worker.directory / "out" / "schedule" / LAST_RUN).read_text())
    assert note["code"] == -9


@needs_apscheduler
@pytest.mark.slow
def test_sigterm_waits_for_the_run_and_starts_no_other(worker: Worker, runs: Path) -> None:
    go = worker.directory / "go"
    waits = (
        f"{APPEND}\nimport os, sys, time\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.02)\n"
        "open(sys.argv[1], 'a').write('done\\n')"
    )
    process = worker.start(waits, str(runs), str(go))
    wait_for(lambda: lines(runs) == 1)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    while "told to stop" not in process.stdout.readline():
        pass
    assert process.poll() is None
    go.touch()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert runs.read_text().splitlines() == ["run", "done"]


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mini.yaml"
    path.write_text("target: {model: 'tiny:llama'}\ndata: {train: [{path: prompts.jsonl}]}\noutput: out\n")
    return path


@needs_apscheduler
def test_next_prints_the_next_starts_and_writes_nothing(config_file: Path) -> None:
    words = ["retrain", "schedule", "mini.yaml", "--spool", "s", "--next"]
    result = CliRunner().invoke(app, [*words, "--set", "schedule.cron='30 3 * * 1-5'"])
    assert result.exit_code == 0, result.output
    moments = [datetime.strptime(line, "%a %Y-%m-%d %H:%M:%S %z") for line in result.output.splitlines()]
    assert len(moments) == 5 and moments == sorted(set(moments))
    assert all((m.hour, m.minute) == (3, 30) and m.weekday() < 5 for m in moments)
    assert datetime.now(UTC) < moments[0] < datetime.now(UTC) + timedelta(days=4)
    assert sorted(p.name for p in config_file.parent.iterdir()) == ["mini.yaml"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--set", "schedule.every_minutes=5"], "--spool DIR"),
        (
            ["--spool", "s", "--set", "schedule.cron='0 0 * * *'", "--set", "schedule.every_minutes=5"],
            "not both",
        ),
        (["--spool", "s", "--set", "schedule.every_minutes=0"], "schedule.every_minutes"),
        pytest.param(["--spool", "s"], "schedule.cron", marks=needs_apscheduler),
        pytest.param(
            ["--spool", "s", "--set", "schedule.cron=daily"], "schedule.cron", marks=needs_apscheduler
        ),
    ],
)
def test_bad_schedules_are_one_line_and_exit_code_2(
    words: list[str], named: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["retrain", "schedule", "mini.yaml", *words])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and named in message and message.count("\n") == 1


@needs_apscheduler
@pytest.mark.slow
def test_scheduled_command_is_run_once_itself(run: Path) -> None:
    """From another folder that holds a `pipeline`, which must not be taken for ours."""
    (run / "pipeline").mkdir()
    (run / "pipeline" / "__init__.py").write_text("raise SystemExit(99)")
    words = ["retrain", "schedule", "tiny.yaml", "--spool", "out/spool", "--set", "retrain.min_records=1000"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pipeline", *words, "--set", "schedule.every_minutes=0.02"],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    note = run / "out" / "schedule" / LAST_RUN
    try:
        wait_for(note.exists)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert json.loads(note.read_text())["code"] == 3, output
    assert json.loads((run / "out" / "retrain" / "result.json").read_text())["outcome"] == "nothing_to_do"

"""The scheduler: one job, kept in an SQL store, so that a start missed while it was down is made up for."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from pipeline.config import Config, ScheduleConfig
from pipeline.console import say
from pipeline.lock import exclusive
from pipeline.schedule.rhythm import describe, latest_start, trigger_for

JOB = "pipeline.schedule.job:run_scheduled"
JOB_ID = "retrain"

WATCH_S = 60.0
"""Between two looks at whether the schedule still lives."""


class ScheduleBroken(UserError):
    """The schedule would start nothing any more; a new process may mend it."""


def schedule_directory(config: Config) -> Path:
    """Job store, lock, notes."""
    return (config.output / "schedule").absolute()


def open_scheduler(config: Config, command: Sequence[str]) -> Any:
    """A paused scheduler with its job in place; the caller holds the lock, resumes it and shuts it down.

    A job from before keeps its next start, also one in the past, which APScheduler makes up for within the grace time. Only
    another rhythm counts anew, and a start later than the rhythm allows, which a clock that was ahead has left.

    Raises:
        UserError: the rhythm makes no sense, or the store cannot be used.
    """
    trigger = trigger_for(config.schedule)
    from apscheduler.executors.pool import ThreadPoolExecutor
    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
    from apscheduler.schedulers.background import BackgroundScheduler
    from sqlalchemy.exc import SQLAlchemyError

    directory = schedule_directory(config)
    directory.mkdir(parents=True, exist_ok=True)
    # the store holds pickled jobs: who can write it can run code as this user
    directory.chmod(0o700)
    address = config.schedule.store or f"sqlite:///{directory / 'jobs.db'}"
    options = {
        "coalesce": True,
        "max_instances": 1,
        "misfire_grace_time": config.schedule.misfire_grace_s,
    }
    arguments = {
        "command": list(command),
        "directory": str(directory),
        "cwd": os.getcwd(),
        "run": config.name,
        "alarms": config.alarms.model_dump(mode="json"),
        "kill_after_s": 60 * config.schedule.kill_after_minutes
        if config.schedule.kill_after_minutes
        else None,
        "patience_s": config.schedule.kill_patience_s,
        "rhythm": describe(config.schedule),
    }
    try:
        scheduler = BackgroundScheduler(
            jobstores={"default": SQLAlchemyJobStore(url=address, tablename=table_of(directory))},
            executors={"default": ThreadPoolExecutor(1)},
            timezone=trigger.timezone,
        )
        scheduler.start(paused=True)
        job = scheduler.get_job(JOB_ID)
        if job is None:
            scheduler.add_job(JOB, trigger, id=JOB_ID, name="retrain run-once", kwargs=arguments, **options)
        else:
            changed = job.kwargs.get("rhythm") != arguments["rhythm"]
            job.modify(kwargs=arguments, **options)
            if changed or _too_late(job.next_run_time, config.schedule):
                job.reschedule(trigger)
    except (SQLAlchemyError, ImportError, OSError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"schedule.store: cannot be used ({cause})") from error
    return scheduler


def table_of(directory: Path) -> str:
    """The table of a run's schedule; a store may hold several, and a scheduler would start every job of a table."""
    return f"retrain_{hashlib.sha256(str(directory).encode()).hexdigest()[:16]}"


def next_start(scheduler: Any) -> datetime | None:
    """When the job is due next, jitter included."""
    job = scheduler.get_job(JOB_ID)
    return None if job is None else job.next_run_time


def look_after(scheduler: Any, settings: ScheduleConfig) -> None:
    """See to it that there will be a next start, and that it is not later than the rhythm allows.

    APScheduler's thread ends without a word when its store refuses a write, and sleeps by a clock that stands still while
    the machine does.

    Raises:
        ScheduleBroken: its thread has ended, or the job is gone from the store.
    """
    from sqlalchemy.exc import SQLAlchemyError

    if not scheduler._thread.is_alive():
        raise ScheduleBroken(
            "retrain schedule: the scheduler's thread has ended, most likely because the job store refused a write (see the "
            "output above); start it again"
        )
    try:
        job = scheduler.get_job(JOB_ID)
        if job is None:
            raise ScheduleBroken("retrain schedule: the job is gone from the store; start the schedule again")
        if _too_late(job.next_run_time, settings):
            say(
                f"the next start {job.next_run_time} is later than the rhythm allows: was the clock set back?"
            )
            job.reschedule(trigger_for(settings))
            say(f"next start {next_start(scheduler)}")
    except (SQLAlchemyError, OSError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        say(f"the job store does not answer ({cause})")
        return
    scheduler.wakeup()


def serve(config: Config, command: Sequence[str], stop: threading.Event) -> None:
    """Run the schedule until `stop` is set; a run under way is waited for.

    Raises:
        Locked: another scheduler works in this output directory.
        ScheduleBroken: nothing more would be started.
        UserError: see `open_scheduler`.
    """
    with exclusive(
        schedule_directory(config) / "scheduler.lock", "another scheduler works here; stop it first"
    ):
        scheduler = open_scheduler(config, command)
        try:
            say(f"{describe(config.schedule)}; next start {next_start(scheduler)}")
            scheduler.resume()
            while not stop.wait(WATCH_S):
                look_after(scheduler, config.schedule)
            say("told to stop; a run under way is finished first")
        finally:
            scheduler.shutdown(wait=True)
        say("stopped")


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; for the main thread."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _too_late(stored: datetime | None, settings: ScheduleConfig) -> bool:
    return stored is None or stored > latest_start(settings, datetime.now(UTC))

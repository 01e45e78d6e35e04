"""When a schedule fires: crontab lines and intervals as APScheduler's triggers."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

from drafters.errors import UserError
from pipeline.config import ScheduleConfig

WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_PART = re.compile(r"(?P<first>\*|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>[1-9]\d*))?")

SLACK = timedelta(seconds=60)
"""By which clocks are put right without anybody noticing."""


def trigger_for(config: ScheduleConfig) -> Any:
    """The trigger of a schedule. Intervals are counted from the epoch, so that a restart does not move them.

    Raises:
        UserError: APScheduler is not installed; neither cron nor interval is given; or one of them makes no sense.
    """
    require_apscheduler()
    from apscheduler.triggers.cron import CronTrigger
    from apscheduler.triggers.interval import IntervalTrigger

    jitter = config.jitter_s or None
    zone = _zone(config)
    if config.every_minutes is not None:
        return IntervalTrigger(
            seconds=60 * config.every_minutes,
            start_date=datetime(1970, 1, 1, tzinfo=UTC),
            timezone=zone,
            jitter=jitter,
        )
    if config.cron is None:
        raise UserError("schedule: give schedule.cron, such as '30 3 * * *', or schedule.every_minutes")
    fields = config.cron.split()
    if len(fields) != 5:
        raise UserError(
            f"schedule.cron: {config.cron!r} has {len(fields)} fields; give minute, hour, day, month, weekday"
        )
    minute, hour, day, month, weekday = fields
    if not day.startswith("*") and not weekday.startswith("*"):
        # crontab fires when either matches, APScheduler when both do: nobody should have to guess
        raise UserError(
            f"schedule.cron: {config.cron!r} restricts both day and weekday; set one of them to *"
        )
    try:
        trigger = CronTrigger(
            minute=minute,
            hour=hour,
            day=day,
            month=month.lower(),
            day_of_week=weekdays(weekday),
            timezone=zone,
            jitter=jitter,
        )
    except ValueError as error:
        raise UserError(f"schedule.cron: {config.cron!r}: {error}") from None
    if trigger.get_next_fire_time(None, datetime.now(UTC)) is None:
        raise UserError(f"schedule.cron: {config.cron!r} never comes; give a day that its month has")
    return trigger


def describe(config: ScheduleConfig) -> str:
    """The rhythm in words; two schedules that fire alike have equal ones."""
    rhythm = f"cron {config.cron}" if config.cron is not None else f"every {config.every_minutes:g} minutes"
    jitter = f", up to {config.jitter_s} s later" if config.jitter_s else ""
    return f"{rhythm} ({config.timezone}){jitter}"


def next_times(config: ScheduleConfig, count: int, now: datetime) -> list[datetime]:
    """The next fire times after `now` (aware), without jitter."""
    trigger = trigger_for(config.model_copy(update={"jitter_s": 0}))
    times: list[datetime] = []
    for _ in range(count):
        previous = times[-1] if times else None
        found = trigger.get_next_fire_time(previous, previous or now)
        if found is None:
            break
        times.append(found)
    return times


def latest_start(config: ScheduleConfig, now: datetime) -> datetime:
    """The time (aware) by which a schedule whose last start was before `now` starts again, jitter included."""
    jitter = timedelta(seconds=config.jitter_s)
    if config.every_minutes is not None:
        return now + SLACK + timedelta(minutes=config.every_minutes) + jitter
    trigger = trigger_for(config.model_copy(update={"jitter_s": 0}))
    found: datetime = trigger.get_next_fire_time(None, now + SLACK)
    return found + jitter


def weekdays(field: str) -> str:
    """A crontab weekday field in names. Numbers count from Sunday there (0 and 7), from Monday in APScheduler.

    Raises:
        ValueError: it is none.
    """
    days: set[int] = set()
    for part in field.lower().split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no weekday")
        if match["first"] == "*":
            if match["last"] is not None:
                raise ValueError(f"{part!r} is no range of weekdays")
            first, last = 0, 6
        else:
            first = _weekday(match["first"])
            alone = 6 if match["step"] else first
            last = alone if match["last"] is None else _weekday(match["last"])
            if match["last"] is not None and last == 0 < first:
                last = 7
        if last < first:
            raise ValueError(f"{part!r} runs backwards")
        days.update(day % 7 for day in range(first, last + 1, int(match["step"] or 1)))
    return "*" if len(days) == 7 else ",".join(WEEKDAYS[day] for day in sorted(days))


def require_apscheduler() -> None:
    """Say what to install where the scheduler is not.

    Raises:
        UserError: APScheduler 3 cannot be imported.
    """
    try:
        import_module("apscheduler.schedulers.background")
    except ImportError:
        raise UserError(
            "retrain schedule: APScheduler 3 is not installed; pip install 'draftsmith[schedule]', or call "
            "`draftsmith retrain run-once` from cron"
        ) from None


def _weekday(text: str) -> int:
    if text.isdecimal() and int(text) <= 7:
        return int(text)
    if text in WEEKDAYS:
        return WEEKDAYS.index(text)
    raise ValueError(f"{text!r} is no weekday; give 0-7 or sun-sat")


def _zone(config: ScheduleConfig) -> Any:
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(config.timezone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise UserError(
            f"schedule.timezone: {config.timezone!r} is unknown; give an IANA name such as Europe/Berlin"
        ) from None

"""Alarms with hysteresis: raised and cleared at different thresholds, after several values in a row; kept between runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pipeline.config import AlarmsConfig, ThresholdConfig
from pipeline.console import say
from pipeline.result import write_json

KEPT_EVENTS = 100
"""Undelivered events kept; the oldest go first."""

KEPT_REFUSALS = 5
"""Refusals by the receiver after which an event is given up, so that it does not hold up the others for ever."""

Change = Literal["raised", "cleared"]


@dataclass(frozen=True)
class AlarmState:
    """`streak` counts the latest values in a row that speak for the other state."""

    raised: bool = False
    streak: int = 0
    value: float | None = None
    since: str | None = None


@dataclass(frozen=True)
class Hysteresis:
    """Rules of one alarm.

    A value of at least `raise_at`, `raise_after` times in a row, raises it; one of at most `clear_at`, `clear_after` times in
    a row, clears it. Between the two thresholds nothing changes, and a streak begins anew.
    """

    raise_at: float
    clear_at: float
    raise_after: int = 1
    clear_after: int = 1

    def update(self, state: AlarmState, value: float | None) -> tuple[AlarmState, Change | None]:
        """The state after one more value, and whether it changed; an unknown value (None) says nothing."""
        if value is None:
            return state, None
        speaks = value <= self.clear_at if state.raised else value >= self.raise_at
        streak = state.streak + 1 if speaks else 0
        if streak < (self.clear_after if state.raised else self.raise_after):
            return replace(state, streak=streak, value=value), None
        change: Change = "cleared" if state.raised else "raised"
        return AlarmState(not state.raised, 0, value, state.since), change


@dataclass
class AlarmBoard:
    """The alarms of a run on disk, with the events that were not delivered yet.

    `seen` is what the latest value of each alarm was measured on, `champion` whose values they are, `refusals` how often the
    receiver has refused the first undelivered event.
    """

    path: Path
    states: dict[str, AlarmState] = field(default_factory=dict)
    undelivered: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    champion: int | None = None
    refusals: int = 0

    @classmethod
    def load(cls, path: Path) -> AlarmBoard:
        """From disk, or a fresh one; a damaged file is set aside, because alarms must not end what they are about."""
        if not path.is_file():
            return cls(path)
        try:
            data = json.loads(path.read_text())
            states = {name: AlarmState(**state) for name, state in data["states"].items()}
            undelivered = [dict(event) for event in data["undelivered"]]
            seen = dict(data.get("seen", {}))
            return cls(path, states, undelivered, seen, data.get("champion"), int(data.get("refusals", 0)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            aside = path.with_name(f"{path.name}.damaged")
            path.replace(aside)
            say(f"WARNING {path} is damaged ({error}): moved to {aside.name}, alarms begin anew")
            return cls(path)

    def observe(
        self,
        rules: Mapping[str, Hysteresis],
        values: Mapping[str, float | None],
        about: Mapping[str, Any],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        seen: Mapping[str, str] | None = None,
        champion: int | None = None,
    ) -> list[dict[str, Any]]:
        """Take one value of each alarm; returns the events, JSON-ready, which count as undelivered from here on.

        `about` is put into each event. `seen` names what a value was measured on: the same as last time is not counted again.
        With another `champion` than last time streaks begin anew. States and events are on disk when this returns.
        """
        events = []
        if champion != self.champion:
            self.states = {name: replace(state, streak=0) for name, state in self.states.items()}
            self.champion, self.seen = champion, {}
        for name, value in values.items():
            rule = rules[name]
            if value is not None and seen is not None:
                value = None if seen[name] == self.seen.get(name) else value
                self.seen[name] = seen[name]
            state, change = rule.update(self.states.get(name, AlarmState()), value)
            if change is not None:
                state = replace(state, since=now().isoformat(timespec="seconds"))
                events.append(_event(name, change, state, rule, about))
            self.states[name] = state
        self.undelivered += events
        if len(self.undelivered) > KEPT_EVENTS:
            self.undelivered, self.refusals = self.undelivered[-KEPT_EVENTS:], 0
        self.save()
        return events

    def delivered(self, events: list[dict[str, Any]]) -> None:
        """Forget events that went out."""
        if events:
            self.refusals = 0
        self.undelivered = [event for event in self.undelivered if event not in events]
        self.save()

    def refused(self) -> dict[str, Any] | None:
        """Note that the receiver refused the first undelivered event; the event, if it is given up with this."""
        self.refusals += 1
        dropped = None
        if self.undelivered and self.refusals >= KEPT_REFUSALS:
            dropped, self.refusals = self.undelivered.pop(0), 0
        self.save()
        return dropped

    def save(self) -> None:
        """Write states and undelivered events, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        states = {name: asdict(state) for name, state in self.states.items()}
        write_json(
            self.path,
            {
                "states": states,
                "undelivered": self.undelivered,
                "seen": self.seen,
                "champion": self.champion,
                "refusals": self.refusals,
            },
        )


def rules_for(config: AlarmsConfig) -> dict[str, Hysteresis]:
    """The configured alarms: `tau_drop`, `population_shift`, and `failing_runs`, whose value is 1 for a run that failed."""

    def rule(thresholds: ThresholdConfig) -> Hysteresis:
        return Hysteresis(thresholds.raise_at, thresholds.clear_at, config.raise_after, config.clear_after)

    return {
        "tau_drop": rule(config.tau_drop),
        "population_shift": rule(config.population_shift),
        "failing_runs": Hysteresis(1.0, 0.0, config.raise_after, 1),
    }


def _event(
    name: str, change: Change, state: AlarmState, rule: Hysteresis, about: Mapping[str, Any]
) -> dict[str, Any]:
    threshold = rule.raise_at if change == "raised" else rule.clear_at
    side = "at or above" if change == "raised" else "at or below"
    text = (
        f"draftsmith {about.get('run', '')}: alarm {name} {change}, {state.value:.3g} is {side} {threshold:g}"
    )
    return {
        **about,
        "alarm": name,
        "event": change,
        "value": state.value,
        "threshold": threshold,
        "time": state.since,
        "text": text,
    }

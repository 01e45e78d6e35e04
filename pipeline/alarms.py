"""Alarms with hysteresis: raised and cleared at different thresholds, after several values in a row; kept between runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from drafters.errors import UserError
from pipeline.config import AlarmsConfig, ThresholdConfig
from pipeline.result import write_json

KEPT_EVENTS = 100
"""Undelivered events kept; the oldest go first."""

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
    """The alarms of a run on disk, with the events that were not delivered yet."""

    path: Path
    states: dict[str, AlarmState] = field(default_factory=dict)
    undelivered: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> AlarmBoard:
        """From disk, or a fresh one.

        Raises:
            UserError: the file is damaged.
        """
        if not path.is_file():
            return cls(path)
        try:
            data = json.loads(path.read_text())
            states = {name: AlarmState(**state) for name, state in data["states"].items()}
            return cls(path, states, list(data["undelivered"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a record of alarms ({error}); delete it to begin anew") from None

    def observe(
        self,
        rules: Mapping[str, Hysteresis],
        values: Mapping[str, float | None],
        about: Mapping[str, Any],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> list[dict[str, Any]]:
        """Take one value of each alarm; returns the events, JSON-ready, which count as undelivered from here on.

        `about` is put into each event. States and events are on disk when this returns.
        """
        events = []
        for name, value in values.items():
            rule = rules[name]
            state, change = rule.update(self.states.get(name, AlarmState()), value)
            if change is not None:
                state = replace(state, since=now().isoformat(timespec="seconds"))
                events.append(_event(name, change, state, rule, about))
            self.states[name] = state
        self.undelivered = [*self.undelivered, *events][-KEPT_EVENTS:]
        self.save()
        return events

    def delivered(self, events: list[dict[str, Any]]) -> None:
        """Forget events that went out."""
        self.undelivered = [event for event in self.undelivered if event not in events]
        self.save()

    def save(self) -> None:
        """Write states and undelivered events, whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        states = {name: asdict(state) for name, state in self.states.items()}
        write_json(self.path, {"states": states, "undelivered": self.undelivered})


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

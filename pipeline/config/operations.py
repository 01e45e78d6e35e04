"""Retraining on a schedule: when to train, when to run, when to raise an alarm."""

from __future__ import annotations

from pydantic import Field, model_validator

from pipeline.config.section import Section


class DriftConfig(Section):
    """What makes `retrain run-once` train before the records alone would."""

    max_tau_drop: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Relative drop of the champion's τ on recent held-out records, against its τ at the gate in the same "
        "domains, from which on it is retrained.",
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="Of the one-sided bound by which a drop must exceed 0 to count."
    )
    min_documents: int = Field(
        16, ge=2, description="Recent held-out records without which τ is not measured."
    )
    min_baseline_documents: int = Field(
        8,
        ge=1,
        description="Documents of a domain at the gate without which its τ is no baseline: of fewer it is mostly noise.",
    )
    window: int = Field(128, ge=2, description="Most recent held-out records that τ is measured on.")
    max_population_shift: float = Field(
        0.2,
        gt=0,
        description="Population stability index of the new records' domains against those of the traffic that the champion "
        "learned from, from which on it is retrained, if chance does not explain it.",
    )


class RetrainConfig(Section):
    """`retrain run-once`: when it trains, on how much, and what it may do with the result."""

    min_records: int | None = Field(
        None,
        ge=1,
        description="New training records without which nothing is trained, whatever drifts; null: online.trigger.",
    )
    enough_records: int | None = Field(
        None,
        ge=1,
        description="New training records that are reason enough to train; null: min_records, so that drift is not waited for.",
    )
    max_records: int = Field(
        1024, ge=1, description="Most training records of one call's round; the rest waits for the next call."
    )
    deploy: bool = Field(
        True,
        description="An accepted challenger becomes champion, in the servers too; false leaves it to a person to promote.",
    )
    drift: DriftConfig = DriftConfig()

    @model_validator(mode="after")
    def _numbers_fit(self) -> RetrainConfig:
        least, enough = self.min_records, self.enough_records
        if least is not None and enough is not None and enough < least:
            raise ValueError(f"enough_records {enough} is below min_records {least}")
        if least is not None and least > self.max_records:
            raise ValueError(f"min_records {least} exceeds max_records {self.max_records}")
        return self


class ScheduleConfig(Section):
    """`retrain schedule`: when it runs `retrain run-once`."""

    cron: str | None = Field(
        None,
        description="Five fields as in crontab, such as `30 3 * * 1-5`; give this or every_minutes.",
    )
    every_minutes: float | None = Field(
        None,
        gt=0,
        description="Minutes from one start to the next, counted from midnight UTC of 1970-01-01; give this or cron.",
    )
    timezone: str = Field("UTC", description="Of the cron fields: an IANA name such as Europe/Berlin.")
    jitter_s: int = Field(
        0,
        ge=0,
        description="Starts come up to so many seconds later, at random; with every_minutes that adds up.",
    )
    misfire_grace_s: int = Field(
        3600,
        ge=1,
        description="A start missed while the scheduler was down is made up for within this time; several count as one. One that "
        "falls into a run is left out.",
    )
    kill_after_minutes: float | None = Field(
        None,
        gt=0,
        description="A run that takes longer is sent SIGTERM, and after kill_patience_s SIGKILL; null waits.",
    )
    kill_patience_s: float = Field(
        60.0,
        gt=0,
        description="Seconds from SIGTERM to SIGKILL; a run that is training finishes its round after SIGTERM, if this is long "
        "enough.",
    )
    store: str | None = Field(
        None, description="SQLAlchemy address of the job store; null: <output>/schedule/jobs.db."
    )

    @model_validator(mode="after")
    def _one_rhythm(self) -> ScheduleConfig:
        if self.cron is not None and self.every_minutes is not None:
            raise ValueError("give either `cron` or `every_minutes`, not both")
        return self


class ThresholdConfig(Section):
    """Two thresholds, so that a value near one of them does not raise and clear an alarm by turns."""

    raise_at: float = Field(gt=0, description="A value from here on counts toward raising the alarm.")
    clear_at: float = Field(
        ge=0, description="A value up to here counts toward clearing it; not above raise_at."
    )

    @model_validator(mode="after")
    def _ordered(self) -> ThresholdConfig:
        if self.clear_at > self.raise_at:
            raise ValueError(f"clear_at {self.clear_at} exceeds raise_at {self.raise_at}")
        return self


class AlarmsConfig(Section):
    """Alarms about drift and failing runs: to the log, and to a webhook if the environment names one."""

    webhook_env: str = Field(
        "DRAFTSMITH_ALARM_WEBHOOK",
        description="Environment variable with the http(s) address that alarms are posted to as JSON; unset: log only.",
    )
    timeout_s: float = Field(5.0, gt=0, description="For one attempt to post an alarm.")
    attempts: int = Field(
        4, ge=1, description="Attempts in one run; what was not delivered goes out with the next run."
    )
    raise_after: int = Field(2, ge=1, description="Values in a row at which an alarm is raised.")
    clear_after: int = Field(2, ge=1, description="Values in a row at which an alarm is cleared.")
    locked_after: int = Field(
        3,
        ge=1,
        description="Scheduled runs in a row that another trainer kept out, from which on they count as failing.",
    )
    tau_drop: ThresholdConfig = Field(
        ThresholdConfig(raise_at=0.1, clear_at=0.05),
        description="Relative drop of the champion's τ on recent held-out records.",
    )
    population_shift: ThresholdConfig = Field(
        ThresholdConfig(raise_at=0.25, clear_at=0.1),
        description="Population stability index of the new records' domains.",
    )

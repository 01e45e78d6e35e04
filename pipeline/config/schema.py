"""All sections of a run, and what must hold between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from pipeline.config.benchmark import BenchmarkConfig
from pipeline.config.data import (
    DataConfig,
    RegenerateConfig,
    TrafficConfig,
)
from pipeline.config.models import (
    DrafterConfig,
    LookaheadConfig,
    PolicyConfig,
    TargetConfig,
)
from pipeline.config.operations import (
    AlarmsConfig,
    RetrainConfig,
    ScheduleConfig,
)
from pipeline.config.section import Section
from pipeline.config.serving import (
    CanaryConfig,
    ServeConfig,
    SGLangConfig,
    TrackingConfig,
)
from pipeline.config.training import (
    EvaluateConfig,
    FitConfig,
    GateConfig,
    LengthHeadConfig,
    LossConfig,
    OnlineConfig,
    PruneConfig,
    TrainerConfig,
)


class Config(Section):
    """Everything a run needs."""

    name: str = Field("run", description="Run name in MLflow.")
    output: Path = Field(Path("outputs/run"), description="Directory of all results.")
    seed: int = Field(0, description="Of everything random: order, anchors, initial weights, sampling.")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each process; null leaves torch's default, or divides the cores.",
    )
    budget_minutes: dict[str, float] = Field(
        default_factory=dict,
        description="Expected minutes of each stage, shown by `run` beside the time taken.",
    )
    target: TargetConfig
    drafter: DrafterConfig = DrafterConfig()
    data: DataConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    trainer: TrainerConfig = TrainerConfig()
    train: FitConfig = FitConfig()
    distill: FitConfig = FitConfig(steps=200, loss=LossConfig(objective="opd"), anchor_source="rounds")
    length_head: LengthHeadConfig = LengthHeadConfig(steps=200, anchor_source="rounds")
    prune: PruneConfig = PruneConfig(steps=200)
    policy: PolicyConfig = PolicyConfig()
    lookahead: LookaheadConfig = LookaheadConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    tracking: TrackingConfig = TrackingConfig()
    online: OnlineConfig = OnlineConfig()
    gate: GateConfig = GateConfig()
    canary: CanaryConfig = CanaryConfig()
    retrain: RetrainConfig = RetrainConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    serve: ServeConfig = ServeConfig()
    sglang: SGLangConfig = SGLangConfig()
    traffic: TrafficConfig = TrafficConfig()

    @model_validator(mode="after")
    def _lengths_fit(self) -> Config:
        if self.policy.length is not None and self.policy.length > self.drafter.block_size:
            raise ValueError(
                f"policy.length {self.policy.length} exceeds drafter.block_size {self.drafter.block_size}"
            )
        return self

    @model_validator(mode="after")
    def _lookahead_fits(self) -> Config:
        if self.lookahead.mode != "off" and self.drafter.family != "d3d":
            raise ValueError(
                f"lookahead.mode {self.lookahead.mode!r} needs drafter.family d3d: "
                f"a {self.drafter.family} drafter waits for the target's states"
            )
        if self.lookahead.mode != "off" and self.policy.name == "throughput":
            raise ValueError(
                f"lookahead.mode {self.lookahead.mode!r} does not go with policy.name 'throughput', "
                "which knows one cost of drafting a block, not that of one prepared or missed: "
                "choose another policy, or set lookahead.mode to off"
            )
        coverage = self.lookahead.coverage
        if coverage is not None and coverage > self.drafter.block_size:
            raise ValueError(
                f"lookahead.coverage {coverage} is outside 1..{self.drafter.block_size} (drafter.block_size)"
            )
        return self

    @model_validator(mode="after")
    def _losses_are_shared(self) -> Config:
        for name in ("train", "distill"):
            loss = getattr(self, name).loss
            normalised = loss.objective == "opd" and loss.clip == "position_normalised"
            if normalised and self.trainer.world_size > 1:
                raise ValueError(
                    f"{name}.loss.clip 'position_normalised' clips by the weights of one process's batch; choose another, or "
                    "trainer.devices 1"
                )
        return self

    def dump(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return self.model_dump(mode="json")

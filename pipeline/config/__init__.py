"""The one configuration schema: YAML presets, `--set a.b=v` overrides, errors that name the dotted path.

Every field says what it does; `draftsmith config schema` prints them. Unknown keys are refused. The schema holds plain
values only; the stages build from it what the rooms below work with.
"""

from __future__ import annotations

from pipeline.config.benchmark import BenchmarkConfig
from pipeline.config.data import (
    DataConfig,
    RegenerateConfig,
    SourceConfig,
    TrafficConfig,
)
from pipeline.config.loading import (
    apply_override,
    describe_errors,
    find_preset,
    load_config,
)
from pipeline.config.models import (
    DrafterConfig,
    LookaheadConfig,
    PolicyConfig,
    TargetConfig,
)
from pipeline.config.operations import (
    AlarmsConfig,
    DriftConfig,
    RetrainConfig,
    ScheduleConfig,
    ThresholdConfig,
)
from pipeline.config.schema import (
    Config,
)
from pipeline.config.section import (
    Section,
)
from pipeline.config.serving import (
    CanaryConfig,
    LaunchConfig,
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
    OptimConfig,
    PruneConfig,
    ReplayBufferConfig,
    TrainerConfig,
)

__all__ = [
    "AlarmsConfig",
    "BenchmarkConfig",
    "CanaryConfig",
    "Config",
    "DataConfig",
    "DrafterConfig",
    "DriftConfig",
    "EvaluateConfig",
    "FitConfig",
    "GateConfig",
    "LaunchConfig",
    "LengthHeadConfig",
    "LookaheadConfig",
    "LossConfig",
    "OnlineConfig",
    "OptimConfig",
    "PolicyConfig",
    "PruneConfig",
    "RegenerateConfig",
    "ReplayBufferConfig",
    "RetrainConfig",
    "SGLangConfig",
    "ScheduleConfig",
    "Section",
    "ServeConfig",
    "SourceConfig",
    "TargetConfig",
    "ThresholdConfig",
    "TrackingConfig",
    "TrafficConfig",
    "TrainerConfig",
    "apply_override",
    "describe_errors",
    "find_preset",
    "load_config",
]

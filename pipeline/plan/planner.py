"""From a configuration to a plan: each strategy's memory and time, and what to change where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drafters.errors import UserError
from pipeline.config import Config
from pipeline.plan.advice import fits_on, single_changes
from pipeline.plan.devices import Device, find_device
from pipeline.plan.memory import Memory, memory_of
from pipeline.plan.models import Models, models_of
from pipeline.plan.step import Stage, Step, step_of
from pipeline.plan.strategy import Strategy, strategies
from pipeline.plan.time import Component, time_of


@dataclass(frozen=True)
class Outcome:
    """A strategy's memory and time on one GPU; `advice` has the single changes with which it would fit, if it does not."""

    strategy: Strategy
    memory: Memory
    time: list[Component]
    fits: bool
    advice: list[str]

    @property
    def seconds(self) -> float:
        """Of one optimizer step."""
        return sum(component.seconds for component in self.time)


@dataclass(frozen=True)
class Plan:
    """What one optimizer step of a stage takes on a device."""

    name: str
    stage: Stage
    device: Device
    models: Models
    step: Step
    outcomes: list[Outcome]
    notes: list[str]


def make_plan(
    config: Config,
    *,
    stage: Stage = "train",
    device: str = "h100",
    gpus: int = 1,
    document_tokens: int | None = None,
) -> Plan:
    """Plan one stage.

    Args:
        config: the run.
        stage: whose objective, anchors and number formats count.
        device: `h200`, `h100`, `a100`, or `cpu` for this machine's.
        gpus: that train.
        document_tokens: of each document; None: the longest that the configuration lets in.

    Raises:
        UserError: naming the option or key.
    """
    if not 1 <= gpus <= 4096:
        raise UserError(f"--gpus: {gpus} is outside 1..4096")
    if device == "cpu" and gpus > 1:
        raise UserError(f"--gpus: {gpus} of device cpu; a CPU is one device")
    models = models_of(config)
    step = step_of(
        config,
        stage,
        vocabulary=models.target.vocab,
        target_bytes=target_bytes(config, device),
        mixed=_mixed(config, stage, device),
        document_tokens=document_tokens,
    )
    found = find_device(device)
    row_tokens = 1 if stage == "online" else config.data.row_tokens
    outcomes = [_outcome(stage, step, models, strategy, found) for strategy in strategies(gpus)]
    return Plan(config.name, stage, found, models, step, outcomes, _notes(models, step, row_tokens))


def target_bytes(config: Config, device: str) -> Literal[2, 4]:
    """Bytes of an element of the target on that device."""
    dtype: str = config.target.dtype
    if device == "cpu":
        from pipeline.hardware import resolve_dtype

        dtype = resolve_dtype(dtype)
    return 4 if dtype == "float32" else 2


def _mixed(config: Config, stage: Stage, device: str) -> bool:
    """Whether the drafter's products are in bfloat16."""
    precision: str = getattr(config, stage).precision
    if device == "cpu":
        from pipeline.hardware import resolve_precision

        precision = resolve_precision(precision)
    return precision != "32-true"


def _outcome(stage: Stage, step: Step, models: Models, strategy: Strategy, device: Device) -> Outcome:
    memory = memory_of(step, models, strategy)
    fits = fits_on(memory, device)
    advice = [] if fits else list(single_changes(stage, step, models, strategy, device))
    return Outcome(strategy, memory, time_of(step, models, strategy, memory, device), fits, advice)


def _notes(models: Models, step: Step, row_tokens: int) -> list[str]:
    """What the figures do not say by themselves."""
    from drafters.target import SUPPORTED_MODEL_TYPES

    notes = []
    kind = models.target.model_type
    if kind not in SUPPORTED_MODEL_TYPES:
        notes.append(f"targets of architecture {kind} are planned for, not trained for yet")
    if row_tokens >= step.document_tokens and step.anchors < step.response_tokens - 1:
        notes.append(
            "shorter documents fill a row with more blocks, which takes more memory: try --document-tokens"
        )
    return notes

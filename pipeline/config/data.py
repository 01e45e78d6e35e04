"""Prompts, the target's responses, and live traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.section import Section


class SourceConfig(Section):
    """One source of prompts: a JSONL file or a `datasets` name."""

    path: Path | None = Field(None, description="JSONL with `messages`, `turns` or ShareGPT `conversations`.")
    dataset: str | None = Field(None, description="Name for datasets.load_dataset.")
    dataset_config: str | None = Field(None, description="Configuration of the dataset, if it has several.")
    split: str = Field("train", description="Split of the dataset.")
    domain: str | None = Field(None, description="Domain of all rows; null takes each row's own.")
    weight: float = Field(1.0, gt=0, description="Share in the mixture.")
    limit: int | None = Field(None, ge=1, description="Most rows to take.")

    @model_validator(mode="after")
    def _one_origin(self) -> SourceConfig:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("give exactly one of `path` and `dataset`")
        return self


class DataConfig(Section):
    """Prompts and how documents become batches."""

    train: list[SourceConfig] = Field(min_length=1, description="Weighted mixture of prompt sources.")
    heldout: list[SourceConfig] = Field(
        default_factory=list,
        description="Prompts to report on; they decide nothing. `evaluate` and `run` with the embedded engine need them.",
    )
    val_fraction: float = Field(
        0.05, ge=0, lt=1, description="Share of training prompts kept for validation and the gate, by hash."
    )
    limit: int | None = Field(None, ge=1, description="Most training prompts in all.")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longer prompts are skipped and counted.")
    max_length: int = Field(2048, ge=8, description="Documents are cut to this many tokens.")
    row_tokens: int = Field(2048, ge=1, description="Documents are packed end to end up to this length.")


class RegenerateConfig(Section):
    """Responses of the target to the prompts."""

    max_new_tokens: int = Field(256, ge=2, description="Longest answer to a training prompt.")
    batch_size: int = Field(16, ge=1, description="Prompts answered at a time.")
    temperature: float = Field(
        0.0, ge=0, description="Of the training answers; 0 is greedy. Held-out ones are always greedy."
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the sampling; 1 switches it off.")
    top_k: int = Field(0, ge=0, description="Most likely tokens to sample from; 0 takes all.")
    truncated: Literal["keep", "drop"] = Field("keep", description="Responses cut by max_new_tokens.")


class TrafficConfig(Section):
    """Prompts that the whole-loop run sends to the embedded engine."""

    sources: list[SourceConfig] = Field(default_factory=list, description="Prompts of the traffic.")
    limit: int | None = Field(None, ge=1, description="Most requests in all.")
    domain: str | None = Field(None, description="Domain whose held-out τ is reported before and after.")

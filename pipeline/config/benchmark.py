"""Benchmarks that `evaluate` reports on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.section import Section


class BenchmarkConfig(Section):
    """What `evaluate` decodes, how, and how it sums up; the command line overrides it."""

    names: list[str] = Field(
        default_factory=list,
        description="Benchmarks: names that `evaluate --list` prints, NAME=PATH for a JSONL file, OWNER/NAME:SPLIT for the "
        "hub, or heldout for data.heldout.",
    )
    drafters: list[str] = Field(
        default_factory=list,
        description="Drafters: directories, registry versions or aliases, each as PLACE or LABEL=PLACE; none takes the latest.",
    )
    methods: list[str] | None = Field(
        None,
        description="ar, fixed, fixed:N, adaflash, survival, throughput, d3d-sync, d3d-async; null: those that the drafters can "
        "do, or what the servers run.",
    )
    backend: Literal["local", "sglang"] = Field(
        "local", description="local: the embedded engine; sglang: running servers."
    )
    urls: list[str] = Field(
        default_factory=list,
        description="Servers of the backend sglang, one for each method; none: sglang.urls.",
    )
    limit: int | None = Field(
        None, ge=1, description="Most conversations of each benchmark, taken evenly over it."
    )
    max_new_tokens: int = Field(256, ge=2, description="Longest answer to a turn.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus of the sampling; 1 switches it off.")
    top_k: int = Field(0, ge=0, description="Most likely tokens to sample from; 0 takes all.")
    thinking: bool | None = Field(
        None, description="The chat template's enable_thinking; null leaves it to the template."
    )
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=lambda: [1], min_length=1, description="Conversations under way at a time."
    )
    warmup_tokens: int = Field(16, ge=0, description="Tokens decoded before each timed run; 0 for none.")
    request_timeout_s: float = Field(3600.0, gt=0, description="For a single request to a server.")
    context_buckets: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=lambda: [256, 1024, 4096, 16384],
        description="Tokens before the anchor at which the next bucket of context lengths begins.",
    )
    divergence_documents: int = Field(
        8, ge=0, description="Answers whose draft and target distributions are compared; 0 for none."
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="Of the two-sided bootstrap intervals.")
    bootstrap_samples: int = Field(2000, ge=100, description="Resamples of the bootstrap.")

    @field_validator("context_buckets")
    @classmethod
    def _ascending(cls, value: list[int]) -> list[int]:
        if sorted(set(value)) != value:
            raise ValueError("bounds must ascend")
        return value

    @model_validator(mode="after")
    def _servers_fit(self) -> BenchmarkConfig:
        if self.urls and self.backend != "sglang":
            raise ValueError(
                "urls are servers of the backend sglang; set backend to sglang, or leave urls out"
            )
        if len(set(self.concurrency)) != len(self.concurrency):
            raise ValueError("concurrency: each number once")
        return self

"""Target, drafter, and how they decode."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from pipeline.config.section import Section


class TargetConfig(Section):
    """The model to speed up."""

    model: str = Field(
        description="HF directory or hub name; `package:NAME` takes the GGUF file inside an installed package; "
        "`tiny:llama` and `tiny:qwen3` make a small random model on the spot (tests)."
    )
    revision: str = Field(
        "main", description="Hub revision; a local directory is told apart by a fingerprint of its files."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 where this machine multiplies it faster than float32."
    )
    mask_token_id: int | None = Field(
        None, description="Mask token; null applies the rule in docs/concepts.md."
    )


class DrafterConfig(Section):
    """Architecture and starting weights."""

    family: Literal["dflash", "d3d"] = Field(
        "dflash", description="dflash: reads the target's states; d3d: a causal LM of its own."
    )
    model: str | None = Field(
        None,
        description="d3d: hub name or HF directory of the causal LM to train; null takes the target itself.",
    )
    num_layers: int = Field(4, ge=1, description="Layers of a dflash drafter; d3d has those of its model.")
    block_size: int = Field(
        8, ge=2, le=64, description="Slots per block, anchor included: B drafts B-1 tokens."
    )
    num_context_layers: int = Field(5, ge=1, description="Target layers whose states feed the drafter.")
    target_layer_ids: list[int] | None = Field(
        None,
        description="Explicit ids (0 = first decoder layer's output); null spreads `num_context_layers`.",
    )
    init: Literal["random", "target"] = Field(
        "random", description="Random, or copies of target layers; d3d: or the weights of its model."
    )
    init_layer_ids: list[int] | None = Field(None, description="Target layers to copy for `init: target`.")
    shift: bool = Field(
        True,
        description="d3d: a row predicts the token after its own, as in the causal LM that the drafter comes from, and the "
        "anchor's row the first draft; false: the row of a mask predicts the token in its place.",
    )
    freeze_mlp: bool = Field(
        False,
        description="Leave the MLPs as they are: copied ones know what they need, and steps become cheaper.",
    )


class PolicyConfig(Section):
    """Length policy of serving."""

    name: Literal["fixed", "adaflash", "survival", "throughput"] = Field(
        "adaflash",
        description="fixed: one length; adaflash: the length head, whole blocks without one; survival: drafts that the "
        "acceptance head finds likely enough to be reached; throughput: all requests' lengths together, for the most tokens per "
        "measured second, plain decoding included. The last two need an acceptance head.",
    )
    length: int | None = Field(None, ge=1, description="verify_len of `fixed`; null verifies whole blocks.")
    gamma: float = Field(1.0, gt=0, description="γ of adaflash: scales the predicted length.")
    gamma_by_load: dict[int, float] = Field(
        default_factory=dict, description="From this many running requests on → γ."
    )
    off_below_load: int = Field(
        0, ge=0, description="Below this many running requests the head is not asked."
    )
    threshold: float = Field(
        0.3,
        ge=0,
        le=1,
        description="survival: verify drafts whose chance that they and all before are accepted is at least this.",
    )
    threshold_by_load: dict[int, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict, description="survival: from this many running requests on → threshold."
    )
    probe_every: int = Field(
        64,
        ge=3,
        description="throughput: once in so many rounds, what seems not to pay is tried: one plain round, or two with drafts; "
        "up to 16 times as rarely where that would take more than 1/200 of the time.",
    )


class LookaheadConfig(Section):
    """Drafting ahead while the target verifies: d3d in the embedded engine, so far measured and checked by `evaluate`."""

    mode: Literal["off", "fixed", "auto"] = Field(
        "off", description="fixed: coverage and fan_out as given; auto: the fastest by measurement."
    )
    coverage: int | None = Field(
        None,
        ge=1,
        description="C: positions prepared for, full acceptance included; in auto the most. null: 3/4 of a block, in auto all.",
    )
    fan_out: int = Field(
        2, ge=1, description="F: tokens prepared for at each position; in auto the most tried."
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the worker, the target gets the rest; null: half of them."
    )
    cores: list[int] | None = Field(None, min_length=1, description="Cores that the worker is pinned to.")
    measure_documents: int = Field(4, ge=1, description="Held-out documents that speed is measured on.")
    slowdowns: list[Annotated[float, Field(gt=0)]] = Field(
        default_factory=list,
        description="Evaluate also with a target slowed down to so many times the drafter's pass.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        # YAML reads a bare off as false
        return "off" if value is False else value

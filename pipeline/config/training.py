"""Training stages, online rounds, and what is measured of their drafters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.section import Section


class LossConfig(Section):
    """Objective; see docs/concepts.md for the formulas and the traps of each clip mode."""

    objective: Literal["ce", "opd", "osd"] = Field(
        "ce",
        description="ce: hard cross-entropy; opd: hard label and clipped reverse KL; osd: forward KL.",
    )
    alpha: float = Field(0.8, ge=0, le=1, description="Share of the hard label in opd.")
    delta: float = Field(0.01, gt=0, description="Clipping threshold, nats.")
    clip: Literal["entry", "position", "position_normalised", "bounded", "none"] = Field(
        "bounded", description="How opd clips its reverse KL at `delta`."
    )
    temperature: float = Field(1.0, gt=0, description="Softens both sides of the reverse KL in opd.")
    weighting: Literal["exponential", "uniform", "survival"] = Field(
        "exponential", description="Slots by distance, alike, or by the chance that serving reaches them."
    )
    decay: float | None = Field(None, gt=0, description="Decay in slots; null means block_size / 2.")
    survival_floor: float = Field(
        0.3, ge=0, lt=1, description="ε of `survival`: keeps late slots learning while early ones still fail."
    )
    ar_weight: float = Field(1.0, ge=0, description="d3d: λ, the share of the next-token loss in training.")


class OptimConfig(Section):
    """AdamW."""

    lr: float = Field(3e-4, gt=0, description="Peak learning rate of the drafter.")
    head_lr: float = Field(2e-4, gt=0, description="Own rate of the length and the acceptance head.")
    weight_decay: float = Field(0.01, ge=0, description="On matrices; norms and biases are not decayed.")
    warmup_steps: int = Field(20, ge=0, description="Optimizer steps of linear warm-up.")
    schedule: Literal["constant", "cosine"] = Field(
        "cosine", description="After the warm-up: constant, or down to zero at the last step."
    )
    clip_norm: float = Field(1.0, gt=0, description="Largest norm of the gradient.")


class FitConfig(Section):
    """One training stage."""

    steps: int = Field(1000, ge=1, description="Optimizer steps.")
    max_minutes: float | None = Field(None, gt=0, description="Stop after this long, whatever the step.")
    accumulate: int = Field(1, ge=1, description="Batches per optimizer step.")
    max_documents: int | None = Field(
        None, ge=1, description="Train on this many documents, drawn by the seed; null takes all."
    )
    anchors_per_document: int = Field(64, ge=1, description="Most blocks trained in a document at a visit.")
    anchor_source: Literal["random", "rounds"] = Field(
        "random", description="Where blocks begin: anywhere, or where serving begins its rounds."
    )
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    validate_every: int = Field(200, ge=1, description="Steps between replays of the validation documents.")
    checkpoint_every: int = Field(200, ge=1, description="Steps between resumable checkpoints.")
    feature_cache_mib: int = Field(
        0,
        ge=0,
        description="Memory for the target's states of training documents, kept between epochs; 0 keeps none.",
    )
    vocabulary: int | None = Field(
        None,
        ge=1,
        description="Tokens that the loss sees: those of the documents, filled up to this many with the tokenizer's "
        "first; null takes all. Saves most of the head's cost on a small corpus.",
    )
    precision: Literal["auto", "32-true", "bf16-mixed"] = Field(
        "auto", description="auto: bf16-mixed where this machine multiplies bfloat16 faster than float32."
    )


class TrainerConfig(Section):
    """The processes that train, distil, prune and fit heads together, each on batches of its own; see docs/distributed.md.

    An optimizer step then sees `devices` × `num_nodes` times as many documents. Online rounds use one process.
    """

    devices: int = Field(
        1, ge=1, description="Processes on a machine: GPUs, or on a machine without any, parts of its cores."
    )
    num_nodes: int = Field(
        1, ge=1, description="Machines; with more than one, torchrun starts the same command on each."
    )
    strategy: Literal["ddp", "fsdp2"] = Field(
        "ddp",
        description="ddp: the whole drafter in every process; fsdp2: its weights, gradients and moments divided among them. "
        "The target is whole in every process. One process ignores this.",
    )

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.devices * self.num_nodes


class LengthHeadConfig(FitConfig):
    """The fit of the length head and the acceptance head. `loss`, `vocabulary` and `validate_every` have no effect here."""

    width: int = Field(128, ge=1, description="Width of the head's hidden layer.")
    features: Literal["hidden", "embedding"] = Field(
        "hidden", description="What the head reads: the drafter's final hidden states, or its input."
    )
    acceptance: bool = Field(
        True, description="Fit the acceptance head too, which the policies survival and throughput need."
    )
    confidence: bool = Field(
        True,
        description="The acceptance head also reads how sure the drafter is: better, for a pass over the draft logits.",
    )


class PruneConfig(FitConfig):
    """Removal of layers, each followed by recovery, which these keys of a training stage describe (slot weights fixed)."""

    layers: int | None = Field(None, ge=1, description="Stop at this many layers; null: at the floor alone.")
    retention: float = Field(
        0.99, ge=0, le=1, description="Stop before τ falls below this share of the whole drafter's."
    )
    label_share: float = Field(
        0.1, ge=0, lt=1, description="ε: weight of the served token beside the whole drafter's distribution."
    )
    repair: bool = Field(
        True,
        description="Before recovery, the MLP before a removed layer is refitted in closed form to add what that layer did.",
    )
    repair_batches: int = Field(
        40,
        ge=1,
        description="Training batches that repairs are fitted on; have more rows than an MLP is wide.",
    )
    candidates: int | None = Field(
        None,
        ge=1,
        description="Layers whose removal is measured in τ: those that a repair makes up for best; null: all.",
    )
    measure_documents: int | None = Field(
        None, ge=1, description="Validation documents that removals are measured on; null takes all."
    )

    @model_validator(mode="after")
    def _candidates_are_ranked(self) -> PruneConfig:
        if self.candidates is not None and not self.repair:
            raise ValueError("candidates are ranked by their repairs: leave candidates null, or repair true")
        return self


class ReplayBufferConfig(Section):
    """Earlier records mixed into online rounds, against forgetting."""

    capacity: int = Field(1024, ge=0, description="Most records kept.")
    share: float = Field(0.25, ge=0, lt=1, description="Share of a round's documents drawn from the buffer.")
    max_age_rounds: int = Field(20, ge=1, description="Records older than this many rounds leave.")
    seed_offline: bool = Field(True, description="Start the buffer with offline documents.")


class OnlineConfig(Section):
    """Continual updates from verification records (AdaFlash B.1 defaults)."""

    trigger: int = Field(128, ge=1, description="Fresh training records that start a round.")
    passes: int = Field(2, ge=1, description="Times each document is visited in a round.")
    accumulate: int = Field(2, ge=1, description="Documents per optimizer step.")
    max_length: int = Field(2048, ge=8, description="Records are cut to this many tokens.")
    max_rounds: int | None = Field(None, ge=1, description="Stop after this many rounds; null goes on.")
    idle_timeout_s: float | None = Field(None, gt=0, description="Stop when no record came for this long.")
    poll_s: float = Field(1.0, gt=0, description="Wait between looks at an empty spool.")
    holdout_fraction: float = Field(0.15, gt=0, lt=1, description="Conversations kept for the gate, by hash.")
    holdout_capacity: int = Field(256, ge=1, description="Most recent held-out records judged by the gate.")
    max_record_age_s: float | None = Field(
        None, gt=0, description="Skip records this much older than the newest one; null keeps all."
    )
    anchors_per_document: int = Field(64, ge=1, description="Most blocks trained in a document at a visit.")
    anchor_source: Literal["random", "rounds"] = Field(
        "rounds", description="Where blocks begin: anywhere, or where serving begins its rounds."
    )
    loss: LossConfig = LossConfig(objective="opd")
    optim: OptimConfig = OptimConfig(schedule="constant", warmup_steps=10)
    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    checkpoint_every: int = Field(
        50, ge=1, description="Steps between checkpoints inside a round; its end always makes one."
    )
    feature_cache_mib: int = Field(
        0,
        ge=0,
        description="Memory for the target's states of a run's documents, kept between passes; 0 keeps none.",
    )
    vocabulary: int | None = Field(
        None,
        ge=1,
        description="Tokens that a round's loss sees: those of its documents, filled up to this many with the "
        "tokenizer's first; null takes all.",
    )
    precision: Literal["auto", "32-true", "bf16-mixed"] = Field(
        "auto", description="auto: bf16-mixed where this machine multiplies bfloat16 faster than float32."
    )


class EvaluateConfig(Section):
    """Held-out evaluation and the lossless check."""

    max_new_tokens: int = Field(64, ge=2, description="Longest answer to a held-out prompt.")
    lossless_prompts: int = Field(20, ge=0, description="Prompts decoded in fp32 against AR, per policy.")
    lossless_tokens: int = Field(
        64, ge=2, description="Tokens of each that are decoded and compared, at most."
    )
    speed_prompts: int = Field(
        6, ge=0, description="Prompts timed for tokens/s of AR and speculative decoding."
    )
    fixed_lengths: list[int] = Field(default_factory=list, description="Further fixed verify_len to check.")


class GateConfig(Section):
    """When a challenger becomes champion."""

    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="Of the one-sided lower bound that the gain in τ must keep above 0."
    )
    min_documents: int = Field(16, ge=2, description="Held-out documents without which nothing is judged.")
    max_domain_drop: float = Field(
        0.05, ge=0, lt=1, description="Relative τ drop allowed in a domain of at least 8 documents."
    )
    bootstrap_samples: int = Field(2000, ge=100, description="Resamples of the paired bootstrap.")

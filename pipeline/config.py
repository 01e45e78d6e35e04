"""The one configuration schema: YAML presets, `--set a.b=v` overrides, errors that name the dotted path.

Every field says what it does; `draftsmith config schema` prints them. Unknown keys are refused. The schema holds plain
values only; the objects that the rooms below work with are built from it in `pipeline.build`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from drafters.errors import UserError


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_own_defaults(cls, data: Any) -> Any:
        """A section given in part keeps the rest of this place's default, not of its class's.

        `distill: {steps: 5}` must not turn distillation into cross-entropy.
        """
        if not isinstance(data, dict):
            return data
        places = {k: f.default for k, f in cls.model_fields.items() if isinstance(f.default, Section)}
        return {k: _merged(places[k].model_dump(), v) if k in places else v for k, v in data.items()}


def _merged(default: dict[str, Any], given: Any) -> Any:
    """`given` over `default`, section by section."""
    if not isinstance(given, dict):
        return given
    nested = {k: _merged(default[k], v) if isinstance(default.get(k), dict) else v for k, v in given.items()}
    return default | nested


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
    freeze_mlp: bool = Field(
        False,
        description="Leave the MLPs as they are: copied ones know what they need, and steps become cheaper.",
    )


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
    head_lr: float = Field(2e-4, gt=0, description="Length head's own rate.")
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


class LengthHeadConfig(FitConfig):
    """The length head's fit. `loss`, `vocabulary` and `validate_every` have no effect here."""

    width: int = Field(128, ge=1, description="Width of the head's hidden layer.")
    features: Literal["hidden", "embedding"] = Field(
        "hidden", description="What the head reads: the drafter's final hidden states, or its input."
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
    candidates: int | None = Field(
        None,
        ge=1,
        description="Layers whose removal is measured again after the first: those least missed so far; null: all.",
    )
    measure_documents: int | None = Field(
        None, ge=1, description="Validation documents that removals are measured on; null takes all."
    )


class PolicyConfig(Section):
    """Length policy of serving."""

    name: Literal["fixed", "adaflash"] = Field(
        "adaflash", description="fixed: one length; adaflash: the length head, whole blocks without one."
    )
    length: int | None = Field(None, ge=1, description="verify_len of `fixed`; null verifies whole blocks.")
    gamma: float = Field(1.0, gt=0, description="γ of adaflash: scales the predicted length.")
    gamma_by_load: dict[int, float] = Field(
        default_factory=dict, description="From this many running requests on → γ."
    )
    off_below_load: int = Field(
        0, ge=0, description="Below this many running requests the head is not asked."
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


class TrackingConfig(Section):
    """MLflow."""

    uri: str | None = Field(
        None, description="Tracking URI; null keeps a SQLite file in the output directory."
    )
    experiment: str = Field("draftsmith", description="MLflow experiment that runs are logged to.")
    model_name: str | None = Field(
        None, description="Registered model; null derives it from target and family."
    )


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


class CanaryConfig(Section):
    """Watching a new champion on live traffic."""

    min_records: int = Field(12, ge=2, description="Records of the new version before the first verdict.")
    max_records: int = Field(96, ge=2, description="Records at which the estimate decides, sure or not.")
    error_rate: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="Probability of rolling back a good drafter, and of keeping a bad one.",
    )
    max_drop: float = Field(0.1, ge=0, lt=1, description="Relative drop of live acceptance that rolls back.")
    timeout_s: float = Field(600.0, gt=0, description="Without enough traffic the gate's verdict stands.")


class ServeConfig(Section):
    """How a whole-loop run serves its traffic."""

    engine: Literal["local", "sglang"] = Field(
        "local",
        description="local: the embedded engine; sglang: a real server, started as sglang.launch says.",
    )
    max_new_tokens: int = Field(64, ge=1, description="Longest answer to a traffic prompt.")
    max_running: int = Field(2, ge=1, description="Requests under way at a time.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature of the traffic; 0 is greedy.")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of serving while the trainer works, which gets the rest; null: no division.",
    )
    spool_max_bytes: int = Field(8 * 2**20, ge=1024, description="Size at which a spool segment is sealed.")
    spool_max_age_s: float = Field(
        5.0, gt=0, description="Age at which a spool segment is sealed, so that readers see its records."
    )


class LaunchConfig(Section):
    """How `deploy --launch` starts SGLang."""

    python: str = Field("python", description="Interpreter of the environment that SGLang is installed in.")
    model: str | None = Field(None, description="Directory or hub name of the target; null: target.model.")
    preset: Literal["cuda", "cpu"] = Field("cuda", description="cpu: for tests and demos, on one machine.")
    algorithm: Literal["DFLASH", "ADAFLASH", "D3D"] = Field(
        "ADAFLASH",
        description="ADAFLASH verifies as much of a block as the length head finds worth it; D3D serves d3d drafters.",
    )
    verify: Literal["auto", "compact", "static"] = Field(
        "auto", description="compact: one packed pass of Σ verify_len rows; static: whole blocks."
    )
    host: str = Field(
        "127.0.0.1", description="Address to listen on; others than loopback need an admin key."
    )
    port: int = Field(30000, ge=1, le=65535, description="Port to listen on.")
    threads: int = Field(1, ge=1, description="CPU threads of the cpu preset.")
    max_total_tokens: int | None = Field(None, ge=64, description="Cache size in tokens; null: SGLang's own.")
    max_running: int | None = Field(None, ge=1, description="Requests decoded together; null: SGLang's own.")
    context_length: int | None = Field(
        None, ge=16, description="Longest request in tokens; null: the model's."
    )
    extra: list[str] = Field(default_factory=list, description="Further arguments, as SGLang spells them.")


class SGLangConfig(Section):
    """Running SGLang servers, and the plugin inside them."""

    urls: list[str] = Field(
        default_factory=list, description="Servers to keep on the champion: http://HOST:PORT."
    )
    log: str | None = Field(
        None, description="Where servers leave records: a directory or redis://…; null: <output>/spool."
    )
    drafter_root: Path | None = Field(
        None, description="Directory that servers load drafters from (swap_root); null: <output>/drafters."
    )
    admin_key_env: str = Field(
        "SGLANG_ADMIN_KEY", description="Environment variable with the servers' admin key, if they have one."
    )
    api_key_env: str = Field("SGLANG_API_KEY", description="Environment variable with the servers' API key.")
    deadline_s: float = Field(120.0, gt=0, description="For a swap, the reading of the weights included.")
    call_timeout_s: float = Field(30.0, gt=0, description="For a single call of a server.")
    verify_target: bool = Field(
        True,
        description="Compare the target's checksum before and after a swap; costs a pass over its weights.",
    )
    log_share: float = Field(1.0, ge=0, le=1, description="Share of conversations that servers log.")
    log_by_default: bool = Field(True, description="Log requests that do not say whether they may be.")
    redact: str = Field("", description="module:function applied to each record on the server; may drop it.")
    target_top_k: int = Field(0, ge=0, le=64, description="Best target tokens logged for each verified slot.")
    buffer_records: int = Field(1024, ge=1, description="Records that wait for a slow log on a server.")
    admission_beta: float | None = Field(
        None, gt=0, lt=1, description="β of the admission estimate (AdaFlash §3.3); null leaves it to SGLang."
    )
    launch: LaunchConfig = LaunchConfig()


class TrafficConfig(Section):
    """Prompts that the whole-loop run sends to the embedded engine."""

    sources: list[SourceConfig] = Field(default_factory=list, description="Prompts of the traffic.")
    limit: int | None = Field(None, ge=1, description="Most requests in all.")
    domain: str | None = Field(None, description="Domain whose held-out τ is reported before and after.")


class Config(Section):
    """Everything a run needs."""

    name: str = Field("run", description="Run name in MLflow.")
    output: Path = Field(Path("outputs/run"), description="Directory of all results.")
    seed: int = Field(0, description="Of everything random: order, anchors, initial weights, sampling.")
    threads: int | None = Field(None, ge=1, description="CPU threads; null leaves torch's default.")
    budget_minutes: dict[str, float] = Field(
        default_factory=dict,
        description="Expected minutes of each stage, shown by `run` beside the time taken.",
    )
    target: TargetConfig
    drafter: DrafterConfig = DrafterConfig()
    data: DataConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    train: FitConfig = FitConfig()
    distill: FitConfig = FitConfig(steps=200, loss=LossConfig(objective="opd"), anchor_source="rounds")
    length_head: LengthHeadConfig = LengthHeadConfig(steps=200, anchor_source="rounds")
    prune: PruneConfig = PruneConfig(steps=200)
    policy: PolicyConfig = PolicyConfig()
    lookahead: LookaheadConfig = LookaheadConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    tracking: TrackingConfig = TrackingConfig()
    online: OnlineConfig = OnlineConfig()
    gate: GateConfig = GateConfig()
    canary: CanaryConfig = CanaryConfig()
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
        coverage = self.lookahead.coverage
        if coverage is not None and coverage > self.drafter.block_size:
            raise ValueError(
                f"lookahead.coverage {coverage} is outside 1..{self.drafter.block_size} (drafter.block_size)"
            )
        return self

    def dump(self) -> dict[str, Any]:
        """Plain JSON-able values."""
        return self.model_dump(mode="json")


def load_config(path: Path, overrides: list[str] | None = None) -> Config:
    """Read a YAML file and apply `a.b=v` overrides.

    A preset name without a path (`quickstart`) means the one shipped in `configs/`. Relative paths inside the file are
    tried from the working directory first, then beside the file.

    Raises:
        UserError: naming the file or dotted key.
    """
    path = find_preset(path)
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a mapping of sections at the top level")
    for override in overrides or []:
        apply_override(data, override)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{path}: {describe_errors(error)}") from None
    return _resolve_paths(config, path.parent)


def find_preset(path: Path) -> Path:
    """The file itself, or the shipped preset of that name."""
    if path.is_file():
        return path
    shipped = Path(__file__).resolve().parent.parent / "configs"
    for candidate in (shipped / path.name, shipped / f"{path.name}.yaml"):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(p.stem for p in shipped.glob("*.yaml")))
    raise UserError(f"{path}: no such config file; shipped presets: {known}")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key in raw data; the value is parsed as YAML. List items are addressed by index."""
    key, separator, raw = override.partition("=")
    if not separator or not key:
        raise UserError(f"--set {override}: expected KEY=VALUE with a dotted key, such as train.steps=100")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        raise UserError(f"--set {override}: the value is not valid YAML") from None
    node: Any = data
    parts = key.split(".")
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        where = ".".join(parts[: i + 1])
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise UserError(f"--set {override}: {where} is not an item of a list of {len(node)}")
            if last:
                node[int(part)] = value
            node = node[int(part)]
        elif isinstance(node, dict):
            if last:
                node[part] = value
            elif node.get(part) is None:
                node[part] = {}
            node = node[part]
        else:
            raise UserError(f"--set {override}: {'.'.join(parts[:i])} holds a value, not a section")


def describe_errors(error: ValidationError) -> str:
    """One line: every dotted path and what is wrong there."""
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(p) for p in item["loc"]) or "config"
        parts.append(f"{where}: {item['msg']}")
    return "; ".join(parts)


def _resolve_paths(config: Config, base: Path) -> Config:
    def resolve(source: SourceConfig) -> SourceConfig:
        if source.path is None or source.path.is_absolute() or source.path.exists():
            return source
        beside = base / source.path
        return source.model_copy(update={"path": beside}) if beside.exists() else source

    data = config.data.model_copy(
        update={
            "train": [resolve(s) for s in config.data.train],
            "heldout": [resolve(s) for s in config.data.heldout],
        }
    )
    traffic = config.traffic.model_copy(update={"sources": [resolve(s) for s in config.traffic.sources]})
    return config.model_copy(update={"data": data, "traffic": traffic})

"""What a stage would read and write, from the configuration and the files alone: `--dry-run`, and default inputs.

Nothing here loads a model, a tokenizer or a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from drafters.errors import UserError
from pipeline.config import Config, FitConfig, SourceConfig
from serving_bridge.transports import LogPlace, is_stream

MANIFEST = "manifest.json"  # named here because drafters.checkpoint imports torch
OUTPUTS = {
    "data regenerate": ["responses"],
    "train": ["train"],
    "distill": ["distill"],
    "distill --online": ["online"],
    "fit-length-head": ["length_head"],
    "prune": ["prune"],
    "evaluate": ["evaluate"],
    "tune-policy": ["tune_policy"],
    "simulate": ["simulate"],
    "deploy": ["deploy"],
    "run": ["responses", "train", "distill", "length_head", "evaluate", "deploy", "online"],
}
"""What each command writes below the output directory."""

DRAFTER_SOURCES = {
    "prune": ["train"],
    "distill": ["prune", "train"],
    "fit-length-head": ["distill", "prune", "train"],
    "evaluate": ["length_head", "distill", "prune", "train"],
    "tune-policy": ["length_head", "distill", "prune", "train"],
    "simulate": ["length_head", "distill", "prune", "train"],
    "deploy": ["length_head", "distill", "prune", "train"],
}
"""Stages whose drafter a command takes when `--drafter` is not given, latest stage first."""


@dataclass
class StagePlan:
    """Labelled lines of a plan. `missing` says what keeps the stage from starting, and what to do about it."""

    command: str
    reads: list[tuple[str, str]] = field(default_factory=list)
    writes: list[Path] = field(default_factory=list)
    sizes: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The plan as text, one item a line."""
        yield f"{self.command} would"
        yield from _section("read", self.reads)
        yield from _section("write", [("", str(path)) for path in self.writes])
        yield from _section("sizes", self.sizes)


def choose_drafter(output: Path, command: str, given: Path | None) -> Path:
    """The drafter directory given, or that of the latest earlier stage that has left one.

    Raises:
        UserError: the directory given holds no drafter, or no earlier stage has run.
    """
    if given is not None:
        check_drafter(given, "--drafter")
        return given
    candidates = [output / stage / "drafter" for stage in DRAFTER_SOURCES[command]]
    for candidate in candidates:
        if (candidate / MANIFEST).is_file():
            return candidate
    looked = ", ".join(str(candidate) for candidate in candidates)
    raise UserError(
        f"{command}: no drafter yet (looked for {looked}); run `draftsmith train` first, or give --drafter"
    )


def newer_drafter(output: Path, command: str, chosen: Path) -> Path | None:
    """An earlier stage's drafter that was written after the chosen one: that stage has been repeated since."""
    written = (chosen / MANIFEST).stat().st_mtime
    for stage in DRAFTER_SOURCES[command]:
        candidate = output / stage / "drafter"
        manifest = candidate / MANIFEST
        if candidate != chosen and manifest.is_file() and manifest.stat().st_mtime > written:
            return candidate
    return None


def check_drafter(directory: Path, option: str) -> None:
    """Refuse early what cannot be a drafter; its content is checked when it is loaded.

    Raises:
        UserError: naming the option and the directory.
    """
    if not (directory / MANIFEST).is_file():
        raise UserError(f"{option} {directory}: not a drafter directory ({MANIFEST} is missing)")


def plan_stage(
    command: str,
    config: Config,
    *,
    drafter: Path | None = None,
    spool: LogPlace | None = None,
    warm_start: Path | None = None,
) -> StagePlan:
    """The plan of one command; `command` is a key of `OUTPUTS`.

    Only what a stage cannot do without counts as missing.
    """
    plan = StagePlan(command, writes=[config.output / name for name in OUTPUTS[command]])
    _read_target(plan, config)
    if command in {"data regenerate", "run"}:
        _read_sources(plan, "data.train", config.data.train)
        _read_sources(plan, "data.heldout", config.data.heldout)
    if command == "run":
        _read_sources(plan, "traffic.sources", config.traffic.sources)
    if command in {"train", "distill", "fit-length-head", "prune", "evaluate", "deploy"}:
        _read_responses(plan, config.output / "responses")
    if warm_start is not None:
        plan.reads.append(("warm start", _describe_drafter(warm_start)))
    if drafter is not None:
        plan.reads.append(("drafter", _describe_drafter(drafter)))
    if spool is not None:
        state = "" if is_stream(spool) or Path(spool).is_dir() else " (not there yet)"
        plan.reads.append(("spool", f"{spool}{state}"))
    for section, describe in _SIZES.items():
        if command in {section, "run"}:
            plan.sizes.append((section, describe(config)))
    return plan


def human_size(size: float) -> str:
    """Bytes in binary units: `1.3 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _read_target(plan: StagePlan, config: Config) -> None:
    model = config.target.model
    kind, separator, name = model.partition(":")
    if separator and kind == "tiny":
        text = f"{model} (small random model, made on the spot)"
    elif separator and kind == "package":
        text = _describe_package(plan, model, name)
    elif (Path(model) / "config.json").is_file():
        shape = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        text = (
            f"{model} ({shape.get('model_type')}, {shape.get('num_hidden_layers')} layers, "
            f"hidden {shape.get('hidden_size')}, weights {human_size(_bytes_below(Path(model), '*.safetensors'))})"
        )
    else:
        text = f"{model}@{config.target.revision} (hub name, looked up when the stage starts)"
    plan.reads.append(("target", text))


def _describe_package(plan: StagePlan, model: str, name: str) -> str:
    spec = find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        plan.missing.append(f"target.model: {model}: no installed package of that name holds a GGUF file")
        return f"{model} (missing)"
    return f"{model} ({files[0].name}, {human_size(files[0].stat().st_size)})"


def _read_sources(plan: StagePlan, key: str, sources: list[SourceConfig]) -> None:
    for index, source in enumerate(sources):
        where = f"{key}.{index}"
        if source.path is None:
            text = f"dataset {source.dataset}, split {source.split}"
        elif source.path.is_file():
            text = f"{source.path} ({_count_lines([source.path]):,} rows, {human_size(source.path.stat().st_size)})"
        else:
            text = f"{source.path} (missing)"
            plan.missing.append(f"{where}.path: {source.path}: no such file")
        limit = "" if source.limit is None else f", at most {source.limit:,} rows"
        plan.reads.append((where, f"{text}{limit}, weight {source.weight:g}"))


def _read_responses(plan: StagePlan, directory: Path) -> None:
    files = sorted(directory.rglob("*.jsonl"))
    if files:
        size = sum(file.stat().st_size for file in files)
        text = f"{directory} ({_count_lines(files):,} rows, {human_size(size)})"
    else:
        text = f"{directory} (missing)"
        plan.missing.append(
            f"{directory}: no responses of the target yet; run `draftsmith data regenerate` first"
        )
    plan.reads.append(("responses", text))


def _describe_drafter(directory: Path) -> str:
    """Version and weight size, as the manifest and the file system tell; checksums are the stage's business."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        version, block_size = manifest["drafter_version"], manifest["block_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{directory}: not a readable drafter directory ({MANIFEST}: {error})") from None
    size = human_size(_bytes_below(directory, "*.safetensors"))
    return f"{directory} (version {version}, block size {block_size}, {size})"


def _fit_size(config: Config, fit: FitConfig) -> str:
    processes = config.trainer.world_size
    rows = fit.steps * fit.accumulate * processes
    shared = "" if processes == 1 else f" × {processes} processes"
    minutes = "" if fit.max_minutes is None else f", {fit.max_minutes:g} minutes at most"
    return (
        f"{fit.steps:,} × {fit.accumulate}{shared} rows of {config.data.row_tokens:,} tokens = "
        f"{rows * config.data.row_tokens:,} tokens at most; {fit.anchors_per_document} blocks of "
        f"{config.drafter.block_size} slots in each document{minutes}"
    )


def _regenerate_size(config: Config) -> str:
    settings = config.regenerate
    limit = "all prompts" if config.data.limit is None else f"{config.data.limit:,} prompts at most"
    return f"{limit}, {settings.batch_size} at a time, up to {settings.max_new_tokens} new tokens an answer"


def _evaluate_size(config: Config) -> str:
    settings = config.evaluate
    return (
        f"{settings.lossless_prompts} lossless and {settings.speed_prompts} timed prompts, "
        f"{settings.max_new_tokens} new tokens each"
    )


def _online_size(config: Config) -> str:
    online = config.online
    return (
        f"a round for every {online.trigger} fresh records, {online.passes} passes: "
        f"{-(-online.trigger * online.passes // online.accumulate)} steps, more with replayed records"
    )


_SIZES: dict[str, Callable[[Config], str]] = {
    "data regenerate": _regenerate_size,
    "train": lambda config: _fit_size(config, config.train),
    "distill": lambda config: _fit_size(config, config.distill),
    "fit-length-head": lambda config: _fit_size(config, config.length_head),
    "prune": lambda config: _fit_size(config, config.prune),
    "evaluate": _evaluate_size,
    "distill --online": _online_size,
}


def _section(title: str, items: list[tuple[str, str]]) -> Iterator[str]:
    if not items:
        return
    yield f"  {title}"
    width = max(len(label) for label, _ in items)
    for label, text in items:
        yield f"    {label:<{width}}  {text}" if width else f"    {text}"


def _count_lines(files: list[Path]) -> int:
    count = 0
    for file in files:
        with file.open("rb") as stream:
            count += sum(1 for line in stream if line.strip())
    return count


def _bytes_below(directory: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in directory.glob(pattern))

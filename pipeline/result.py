"""Stage results: what every command leaves in `<output>/result.json`.

One run of one stage: which inputs it read and outputs it wrote (by hash), its metrics, what it
cost, and the versions and commit that made it. The file appears whole or not at all, and only when
the stage succeeded, so a result next to outputs always describes them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from drafters.errors import UserError

RESULT_FILE = "result.json"
CONFIG_MARK = ".config-sha256"
_DISTRIBUTIONS = ("torch", "transformers", "lightning", "mlflow", "draftsmith")


@dataclass(frozen=True)
class StageResult:
    """Content of `result.json`, in which several training processes count as the first of them.

    `inputs` and `outputs` map paths (relative to the output directory where they lie inside it) to
    sha256. Times are UTC in ISO 8601, durations in seconds. CPU seconds count this process and its
    finished children; `peak_rss_mib` is the largest of them over the whole process lifetime, so a
    later stage of one process inherits an earlier peak. JSON has no NaN or infinity: such metrics
    are null and named in `non_finite_metrics`.
    """

    stage: str
    config_hash: str
    git_commit: str | None
    git_dirty: bool | None
    started_at: str
    ended_at: str
    wall_seconds: float
    cpu_seconds: float
    peak_rss_mib: float
    timings: dict[str, dict[str, float]]
    inputs: dict[str, str]
    outputs: dict[str, str]
    metrics: dict[str, Any]
    non_finite_metrics: list[str]
    versions: dict[str, str | None]


@dataclass
class StageRun:
    """Collects a stage's result while it runs; made by `stage_run`.

    Write `metrics` freely (nested dicts and lists of numbers or text); `result` is set once the
    stage has succeeded.
    """

    stage: str
    output: Path
    config_hash: str
    metrics: dict[str, Any] = field(default_factory=dict)
    result: StageResult | None = None
    _inputs: dict[str, str] = field(default_factory=dict)
    _outputs: list[Path] = field(default_factory=list)
    _timings: dict[str, dict[str, float]] = field(default_factory=dict)

    def add_input(self, path: Path) -> None:
        """Hash a file or directory the stage reads, as it is now."""
        self._inputs[self._key(path)] = hash_path(path)

    def add_output(self, path: Path) -> None:
        """Name a file or directory the stage writes; it is hashed when the stage ends."""
        if path.resolve() == self.output.resolve():
            raise ValueError(
                "name what lies in the output directory, not the directory: it will hold the result"
            )
        self._outputs.append(path)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a part of the stage into `timings`; a name used again adds to its first use."""
        wall, cpu = time.perf_counter(), _cpu_seconds()
        try:
            yield
        finally:
            entry = self._timings.setdefault(name, {"wall_seconds": 0.0, "cpu_seconds": 0.0})
            entry["wall_seconds"] += time.perf_counter() - wall
            entry["cpu_seconds"] += _cpu_seconds() - cpu

    def _key(self, path: Path) -> str:
        absolute, output = path.resolve(), self.output.resolve()
        inside = absolute.is_relative_to(output)
        return absolute.relative_to(output).as_posix() if inside else path.as_posix()

    def _finish(self, started: datetime, wall: float, cpu: float) -> StageResult:
        non_finite: list[str] = []
        metrics = _plain(self.metrics, "", non_finite)
        outputs = {self._key(path): hash_path(path) for path in self._outputs}
        commit, dirty = git_state()
        return StageResult(
            stage=self.stage,
            config_hash=self.config_hash,
            git_commit=commit,
            git_dirty=dirty,
            started_at=started.isoformat(),
            ended_at=datetime.now(UTC).isoformat(),
            wall_seconds=time.perf_counter() - wall,
            cpu_seconds=_cpu_seconds() - cpu,
            peak_rss_mib=_peak_rss_mib(),
            timings=self._timings,
            inputs=self._inputs,
            outputs=outputs,
            metrics=metrics,
            non_finite_metrics=non_finite,
            versions=_versions(),
        )


@contextmanager
def stage_run(stage: str, output: Path, config_dict: Mapping[str, Any]) -> Iterator[StageRun]:
    """Run a stage and leave `<output>/result.json` if the block ends without an exception.

    After an exception nothing is written and an earlier `result.json` stays as it was.

    Raises:
        UserError: `output` is a file, or a path given to `add_input` or `add_output` does not
            exist.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"{output}: is a file; give a directory for the outputs of `{stage}`")
    output.mkdir(parents=True, exist_ok=True)
    run = unwritten_run(stage, output, config_dict)
    started, wall, cpu = datetime.now(UTC), time.perf_counter(), _cpu_seconds()
    yield run
    result = run._finish(started, wall, cpu)
    # metrics stand at the top level too: `jq .offline.acceptance_length result.json`
    write_json(output / RESULT_FILE, {**result.metrics, **asdict(result)})
    run.result = result


def unwritten_run(stage: str, output: Path, config_dict: Mapping[str, Any]) -> StageRun:
    """A run that nobody writes down unless `stage_run` does."""
    return StageRun(stage=stage, output=output, config_hash=hash_config(config_dict))


def hash_config(config_dict: Mapping[str, Any]) -> str:
    """Sha256 (hex) of the canonical JSON of a configuration: keys sorted, no spaces, ASCII."""
    canonical = json.dumps(config_dict, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def mark_config(directory: Path, config_hash: str) -> None:
    """Note under which configuration a whole run began a stage."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_MARK).write_text(config_hash + "\n")


def config_of(directory: Path) -> str | None:
    """Hash of the configuration that a whole run last began this stage with; None when nothing says."""
    path = directory / CONFIG_MARK
    return path.read_text().strip() if path.is_file() else None


def hash_path(path: Path) -> str:
    """Sha256 (hex) of a file's bytes, or of a directory's content.

    A directory is hashed as its sorted relative paths with their files' hashes, so where it lies,
    file times and empty directories do not matter.

    Raises:
        UserError: the path does not exist.
    """
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    if not path.is_dir():
        raise UserError(f"{path}: no such file or directory")
    digest = hashlib.sha256()
    files = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()}
    for name in sorted(files):
        digest.update(f"{name}\0{hash_path(files[name])}\n".encode())
    return digest.hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader, or a crash, sees the old file or the new one, never a part.

    Raises:
        ValueError: the content holds NaN or infinity, which JSON lacks; the old file stays.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(value: Any, key: str, non_finite: list[str]) -> Any:
    """JSON types only: array and tensor scalars become numbers, NaN and infinity null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{key}.{k}" if key else str(k), non_finite) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{key}.{i}", non_finite) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        non_finite.append(key)
        return None
    if value is None or isinstance(value, bool | int | float | str):
        # A subclass such as numpy.float64 must not reach the file under its own repr.
        return float(value) if isinstance(value, float) else value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return _plain(value.item(), key, non_finite)
    raise TypeError(f"metric {key!r} is a {type(value).__name__}; give numbers, text, lists or dicts")


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak_rss_mib() -> float:
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def git_state() -> tuple[str | None, bool | None]:
    """Commit of the checkout this package runs from, and whether tracked files differ from it.

    An installed copy below some other project's checkout must not report that project's commit, so
    the checkout's root has to be the folder that holds this package.
    """
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    top = git("rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root:
        return None, None
    commit = git("rev-parse", "--verify", "HEAD")
    if not commit:
        return None, None
    return commit, bool(git("status", "--porcelain", "--untracked-files=no"))

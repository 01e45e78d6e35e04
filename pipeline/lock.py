"""Locks between processes; the system frees them when their process ends, however it does."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from drafters.errors import UserError


class Locked(UserError):
    """Another process does this work."""


@contextmanager
def trainer_lock(output: Path) -> Iterator[None]:
    """Held by whoever trains online below `output`.

    Raises:
        Locked: when it is taken.
    """
    with exclusive(output / "trainer.lock", "another online trainer works here; wait for it or stop it"):
        yield


@contextmanager
def exclusive(path: Path, taken: str) -> Iterator[None]:
    """Hold the lock of a file, which is made, and which names its holder.

    Raises:
        Locked: when another has it: the path, what `taken` says, and who that is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            holder = handle.read(200).strip()
            raise Locked(f"{path}: {taken}" + (f" ({holder})" if holder else "")) from None
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {os.uname().nodename} since {_now()}\n")
        handle.flush()
        yield


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

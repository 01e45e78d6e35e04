"""Locks between processes; the system frees them when their process ends, however it does."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Hold the lock of a file, which is made.

    Raises:
        Locked: when another holder has it: the path, and what `taken` says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Locked(f"{path}: {taken}") from None
        yield

"""One online trainer at a time in an output directory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafters.errors import UserError


@contextmanager
def trainer_lock(output: Path) -> Iterator[None]:
    """Held by whoever trains online below `output`; the system frees it when the process ends, however it does.

    Raises:
        UserError: when it is taken.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / "trainer.lock"
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path}: another online trainer works here; wait for it or stop it") from None
        yield

"""SIGTERM in one of several processes."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn

import lightning as L


def terminated(*_: object) -> NoReturn:
    """Leave by an exception, so that what is open is closed on the way out: an MLflow run, say."""
    sys.exit(128 + signal.SIGTERM)


class LeaveOnSigterm(L.Callback):
    """Ends this process at once.

    Lightning's own handler first talks to the other processes, which may wait for each other in something else by then, and for
    good. Checkpoints and exports are whole at any moment, so nothing has to be finished.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        signal.signal(signal.SIGTERM, terminated)  # Lightning has set its own by now

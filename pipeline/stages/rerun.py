"""Running a preset again: finished stages are kept, an interrupted one is continued."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from pipeline.config import Config
from pipeline.console import say
from pipeline.fitting import CHECKPOINT
from pipeline.result import RESULT_FILE, config_of, hash_config, mark_config


class StageRunner:
    """Runs the stages of one preset in order and remembers how long each took.

    A stage whose `result.json` was written under the same config is not run again; one that left its progress but no result
    is resumed. What another config left in the same place is refused rather than mixed with.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.seconds: dict[str, float] = {}
        self._hash = hash_config(config.dump())

    def run(self, folder: str, work: Callable[[bool], Any], *, progress: str = CHECKPOINT) -> Path:
        """Do `work(resume)` unless it was done; returns the stage's directory.

        A file named `progress` says that the stage can be resumed.
        """
        directory = self.config.output / folder
        earlier = self._earlier(directory)
        if earlier is not None:
            say(f"{folder}: finished earlier, kept (delete {directory} to run it again)")
            self.seconds[folder] = earlier["wall_seconds"]
            return directory
        checkpoint = directory / progress
        if checkpoint.is_file() and config_of(directory) not in (None, self._hash):
            raise UserError(
                f"{checkpoint}: left by a run with another config; choose another --output or delete {directory}"
            )
        mark_config(directory, self._hash)
        work(checkpoint.is_file())
        result = self._earlier(directory)
        assert result is not None, folder
        self.seconds[folder] = result["wall_seconds"]
        return directory

    def _earlier(self, directory: Path) -> dict[str, Any] | None:
        path = directory / RESULT_FILE
        if not path.is_file():
            return None
        try:
            result: dict[str, Any] = json.loads(path.read_text())
            found = result["config_hash"]
        except (ValueError, KeyError):
            raise UserError(f"{path}: unreadable; delete {directory} to run the stage again") from None
        if found != self._hash:
            raise UserError(
                f"{path}: made with another config; choose another --output or delete {self.config.output}"
            )
        return result

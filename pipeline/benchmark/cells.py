"""Finished cells on disk: one method on one benchmark at one concurrency, kept until what made it changes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from datamodules.prompts import Conversation
from drafters.errors import UserError
from pipeline.benchmark.answers import Answer
from pipeline.result import hash_config, write_json

CELL_FILE = "cell.json"
ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class CellKey:
    """What a cell is, in words. `drafter` is its label, empty for plain decoding."""

    benchmark: str
    drafter: str
    method: str
    concurrency: int

    @property
    def folder(self) -> str:
        """A file name for it, distinct by a hash of what it stands for."""
        words = (self.benchmark, self.drafter, self.method, f"c{self.concurrency}")
        readable = "--".join(re.sub(r"[^A-Za-z0-9._]+", "-", word) for word in words if word)
        return f"{readable}-{hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]}"

    @property
    def label(self) -> str:
        drafter = f", drafter {self.drafter}" if self.drafter else ""
        return f"{self.benchmark}, {self.method}{drafter}, concurrency {self.concurrency}"


@dataclass(frozen=True)
class Cell:
    """A measured cell.

    Attributes:
        key: what was measured.
        answers: all turns, conversation by conversation.
        wall_seconds: from the first question to the last answer.
        block_size: B; 1 for plain decoding.
        skipped: conversations whose first prompt did not fit.
        short: conversations that ended before their last turn.
        verified_share: of drafted rows, how many a server verified, where rounds do not tell.
    """

    key: CellKey
    answers: list[Answer]
    wall_seconds: float
    block_size: int
    skipped: int = 0
    short: int = 0
    verified_share: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def prompts_digest(conversations: Sequence[Conversation]) -> str:
    """Hash of what a benchmark asks, ids and order included."""
    rows = [[c.id, c.domain, c.language, c.messages] for c in conversations]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


class CellStore:
    """The cells below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def finished(self, key: CellKey, made_of: dict[str, Any]) -> bool:
        """Whether the cell is there and was made of the very same."""
        try:
            found = json.loads((self.directory / key.folder / CELL_FILE).read_text())
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and found.get("digest") == hash_config(made_of)

    def present(self, key: CellKey) -> bool:
        """Whether some cell of that name is there."""
        return (self.directory / key.folder / CELL_FILE).is_file()

    def save(self, cell: Cell, made_of: dict[str, Any]) -> None:
        """Put the cell in place, whole or not at all; an older one of the same name goes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        place = self.directory / cell.key.folder
        staging = Path(tempfile.mkdtemp(prefix=".cell.", dir=self.directory))
        encoder = msgspec.json.Encoder()
        with (staging / ANSWERS_FILE).open("wb") as file:
            for answer in cell.answers:
                file.write(encoder.encode(answer) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        content = {name: value for name, value in vars(cell).items() if name not in ("key", "answers")}
        write_json(
            staging / CELL_FILE,
            {"digest": hash_config(made_of), "key": asdict(cell.key), **content, "made_of": made_of},
        )
        staging.chmod(0o755)
        if place.exists():
            shutil.rmtree(place)
        os.replace(staging, place)

    def load(self, key: CellKey) -> Cell:
        """A finished cell.

        Raises:
            UserError: when its files cannot be read.
        """
        place = self.directory / key.folder
        try:
            content = json.loads((place / CELL_FILE).read_text())
            decoder = msgspec.json.Decoder(Answer)
            answers = [decoder.decode(line) for line in (place / ANSWERS_FILE).read_bytes().splitlines()]
            fields = {name: content[name] for name in ("wall_seconds", "block_size", "skipped", "short")}
            return Cell(
                key, answers, verified_share=content["verified_share"], facts=content["facts"], **fields
            )
        except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
            raise UserError(f"{place}: damaged ({error}); delete it to measure it again") from None

    def clear_unfinished(self) -> None:
        """Remove what a killed run was writing."""
        for left in self.directory.glob(".cell.*"):
            shutil.rmtree(left, ignore_errors=True)

"""The spool's directory: names, the lock, atomic files, registered readers, sealing.

::

    spool.lock                    held (flock) while a segment is sealed or deleted or a reader registered
    open/<writer>.jsonl.tmp       being written; its writer holds a flock on it as long as it lives
    segments/000000000012.jsonl   sealed: immutable, numbered without gaps in the order of sealing
    readers/<name>.json           checkpointed cursor of a reader
    quarantine/000000000012.jsonl the lines of a segment that could not be used, with the reason

Nothing here writes into ``segments/`` but by rename, so a segment is either whole or not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from serving_bridge.transport import Cursor

FILE_MODE = 0o640
_SEGMENT = re.compile(r"(\d{12})\.jsonl")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class SpoolError(ValueError):
    """The spool cannot be used as asked; the message names the path and the fix."""


class ReaderState(msgspec.Struct, frozen=True):
    """What a reader has registered: its checkpointed cursor, and what its replay buffer still refers to."""

    cursor: Cursor
    keep_from: Cursor | None = None

    @property
    def floor(self) -> Cursor:
        """The oldest position this reader may still ask for."""
        return self.cursor if self.keep_from is None else min(self.cursor, self.keep_from)


@dataclass(frozen=True)
class SpoolLayout:
    """Paths and primitives of one spool directory."""

    root: Path

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def open(self) -> Path:
        return self.root / "open"

    @property
    def readers(self) -> Path:
        return self.root / "readers"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    def create(self) -> None:
        """Make the directories that are missing."""
        for path in (self.segments, self.open, self.readers, self.quarantine):
            path.mkdir(parents=True, exist_ok=True)

    def segment(self, sequence: int) -> Path:
        return self.segments / f"{sequence:012d}.jsonl"

    def sequences(self) -> list[int]:
        """Return the numbers of the sealed segments in order."""
        try:
            names = os.listdir(self.segments)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for name in names if (match := _SEGMENT.fullmatch(name)))

    def size(self, sequence: int) -> int:
        """Return the bytes of a segment, 0 if it is not (or no longer) there."""
        return file_size(self.segment(sequence))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude all other writers, readers and retention; not reentrant."""
        descriptor = os.open(self.root / "spool.lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def seal(self, path: Path) -> int:
        """Move a finished file in as the next segment and return its number; the lock must be held."""
        sequences = self.sequences()
        sequence = sequences[-1] + 1 if sequences else 0
        os.rename(path, self.segment(sequence))
        return sequence

    def seal_orphans(self) -> int:
        """Seal the open files whose writer is dead, a torn last line included; return how many."""
        sealed = 0
        with self.lock():
            for path in sorted(self.open.glob("*.jsonl.tmp"), key=lambda path: path.stat().st_mtime_ns):
                with path.open("rb") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    if os.fstat(file.fileno()).st_size == 0:
                        path.unlink()
                        continue
                    os.fsync(file.fileno())
                    self.seal(path)
                    sealed += 1
        if sealed:
            sync_directory(self.segments)
        return sealed

    def reader_file(self, name: str) -> Path:
        """Return where a reader is registered; the name cannot lead out of the spool."""
        if not _NAME.fullmatch(name):
            raise SpoolError(f"reader name {name!r}: use 1 to 100 of A-Z a-z 0-9 _ . -")
        return self.readers / f"{name}.json"

    def load_reader(self, name: str) -> ReaderState | None:
        """Return a reader's registration, None if it has none."""
        path = self.reader_file(name)
        try:
            return msgspec.json.decode(path.read_bytes(), type=ReaderState)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SpoolError(
                f"{path}: not a reader's cursor ({error}); restore it, or delete it to start over"
            ) from error

    def save_reader(self, name: str, state: ReaderState) -> None:
        """Register a reader, replacing what it had registered; the lock must be held."""
        write_atomic(self.reader_file(name), msgspec.json.encode(state))

    def load_readers(self) -> dict[str, ReaderState]:
        """Return all registered readers by name."""
        names = sorted(path.stem for path in self.readers.glob("*.json"))
        states = {name: self.load_reader(name) for name in names}
        return {name: state for name, state in states.items() if state is not None}


def file_size(path: Path) -> int:
    """Return the bytes of a file that others may move away meanwhile, then 0."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file so that a crash leaves either the old or the new content, on disk."""
    temporary = path.with_name(path.name + ".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The writing side of the spool."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from serving_bridge.records import VerificationRecord, encode
from serving_bridge.spool_layout import FILE_MODE, SpoolLayout, sync_directory


class SpoolWriter:
    """Appends records to an open file and seals it into a segment by size, age, ``roll`` or ``close``.

    A record is with the operating system when ``write`` returns, so killing the process loses nothing; ``fsync``
    makes sealed segments survive the machine too. Any number of writers, in any processes, may share a directory;
    each also seals what dead ones left behind. Writes block on the disk and raise ``OSError``: put a
    ``BufferedWriter`` in front. ``clock`` counts seconds.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_bytes: int = 8 * 1024 * 1024,
        max_age_s: float = 60.0,
        fsync: bool = True,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = SpoolLayout(Path(directory))
        self._max_bytes, self._max_age_s, self._fsync = max_bytes, max_age_s, fsync
        self._clock = clock
        self._path = self._layout.open / f"{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl.tmp"
        self._lock = threading.RLock()
        self._descriptor: int | None = None
        self._size = self._records = 0
        self._torn = self._closed = False
        self._written = self._dropped = 0
        self._layout.create()
        self._layout.seal_orphans()
        self._begun = self._recovered = clock()

    @property
    def written(self) -> int:
        """Records appended."""
        return self._written

    @property
    def dropped(self) -> int:
        """Records offered after ``close``, or lost with an open file that somebody deleted."""
        return self._dropped

    def write(self, record: VerificationRecord) -> bool:
        """Append one record, False after ``close``.

        Raises ``RecordError`` for a record that cannot be encoded and ``OSError`` if the disk fails, after which
        the record is not in the log and may be written again.
        """
        line = encode(record) + b"\n"
        with self._lock:
            if self._closed:
                self._dropped += 1
                return False
            # Sealing comes before appending: were it to fail afterwards, a retry would log the record twice.
            if self._due(len(line)):
                self.roll()
            self._append(self._open(), line)
            self._records += 1
            self._written += 1
        return True

    def maybe_roll(self) -> bool:
        """Seal the open file if it is old or big enough, and what writers that died meanwhile left open."""
        with self._lock:
            if self._clock() - self._recovered >= self._max_age_s:
                self._recovered = self._clock()
                self._layout.seal_orphans()
            return self._due(0) and self.roll()

    def roll(self) -> bool:
        """Seal the open file now; False if it holds nothing."""
        with self._lock:
            if self._descriptor is None or not self._size:
                return False
            self._cut_torn(self._descriptor)
            if self._fsync:
                os.fsync(self._descriptor)
            try:
                with self._layout.lock():
                    self._layout.seal(self._path)
            except FileNotFoundError:
                # Somebody cleaned up the directory under us.
                self._layout.create()
                if self._path.exists():
                    raise
                self._dropped += self._records
            self._release()
            if self._fsync:
                sync_directory(self._layout.segments)
        return True

    def close(self) -> None:
        """Seal what is open and stop; if that fails the next writer to start does it."""
        with self._lock:
            self._closed = True
            try:
                if not self.roll() and self._descriptor is not None:
                    with self._layout.lock():
                        self._path.unlink(missing_ok=True)
            finally:
                self._release()

    def _due(self, incoming: int) -> bool:
        if not self._size:
            return False
        full = self._size + max(incoming, 1) > self._max_bytes
        return full or self._clock() - self._begun >= self._max_age_s

    def _open(self) -> int:
        if self._descriptor is None:
            self._layout.create()
            # Under the lock, or another writer could take the file for an orphan before it is locked.
            with self._layout.lock():
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
                descriptor = os.open(self._path, flags, FILE_MODE)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._descriptor = descriptor
            self._begun = self._clock()
        return self._descriptor

    def _append(self, descriptor: int, line: bytes) -> None:
        self._cut_torn(descriptor)
        rest = memoryview(line)
        self._torn = True
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        self._torn = False
        self._size += len(line)

    def _cut_torn(self, descriptor: int) -> None:
        if self._torn:
            os.ftruncate(descriptor, self._size)
            self._torn = False

    def _release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._size = self._records = 0
        self._torn = False

"""The reading side of the spool."""

from __future__ import annotations

import logging
import os
from collections import Counter
from pathlib import Path
from typing import BinaryIO

from serving_bridge.records import MAX_LINE_BYTES, RecordError, decode
from serving_bridge.spool_layout import ReaderState, SpoolError, SpoolLayout
from serving_bridge.spool_quarantine import MAX_KEPT_BYTES, Quarantine
from serving_bridge.transport import Cursor, Delivery

_log = logging.getLogger(__name__)
_SKIP_BYTES = 64 * 1024


class SpoolReader:
    """Delivers the records of sealed segments in order, from its registered cursor on.

    A reader that has never committed starts at the oldest segment, and retention does not know it:
    ``commit(reader.cursor)`` registers it. Lines that are no valid records are passed over, counted, and copied
    into the quarantine unless told not to.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        quarantine: bool = True,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._layout = SpoolLayout(Path(directory))
        self._name = name
        self._max_line_bytes = max_line_bytes
        self._layout.reader_file(name)
        self._layout.create()
        self._quarantine = Quarantine(self._layout) if quarantine else None
        state = self._layout.load_reader(name)
        sequences = self._layout.sequences()
        self._cursor = Cursor(sequences[0] if sequences else 0) if state is None else state.cursor
        self._counted_to = Cursor()
        self._reasons: Counter[str] = Counter()

    @property
    def cursor(self) -> Cursor:
        """Position up to which everything was delivered or passed over."""
        return self._cursor

    @property
    def quarantined(self) -> int:
        """Bad lines passed over so far; going back over them does not count them again."""
        return self._reasons.total()

    @property
    def quarantine_reasons(self) -> Counter[str]:
        """The same by kind of ``RecordError``."""
        return Counter(self._reasons)

    def read(self, limit: int) -> list[Delivery]:
        """Return up to ``limit`` next records; fewer means that no more are sealed yet.

        Raises ``SpoolError`` if the records that come next are gone; the cursor then stays where it is.
        """
        deliveries: list[Delivery] = []
        position = self._cursor
        while len(deliveries) < limit:
            try:
                file = self._layout.segment(position.segment).open("rb")
            except FileNotFoundError:
                if not deliveries:
                    self._check_absent(position)
                break
            with file:
                self._go_to(file, position)
                position = self._read_segment(file, position, limit, deliveries)
            if len(deliveries) < limit:
                following = Cursor(position.segment + 1)
                if not self._layout.segment(following.segment).exists():
                    # What was found so far is delivered first; a gap is reported by the next call.
                    if not deliveries:
                        self._check_absent(following)
                    break
                position = following
        self._cursor = position
        return deliveries

    def seek(self, cursor: Cursor) -> None:
        """Continue at ``cursor``; raises ``SpoolError`` if its segment is gone or never was."""
        if not self._layout.segment(cursor.segment).exists():
            self._check_absent(cursor)
        self._cursor = cursor

    def commit(self, cursor: Cursor, keep_from: Cursor | None = None) -> None:
        """Register that a checkpoint holds everything before ``cursor``; atomic and durable.

        Segments from the older of ``cursor`` and ``keep_from`` (what the replay buffer still refers to) on are kept.
        """
        with self._layout.lock():
            self._layout.save_reader(self._name, ReaderState(cursor, keep_from))

    def lag(self) -> int:
        """Return the sealed bytes not yet read."""
        return unread_bytes(self._layout, self._cursor)

    def _go_to(self, file: BinaryIO, position: Cursor) -> None:
        if position.offset == 0:
            return
        file.seek(position.offset - 1)
        before = file.read(1)
        at_end = position.offset == os.fstat(file.fileno()).st_size
        if not before or (before != b"\n" and not at_end):
            raise SpoolError(
                f"{self._layout.segment(position.segment)}: no record begins at byte {position.offset}; "
                f"the cursor of reader {self._name} belongs to another spool"
            )

    def _read_segment(
        self, file: BinaryIO, position: Cursor, limit: int, deliveries: list[Delivery]
    ) -> Cursor:
        while len(deliveries) < limit and (line := file.readline(self._max_line_bytes + 1)):
            size = len(line) if line.endswith(b"\n") else len(line) + self._skip_line(file)
            end = Cursor(position.segment, position.offset + size)
            try:
                if len(line) > self._max_line_bytes and not line.endswith(b"\n"):
                    raise RecordError(f"line of {size} bytes exceeds {self._max_line_bytes}", "oversize")
                record = decode(line.removesuffix(b"\n"))
            except RecordError as error:
                if not line.endswith(b"\n") and error.kind != "oversize":
                    error = RecordError(f"torn last line, {error.reason}", "torn")
                self._pass_over(position, end, line, error)
            else:
                deliveries.append(Delivery(end, record, position))
            position = end
        return position

    def _skip_line(self, file: BinaryIO) -> int:
        skipped = 0
        while rest := file.readline(_SKIP_BYTES):
            skipped += len(rest)
            if rest.endswith(b"\n"):
                break
        return skipped

    def _pass_over(self, start: Cursor, end: Cursor, line: bytes, error: RecordError) -> None:
        if start >= self._counted_to:
            self._reasons[error.kind] += 1
            self._counted_to = end
        if self._quarantine is not None:
            try:
                size = end.offset - start.offset
                self._quarantine.add(start, line[:MAX_KEPT_BYTES].removesuffix(b"\n"), size, error)
            except OSError as failure:
                _log.warning(
                    "%s cannot be written, bad lines are only counted: %s", self._layout.quarantine, failure
                )
                self._quarantine = None

    def _check_absent(self, position: Cursor) -> None:
        """Tell a segment that is yet to come from one that is gone."""
        sequences = self._layout.sequences()
        if position.segment in sequences:
            return
        where = f"{self._layout.segments}: reader {self._name} needs segment {position.segment}"
        later = [sequence for sequence in sequences if sequence > position.segment]
        if later:
            raise SpoolError(
                f"{where}, but segments {position.segment} to {later[0] - 1} are gone; restore them, or accept "
                f"the loss by seeking to segment {later[0]}"
            )
        if position.offset or position.segment > (sequences[-1] + 1 if sequences else 0):
            last = f"segment {sequences[-1]}" if sequences else "nothing"
            raise SpoolError(
                f"{where}, but the last one is {last}; the cursor belongs to another spool, or this one was emptied"
            )


def unread_bytes(layout: SpoolLayout, cursor: Cursor) -> int:
    """Return the sealed bytes from ``cursor`` on."""
    unread = sum(layout.size(number) for number in layout.sequences() if number >= cursor.segment)
    return max(0, unread - min(cursor.offset, layout.size(cursor.segment)))

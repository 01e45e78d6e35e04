"""What serving has left in the log since the last round: counted, not taken. The log's cursor stays where it is."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from datamodules.admission import Admission, is_held_out
from datamodules.streaming import StreamState, record_to_document
from drafters.errors import UserError
from drafters.packing import Document
from pipeline.config import OnlineConfig
from pipeline.fitting import require_readable
from serving_bridge.records import VerificationRecord
from serving_bridge.transport import LogReader

_BATCH = 256
_STREAM = "StreamingDataModule"


@dataclass
class Survey:
    """Records past the last round's: how many would be trained and held out, of which domains, and the newest held-out ones.

    Memory holds `recent` and the request ids.
    """

    recent: deque[Document]
    training: int = 0
    held_out: int = 0
    domains: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    since: float | None = None
    until: float | None = None

    def add(self, record: VerificationRecord, held_out: bool, max_length: int) -> None:
        """Count an admitted record."""
        self.domains[record.domain] += 1
        self.since = record.time if self.since is None else min(self.since, record.time)
        self.until = record.time if self.until is None else max(self.until, record.time)
        if held_out:
            self.held_out += 1
            self.recent.append(record_to_document(record).truncated(max_length))
        else:
            self.training += 1


def survey(
    reader: LogReader, stream: StreamState | None, config: OnlineConfig, *, target_id: str, window: int
) -> Survey:
    """Read the log to its present end, from where the last round left it, with the admission rules of training.

    Args:
        reader: its committed cursor is not moved.
        stream: of the online checkpoint; None before the first.
        config: the rules.
        target_id: records of others are refused.
        window: most recent held-out documents to keep.
    """
    admission = Admission(
        target_id,
        config.max_length,
        max_age_s=config.max_record_age_s,
        seen=() if stream is None else stream.kept_ids(),
        newest_time=0.0 if stream is None else stream.newest_time,
    )
    if stream is not None:
        reader.seek(stream.cursor)
    found = Survey(deque(maxlen=window))
    for record in _read_all(reader):
        reason = admission.refusal(record)
        if reason is not None:
            found.refused[reason] += 1
            continue
        found.add(record, is_held_out(record.conversation_key, config.holdout_fraction), config.max_length)
    return found


def read_stream(checkpoint: Path, target_id: str) -> StreamState | None:
    """The stream's state in an online checkpoint; None where there is no checkpoint.

    Raises:
        UserError: it is damaged, or of another target.
    """
    if not checkpoint.is_file():
        return None
    require_readable(str(checkpoint))
    content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    try:
        state = content[_STREAM]
        if state["target_id"] != target_id:
            raise UserError(f"{checkpoint}: belongs to target {state['target_id']}, not {target_id}")
        return StreamState.from_json(state)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{checkpoint}: not a checkpoint of online rounds ({error}); move the directory away"
        ) from None


def _read_all(reader: LogReader) -> Iterator[VerificationRecord]:
    while deliveries := reader.read(_BATCH):
        for delivery in deliveries:
            yield delivery.record

"""Streaming training data: verification records of live traffic, admitted to online rounds exactly once.

A round begins when `trigger` fresh training records are there (AdaFlash B.1). What belongs to it (documents, cursor,
replay buffer, held-out records) lives in `state_dict`, which Lightning stores in the checkpoint. The spool's registered
cursor moves only after that checkpoint is on disk, so a kill at any point loses nothing and admits nothing twice: the
next start reads the same records again from the checkpoint's cursor, in the same order.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
import torch

from datamodules.admission import Admission, is_held_out
from datamodules.packed_loader import PackedLoader, PackingSpec, derived_generator
from drafters.errors import UserError
from drafters.packing import Document
from serving_bridge.records import VerificationRecord, committed_tokens
from serving_bridge.transport import Cursor, Delivery, LogReader

_log = logging.getLogger(__name__)

OFFLINE_ROUND = -1
"""Round number of documents that were in the replay buffer from the start; they do not age."""


@dataclass(frozen=True)
class StreamSpec:
    """Rules of admission, replay and holding out.

    Attributes:
        trigger: fresh training records that start a round.
        passes: visits of each document in a round.
        holdout_fraction: share of conversations kept for the gate, by hash of the conversation key.
        holdout_capacity: most recent held-out records kept.
        buffer_capacity: records kept for replay; the oldest leave first, offline ones last.
        buffer_share: share of a round's documents drawn from the buffer.
        max_age_rounds: buffered records older than this many rounds leave.
        max_record_age_s: records this much older than the newest one admitted are stale and skipped; None keeps all.
        poll_s: wait between looks at an empty log.
        idle_timeout_s: give up when nothing came for this long; None waits for ever.
    """

    trigger: int = 128
    passes: int = 2
    holdout_fraction: float = 0.15
    holdout_capacity: int = 256
    buffer_capacity: int = 1024
    buffer_share: float = 0.25
    max_age_rounds: int = 20
    max_record_age_s: float | None = None
    poll_s: float = 1.0
    idle_timeout_s: float | None = None


@dataclass(frozen=True)
class RoundWindow:
    """Records that a round admitted, held-out ones included: unix seconds of the oldest and newest, number by domain."""

    since: float
    until: float
    domains: dict[str, int]


@dataclass
class StreamState:
    """Everything that must survive a kill; `window` is what the latest round was made of."""

    cursor: Cursor
    round_index: int = 0
    fresh: list[Document] = field(default_factory=list)
    replayed: list[Document] = field(default_factory=list)
    buffer: list[tuple[int, Document]] = field(default_factory=list)
    holdout: list[Document] = field(default_factory=list)
    newest_time: float = 0.0
    window: RoundWindow | None = None
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, by: int = 1) -> None:
        """Add to a counter."""
        self.counts[what] = self.counts.get(what, 0) + by

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> StreamState:
        """From what `StreamingDataModule.state_dict` wrote; checkpoints of older releases know no `window`."""
        window = state.get("window")
        return cls(
            cursor=Cursor.from_json(state["cursor"]),
            round_index=state["round_index"],
            fresh=[Document(**d) for d in state["fresh"]],
            replayed=[Document(**d) for d in state["replayed"]],
            buffer=[(number, Document(**d)) for number, d in state["buffer"]],
            holdout=[Document(**d) for d in state["holdout"]],
            newest_time=state["newest_time"],
            window=None if window is None else RoundWindow(**window),
            counts=dict(state["counts"]),
        )

    def kept_ids(self) -> set[str]:
        """Request ids in the buffer and among the held-out documents; they are not admitted again."""
        return {d.document_id for _, d in self.buffer} | {d.document_id for d in self.holdout}


class StreamingDataModule(L.LightningDataModule):
    """One Lightning epoch is one online round.

    Args:
        reader: the log; its own position is ignored in favour of a restored checkpoint's.
        spec: rules.
        packing: `row_tokens=1` gives batches of one document (AdaFlash B.1).
        target_id: records of other targets are refused and counted.
        seed: order, anchors and replay draws derive from it and the round.
        offline: documents to start the replay buffer with; a random half of its capacity at most.
        should_stop: polled while waiting.
    """

    def __init__(
        self,
        reader: LogReader,
        spec: StreamSpec,
        packing: PackingSpec,
        *,
        target_id: str,
        seed: int,
        offline: Sequence[Document] = (),
        should_stop: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__()
        self.reader = reader
        self.spec = spec
        self.packing = packing
        self.target_id = target_id
        self.seed = seed
        self.should_stop = should_stop
        self._clock, self._sleep = clock, sleep
        sample = torch.randperm(len(offline), generator=derived_generator(seed, OFFLINE_ROUND))
        kept = sorted(sample[: spec.buffer_capacity // 2].tolist())
        self.stream = StreamState(cursor=reader.cursor, buffer=[(OFFLINE_ROUND, offline[i]) for i in kept])

    @property
    def in_round(self) -> bool:
        """Whether a round's documents are admitted and not yet finished."""
        return bool(self.stream.fresh)

    def train_dataloader(self) -> PackedLoader | list[Any]:
        """The round's batches; waits for enough records. Empty when told to stop or idle for too long."""
        ended = self.trainer is not None and self.trainer.should_stop
        if ended or (not self.in_round and not self.collect()):
            if self.trainer is not None:
                self.trainer.should_stop = True
            return []
        stream = self.stream
        return PackedLoader(
            [*stream.fresh, *stream.replayed],
            self.packing,
            seed=self.seed,
            passes=self.spec.passes,
            epoch=stream.round_index,
        )

    def collect(self) -> bool:
        """Read until `trigger` training records are there; False when stopped or idle.

        An incomplete collection changes nothing that a checkpoint would keep: its records are read again later.
        """
        stream, spec = self.stream, self.spec
        self.reader.seek(stream.cursor)
        draft = _Collection(stream, spec, self.target_id, self.packing.max_length)
        last_news = self._clock()
        while len(draft.fresh) < spec.trigger:
            # asked before reading: what was written before the word to stop is still read
            stopping = self.should_stop()
            deliveries = self._read(spec.trigger - len(draft.fresh))
            for delivery in deliveries:
                draft.admit(delivery.record)
            if deliveries:
                last_news = self._clock()
                continue
            idle = self._clock() - last_news
            if stopping or (spec.idle_timeout_s is not None and idle > spec.idle_timeout_s):
                return False
            self._sleep(spec.poll_s)
        draft.apply(self.reader.cursor)
        stream.replayed = self._draw_replay(len(stream.fresh))
        return True

    def _read(self, limit: int) -> list[Delivery]:
        """What is there; nothing while the log cannot be reached, as it may come back."""
        try:
            return self.reader.read(limit)
        except OSError as error:
            _log.warning("the record log cannot be read, waiting: %s", error)
            return []

    def _draw_replay(self, num_fresh: int) -> list[Document]:
        share, buffer = self.spec.buffer_share, self.stream.buffer
        wanted = min(len(buffer), round(num_fresh * share / (1 - share)))
        generator = derived_generator(self.seed, self.stream.round_index, 7)
        order = torch.randperm(len(buffer), generator=generator)[:wanted].tolist()
        return [buffer[i][1] for i in sorted(order)]

    def finish_round(self) -> None:
        """Move the round's records into the replay buffer and begin the next round."""
        stream, spec = self.stream, self.spec
        stream.buffer += [(stream.round_index, document) for document in stream.fresh]
        stream.round_index += 1
        stream.count("trained", len(stream.fresh))
        stream.fresh, stream.replayed = [], []
        oldest = stream.round_index - spec.max_age_rounds
        young = [item for item in stream.buffer if item[0] == OFFLINE_ROUND or item[0] >= oldest]
        offline = [item for item in young if item[0] == OFFLINE_ROUND]
        online = [item for item in young if item[0] != OFFLINE_ROUND]
        room = max(0, spec.buffer_capacity - len(offline))
        stream.buffer = offline[: spec.buffer_capacity] + online[len(online) - min(room, len(online)) :]
        stream.holdout = stream.holdout[-spec.holdout_capacity :]

    def commit(self) -> None:
        """Tell the log that a checkpoint holds everything up to the cursor. Call it after the checkpoint is on disk.

        The replay buffer is stored in the checkpoint itself and keeps no part of the log alive.
        """
        self.reader.commit(self.stream.cursor)

    def state_dict(self) -> dict[str, Any]:
        """Plain values only, so that checkpoints load without unpickling code."""
        stream = self.stream
        return {
            "cursor": stream.cursor.to_json(),
            "round_index": stream.round_index,
            "fresh": [_plain(d) for d in stream.fresh],
            "replayed": [_plain(d) for d in stream.replayed],
            "buffer": [[number, _plain(d)] for number, d in stream.buffer],
            "holdout": [_plain(d) for d in stream.holdout],
            "newest_time": stream.newest_time,
            "window": None if stream.window is None else asdict(stream.window),
            "counts": dict(stream.counts),
            "target_id": self.target_id,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`; refuses the state of another target."""
        if state_dict["target_id"] != self.target_id:
            raise UserError(
                f"online checkpoint: its stream belongs to target {state_dict['target_id']}, not {self.target_id}"
            )
        self.stream = StreamState.from_json(state_dict)


class _Collection:
    """Records read for the next round, held apart until there are enough."""

    def __init__(self, stream: StreamState, spec: StreamSpec, target_id: str, max_length: int) -> None:
        self._stream, self._spec, self._max_length = stream, spec, max_length
        self._admission = Admission(
            target_id,
            max_length,
            max_age_s=spec.max_record_age_s,
            seen=stream.kept_ids(),
            newest_time=stream.newest_time,
        )
        self.fresh: list[Document] = []
        self._holdout: list[Document] = []
        self._counts: dict[str, int] = {}
        self._times: list[float] = []
        self._domains: Counter[str] = Counter()

    def admit(self, record: VerificationRecord) -> None:
        """Sort one record into training or held-out documents, or refuse it with a reason that is counted."""
        reason = self._admission.refusal(record)
        if reason is not None:
            self._counts[reason] = self._counts.get(reason, 0) + 1
            return
        self._times.append(record.time)
        self._domains[record.domain] += 1
        document = record_to_document(record).truncated(self._max_length)
        held_out = is_held_out(document.conversation_key, self._spec.holdout_fraction)
        (self._holdout if held_out else self.fresh).append(document)

    def apply(self, cursor: Cursor) -> None:
        stream = self._stream
        stream.cursor = cursor
        stream.fresh = self.fresh
        stream.holdout = [*stream.holdout, *self._holdout]
        stream.window = RoundWindow(min(self._times), max(self._times), dict(sorted(self._domains.items())))
        stream.newest_time = self._admission.newest_time
        for what, number in self._counts.items():
            stream.count(what, number)
        stream.count("admitted", len(self.fresh))
        stream.count("held_out", len(self._holdout))


def _plain(document: Document) -> dict[str, Any]:
    # dataclasses.asdict copies token by token, which takes seconds for a full buffer
    return dict(vars(document))


def record_to_document(record: VerificationRecord) -> Document:
    """The served text with the positions where rounds began, if they tell where rounds mostly begin.

    A text that was mostly decoded plainly has a few rounds, at places that only probes chose.
    """
    num_prompt, num_output = len(record.prompt_ids), len(record.output_ids)
    known = bool(record.rounds) and 2 * committed_tokens(record) >= num_output
    return Document(
        token_ids=[*record.prompt_ids, *record.output_ids],
        response_mask=[False] * num_prompt + [True] * num_output,
        document_id=record.request_id,
        domain=record.domain,
        conversation_key=record.conversation_key,
        round_starts=[r.start for r in record.rounds] if known else None,
    )

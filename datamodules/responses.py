"""The store of target responses: one directory, one target, one sampling setting.

`responses.jsonl` holds a `ResponseRow` per line; `meta.json` says where the rows come from. Rows are appended in
batches; only the last row of a batch carries `committed`, so a batch that was cut off by a kill is dropped whole and
made again. Reading never changes the files.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

import msgspec

from drafters.errors import UserError

if TYPE_CHECKING:
    from drafters.packing import Document

FinishReason = Literal["stop", "length"]

ROWS_FILE = "responses.jsonl"
META_FILE = "meta.json"


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens were chosen: temperature 0 is greedy; top_k 0 and top_p 1 switch the filters off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class ResponseRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One document: a prompt and what the target answered, in token ids.

    `response_ids` starts right after the prompt. For a conversation of several turns it also holds the later user turns;
    `response_spans` then lists the half-open ranges of `response_ids` that the target produced (default: all of them).
    `conversation_key` is the id of the conversation, shared by its documents if it needed several.
    """

    document_id: str
    domain: str
    conversation_key: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: FinishReason
    target_id: str
    sampling: Sampling
    response_spans: list[tuple[int, int]] | None = None
    committed: bool = True


class StoreMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What all rows of a store have in common; `sources` are hashes of the conversation lists used."""

    format_version: int = 1
    target: dict[str, str]
    target_id: str
    sampling: Sampling
    max_new_tokens: int
    template_hash: str
    sources: list[str]


@dataclass(frozen=True)
class StoreSummary:
    """Counts over the committed rows, and the uncommitted or torn lines behind them."""

    rows: int
    conversations: int
    truncated: int
    response_tokens: int
    torn_lines: int


class ResponseStore:
    """Reads a store, and appends to it between `open` and `close` (or in a `with` block after `open`)."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.recovered_lines = 0
        """Uncommitted or torn lines that `open` removed."""
        self._file: BufferedWriter | None = None
        self._done: set[str] = set()
        self._meta: StoreMeta | None = None

    def open(self, meta: StoreMeta) -> Self:
        """Begin appending; creates the store or continues one made with the same settings.

        Raises:
            UserError: the store belongs to another target or was sampled differently, has a corrupt line
                before its last one, or is being written by another process.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        file = (self.directory / ROWS_FILE).open("ab")
        try:
            self._lock(file)
            self._meta = self._checked_meta(meta)
            self._recover(file)
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def append(self, rows: Sequence[ResponseRow]) -> None:
        """Write a batch, all or nothing, and wait until it is on disk."""
        if self._file is None:
            raise ValueError("the store is not open for appending")
        if not rows:
            return
        last = len(rows) - 1
        lines = [
            msgspec.json.encode(msgspec.structs.replace(row, committed=i == last))
            for i, row in enumerate(rows)
        ]
        self._file.write(b"\n".join(lines) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._done.update(row.conversation_key for row in rows)

    def close(self) -> None:
        """Stop appending; the lock is released."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def meta(self) -> StoreMeta:
        """The settings of the store; raises `UserError` if the directory holds none."""
        if self._meta is None:
            self._meta = self._read_meta()
        return self._meta

    def done_keys(self) -> set[str]:
        """Conversations that are complete in the store."""
        if self._file is not None:
            return set(self._done)
        return {row.conversation_key for row in self.rows()}

    def rows(self, *, drop_truncated: bool = False) -> Iterator[ResponseRow]:
        """Committed rows in order; `drop_truncated` leaves out those that ran into the token limit.

        Raises:
            UserError: no store there, or a corrupt line before the last one.
        """
        for batch, _ in self._committed_batches():
            for row in batch:
                if not (drop_truncated and row.finish_reason == "length"):
                    yield row

    def documents(self, *, drop_truncated: bool) -> list[Document]:
        """Committed rows as documents.

        Raises:
            UserError: as `rows`, or nothing is left to train on.
        """
        documents = [to_document(row) for row in self.rows(drop_truncated=drop_truncated)]
        if not documents:
            summary = self.summary()
            raise UserError(
                f"{self.directory}: no usable responses ({summary.rows} rows, {summary.truncated} of them "
                "truncated); generate more, raise max_new_tokens or keep truncated responses"
            )
        return documents

    def summary(self) -> StoreSummary:
        """Counts over the whole store."""
        rows = truncated = tokens = end = 0
        keys: set[str] = set()
        for batch, end in self._committed_batches():  # noqa: B007
            for row in batch:
                rows += 1
                truncated += row.finish_reason == "length"
                tokens += sum(stop - start for start, stop in _spans(row))
                keys.add(row.conversation_key)
        with (self.directory / ROWS_FILE).open("rb") as file:
            file.seek(end)
            torn_lines = sum(1 for _ in file)
        return StoreSummary(rows, len(keys), truncated, tokens, torn_lines)

    def _committed_batches(self) -> Iterator[tuple[list[ResponseRow], int]]:
        """Each complete batch, with the file offset after it."""
        path = self.directory / ROWS_FILE
        decoder = msgspec.json.Decoder(ResponseRow)
        batch: list[ResponseRow] = []
        offset = 0
        damage: str | None = None
        if not path.exists():
            raise UserError(f"{path}: no such file; generate responses first")
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                # Only the last line can be torn by a kill; damage before it is not ours to hide.
                if damage is not None:
                    raise UserError(damage)
                offset += len(line)
                try:
                    row = decoder.decode(line)
                    _check_row(row)
                except (msgspec.MsgspecError, ValueError) as error:
                    damage = f"{path}:{number}: not a response row ({error})"
                    continue
                batch.append(row)
                if row.committed:
                    yield batch, offset
                    batch = []

    def _recover(self, file: BufferedWriter) -> None:
        """Cut off what follows the last committed row and learn which conversations are done."""
        path = self.directory / ROWS_FILE
        self._done = set()
        end = 0
        for batch, end in self._committed_batches():  # noqa: B007
            self._done.update(row.conversation_key for row in batch)
        with path.open("rb") as tail:
            tail.seek(max(end - 1, 0))
            ends_line = end == 0 or tail.read(1) == b"\n"
            self.recovered_lines = sum(1 for _ in tail)
        file.truncate(end)
        if not ends_line:
            file.write(b"\n")
            file.flush()

    def _lock(self, file: BufferedWriter) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{self.directory}: another process is writing to this store") from error

    def _read_meta(self) -> StoreMeta:
        path = self.directory / META_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=StoreMeta)
        except FileNotFoundError as error:
            raise UserError(f"{path}: no such file; this is not a response store") from error
        except msgspec.MsgspecError as error:
            raise UserError(f"{path}: not the meta data of a response store ({error})") from error

    def _checked_meta(self, wanted: StoreMeta) -> StoreMeta:
        """Meta data to write under; written anew only when it changes."""
        meta = wanted
        if (self.directory / META_FILE).exists():
            found = self._read_meta()
            self._require_same(found, wanted)
            sources = list(dict.fromkeys(found.sources + wanted.sources))
            if sources == found.sources:
                return found
            meta = msgspec.structs.replace(found, sources=sources)
        elif (self.directory / ROWS_FILE).stat().st_size:
            raise UserError(
                f"{self.directory}: {ROWS_FILE} has rows but {META_FILE} is missing, so the target that made "
                "them is unknown; restore it or use another directory"
            )
        temporary = self.directory / f".{META_FILE}.{os.getpid()}"
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(meta), indent=2))
        os.replace(temporary, self.directory / META_FILE)
        return meta

    def _require_same(self, found: StoreMeta, wanted: StoreMeta) -> None:
        if found.target != wanted.target:
            raise UserError(
                f"{self.directory}: holds responses of {found.target_id}; refuses to mix with responses of "
                f"another target ({wanted.target_id}); use another directory"
            )
        for name in ("sampling", "max_new_tokens", "template_hash"):
            old, new = getattr(found, name), getattr(wanted, name)
            if old != new:
                raise UserError(
                    f"{self.directory}: its responses were made with {name} = {old}, this run has {new}; "
                    "use the same settings or another directory"
                )


def to_document(row: ResponseRow) -> Document:
    """The row as training material: prompt and response ids, the mask True where the target spoke."""
    from drafters.packing import Document

    mask = [False] * (len(row.prompt_ids) + len(row.response_ids))
    for start, stop in _spans(row):
        first = len(row.prompt_ids) + start
        mask[first : first + stop - start] = [True] * (stop - start)
    return Document(
        token_ids=row.prompt_ids + row.response_ids,
        response_mask=mask,
        document_id=row.document_id,
        domain=row.domain,
        conversation_key=row.conversation_key,
    )


def _spans(row: ResponseRow) -> list[tuple[int, int]]:
    if row.response_spans is None:
        return [(0, len(row.response_ids))]
    return row.response_spans


def _check_row(row: ResponseRow) -> None:
    previous = 0
    for start, stop in _spans(row):
        if not previous <= start <= stop <= len(row.response_ids):
            raise ValueError(f"response_spans {row.response_spans} do not fit the response")
        previous = stop

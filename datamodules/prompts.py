"""Conversations read from JSONL files and from `datasets` names.

Three row shapes are accepted, everything else is a `UserError` that names the place and the field:

- `{"messages": [{"role": "user", "content": "…"}, …]}`
- `{"turns": ["first question", "second question"]}`: the replies are to be generated
- `{"conversations": [{"from": "human", "value": "…"}, …]}` (ShareGPT)

Optional fields of a row: `id`, `domain`, `language`, `source`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from drafters.errors import UserError

Message = dict[str, str]

DEFAULT_DOMAIN = "default"
ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


@dataclass(frozen=True)
class Conversation:
    """Messages of one conversation; each is `{"role": system|user|assistant, "content": text}`.

    A conversation whose replies are still to be generated holds its user messages one after another. `language` is what the
    row says, None if it says nothing.
    """

    id: str
    domain: str
    messages: list[Message]
    source: str
    language: str | None = None


@dataclass(frozen=True)
class SourceSpec:
    """Where conversations come from: exactly one of `path` (JSONL) and `dataset` (a `datasets` name).

    `config` and `split` belong to `dataset`; `limit` keeps the first rows only; `domain` overrides the
    domain of the rows; `weight` is the share of the source in a mixture.
    """

    path: str | Path | None = None
    dataset: str | None = None
    config: str | None = None
    split: str = "train"
    domain: str | None = None
    limit: int | None = None
    weight: float = 1.0
    name: str | None = None

    @property
    def label(self) -> str:
        """Name shown to users: `name`, else the file's stem or the dataset's name."""
        return self.name or self.dataset or Path(str(self.path)).stem


def read_jsonl(
    path: str | Path, *, domain: str | None = None, limit: int | None = None
) -> list[Conversation]:
    """Conversations of a JSONL file, in file order.

    Args:
        path: UTF-8 file, one JSON object per line; blank lines are skipped. Lines end at the newline
            byte only, so U+2028 and similar characters inside strings are plain text.
        domain: overrides the domain of every row.
        limit: read at most this many rows.

    Raises:
        UserError: file missing or without rows; or a malformed row, named as `file:line`.
    """
    path = Path(path)
    conversations = list(islice(_parse_lines(path, domain), limit))
    if not conversations:
        raise UserError(f"{path}: no conversations in the file; expected one JSON object per line")
    return conversations


def load_source(spec: SourceSpec) -> list[Conversation]:
    """Conversations of one source, in its own order.

    Raises:
        UserError: bad spec, unreadable file, malformed row, or a dataset that cannot be loaded.
    """
    if (spec.path is None) == (spec.dataset is None):
        raise UserError(f"source {spec.name or ''!r}: give exactly one of `path` and `dataset`")
    if spec.path is not None:
        return read_jsonl(spec.path, domain=spec.domain, limit=spec.limit)
    where = f"dataset {spec.dataset}"
    conversations = [
        parse_row(row, f"{where} row {index}", domain=spec.domain, source=str(spec.dataset))
        for index, row in enumerate(islice(_dataset_rows(spec), spec.limit))
    ]
    if not conversations:
        raise UserError(f"{where}, split {spec.split}: no rows")
    return conversations


def parse_row(row: object, where: str, *, domain: str | None, source: str) -> Conversation:
    """One row in any accepted shape as a `Conversation`.

    The id is the row's own, else the sha256 of its messages, so it is stable across runs and files.

    Raises:
        UserError: starting with `where` and naming the field at fault.
    """
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}")
    messages = _parse_messages(row, where)
    if not any(message["role"] == "user" for message in messages):
        raise UserError(f"{where}: no user message")
    given = row.get("id")
    if given is None:
        given = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:32]
    elif isinstance(given, bool) or not isinstance(given, (str, int)) or given == "":
        raise UserError(f"{where}: field `id` must be a non-empty string or an integer")
    return Conversation(
        id=str(given),
        domain=domain or _optional_text(row, "domain", where) or DEFAULT_DOMAIN,
        messages=messages,
        source=_optional_text(row, "source", where) or source,
        language=_optional_text(row, "language", where),
    )


def _parse_lines(path: Path, domain: str | None) -> Iterator[Conversation]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot read the file ({error.strerror})") from error
    with file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 at byte {error.start}") from error
            except json.JSONDecodeError as error:
                raise UserError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from error
            yield parse_row(row, where, domain=domain, source=path.stem)


def _dataset_rows(spec: SourceSpec) -> Iterable[object]:
    from datasets import load_dataset

    name = " ".join(part for part in (spec.dataset, spec.config) if part)
    try:
        return load_dataset(spec.dataset, spec.config, split=spec.split)
    # The library raises anything from ConnectionError to ValueError here; all mean the same to a user.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"cannot load dataset {name!r}, split {spec.split!r}: {reason[0]}; loading needs a network or a "
            "filled datasets cache (HF_HOME). Without either, use a source with `path`"
        ) from error


def _parse_messages(row: Mapping[str, Any], where: str) -> list[Message]:
    # Tables give absent columns as None, so a key counts only with a value.
    if row.get("messages") is not None:
        return [
            _message(item, "role", "content", {role: role for role in ROLES}, f"{where}: {place}")
            for place, item in _items(row, "messages", where)
        ]
    if row.get("conversations") is not None:
        return [
            _message(item, "from", "value", SHAREGPT_ROLES, f"{where}: {place}")
            for place, item in _items(row, "conversations", where)
        ]
    if row.get("turns") is not None:
        messages = []
        for place, item in _items(row, "turns", where):
            if not isinstance(item, str) or not item.strip():
                raise UserError(f"{where}: `{place}` must be a non-empty string")
            messages.append({"role": "user", "content": item})
        return messages
    raise UserError(
        f"{where}: one of the fields `messages`, `turns`, `conversations` is needed; "
        f"the row has {sorted(row)}"
    )


def _items(row: Mapping[str, Any], field: str, where: str) -> Iterator[tuple[str, object]]:
    value = row[field]
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: field `{field}` must be a non-empty list")
    for index, item in enumerate(value):
        yield f"{field}[{index}]", item


def _message(item: object, role_key: str, text_key: str, roles: Mapping[str, str], place: str) -> Message:
    if not isinstance(item, Mapping):
        raise UserError(f"{place} must be an object with `{role_key}` and `{text_key}`")
    role, text = item.get(role_key), item.get(text_key)
    if not isinstance(role, str) or role not in roles:
        raise UserError(f"{place}.{role_key} is {role!r}; known values are {sorted(roles)}")
    if not isinstance(text, str):
        raise UserError(f"{place}.{text_key} must be a string, found {type(text).__name__}")
    if roles[role] == "user" and not text.strip():
        raise UserError(f"{place}.{text_key}: empty user message")
    return {"role": roles[role], "content": text}


def _optional_text(row: Mapping[str, Any], field: str, where: str) -> str | None:
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: field `{field}` must be a string, found {type(value).__name__}")
    return value

"""Benchmarks: rows of a hub data set, or a local file, as conversations whose answers are to be generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from datamodules.prompts import Conversation, parse_row, read_jsonl
from drafters.errors import UserError

_USERS = ("human", "user")


@dataclass(frozen=True)
class BenchmarkSpec:
    """Where a benchmark's conversations come from: `path`, `dataset`, or a `blend` of others.

    A row of `dataset` becomes a conversation through one of `prompt` (a template of its fields), `turns` (the field with the
    list of user turns) and `conversations` (the field with a ShareGPT conversation); without any it has one of the shapes of
    `datamodules.prompts`. `group` is the heading of its column in
    tables; `rows` bounds how much of a large set is read.
    """

    name: str
    title: str
    group: str = ""
    path: Path | None = None
    dataset: str | None = None
    config: str | None = None
    data_files: tuple[str, ...] = ()
    split: str = "test"
    rows: int | None = None
    domain: str | None = None
    domain_field: str | None = None
    prompt: str | None = None
    turns: str | None = None
    conversations: str | None = None
    blend: tuple[BenchmarkSpec, ...] = ()

    @property
    def source(self) -> str:
        """For people: the file, the data set, or the names that are blended."""
        if self.path is not None:
            return str(self.path)
        if self.blend:
            return f"equal shares of {', '.join(part.name for part in self.blend)}"
        where = self.data_files[0].rpartition("/")[0] if self.data_files else self.dataset
        return f"{where}, split {self.split}"


def load_benchmark(spec: BenchmarkSpec, limit: int | None = None) -> list[Conversation]:
    """Conversations of a benchmark; with `limit`, so many taken evenly over all, hence over its domains.

    Raises:
        UserError: missing file, malformed row, or a data set that cannot be loaded.
    """
    if spec.blend:
        share = None if limit is None else -(-limit // len(spec.blend))
        parts = [load_benchmark(part, share) for part in spec.blend]
        # as far as the shortest goes: the shares are equal
        mixed = [conversation for row in zip(*parts, strict=False) for conversation in row]
        return _distinct(spec, mixed[:limit])
    if spec.path is not None:
        found = read_jsonl(spec.path)
    else:
        made = (_conversation(spec, row, number) for number, row in enumerate(_rows(spec)))
        found = [conversation for conversation in made if conversation is not None]
        if not found:
            raise UserError(f"benchmark {spec.name}: no rows in {spec.source}")
    if limit is not None and limit < len(found):
        found = [found[i * len(found) // limit] for i in range(limit)]
    return _distinct(spec, found)


def _distinct(spec: BenchmarkSpec, conversations: list[Conversation]) -> list[Conversation]:
    """Ids name what is paired between methods, so a repeated one gets a number."""
    seen: dict[str, int] = {}
    result = []
    for conversation in conversations:
        count = seen[conversation.id] = seen.get(conversation.id, 0) + 1
        result.append(conversation if count == 1 else replace(conversation, id=f"{conversation.id}~{count}"))
    return result


def _rows(spec: BenchmarkSpec) -> Iterator[Mapping[str, Any]]:
    """Read row by row, since of a large set only the first are wanted."""
    from datasets import load_dataset

    options: dict[str, Any] = {"data_files": list(spec.data_files)} if spec.data_files else {}
    try:
        rows = load_dataset(spec.dataset, spec.config, split=spec.split, streaming=True, **options)
        yield from islice(rows, spec.rows)
    # the library raises anything from ConnectionError to ValueError here
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"benchmark {spec.name}: cannot load {spec.source} ({reason[0]}); it needs a network or a filled datasets cache "
            f"(HF_HOME). A local file does as well: --benchmark {spec.name}=PATH"
        ) from error


def _conversation(spec: BenchmarkSpec, row: Mapping[str, Any], number: int) -> Conversation | None:
    """None for a ShareGPT row in which no user says anything; such data has a few."""
    where = f"benchmark {spec.name}, row {number}"
    domain = spec.domain
    try:
        if spec.domain_field is not None:
            domain = str(row[spec.domain_field])
        if spec.prompt is not None:
            content: dict[str, Any] = {"turns": [spec.prompt.format(**row).strip()]}
        elif spec.turns is not None:
            content = {"turns": list(row[spec.turns])}
        elif spec.conversations is None:
            return parse_row(row, where, domain=domain, source=spec.name)
        else:
            said = [item["value"] for item in row[str(spec.conversations)] if item["from"] in _USERS]
            content = {"turns": [text for text in said if text.strip()]}
            if not content["turns"]:
                return None
    except KeyError as missing:
        raise UserError(f"{where}: has no field {missing}, but {', '.join(sorted(row))}") from None
    return parse_row({"id": f"{spec.name}-{number}", **content}, where, domain=domain, source=spec.name)

"""Traces in one safetensors file, so that they can be made where the models are and simulated anywhere.

Tensors, over all documents end to end: `accepted` [A] int32 and `positions` [A] int32 of the anchors, `anchors` [D] how many each
document has; `spans` [S, 2] int32 and `span_counts` [D]; `ratio` [A] and `survival` [A, B-1] float32 if the drafter had the
heads. Metadata: what `TraceSet` has besides, and ids and domains as JSON lists.

Shapes: A anchors, D documents, S responses, B block size.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from drafters.errors import UserError
from pipeline.block_traces import BlockTrace

FORMAT = "draftsmith-traces-1"

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class TraceSet:
    """Traces with what they are of: target, drafter and block size B; `source` says in words how they were made."""

    traces: Sequence[BlockTrace]
    block_size: int
    target_id: str
    drafter_version: str
    source: str


def save_traces(path: Path, found: TraceSet) -> None:
    """Write the file, whole or not at all."""
    traces = found.traces
    rows = [sorted(trace.row_of.items()) for trace in traces]
    order = [np.asarray([row for _, row in own], dtype=np.int64) for own in rows]
    arrays: Arrays = {
        "accepted": _joined([t.accepted_A[o] for t, o in zip(traces, order, strict=True)], np.int32),
        "positions": _joined([[position for position, _ in own] for own in rows], np.int32),
        "anchors": np.asarray([len(own) for own in rows], dtype=np.int32),
        "spans": np.asarray([span for t in traces for span in t.spans], dtype=np.int32).reshape(-1, 2),
        "span_counts": np.asarray([len(t.spans) for t in traces], dtype=np.int32),
    }
    for name, parts in (
        ("ratio", [t.ratio_A for t in traces]),
        ("survival", [t.survival_AD for t in traces]),
    ):
        known = [part[o] for part, o in zip(parts, order, strict=True) if part is not None]
        if known and len(known) == len(traces):
            arrays[name] = _joined(known, np.float32)
    metadata = {
        "format": FORMAT,
        "block_size": str(found.block_size),
        "target_id": found.target_id,
        "drafter_version": found.drafter_version,
        "source": found.source,
        "document_ids": json.dumps([t.document_id for t in traces]),
        "domains": json.dumps([t.domain for t in traces]),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_traces(path: Path) -> TraceSet:
    """Read what `save_traces` wrote.

    Raises:
        UserError: when the file is none, or its numbers contradict each other.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"--traces {path}: not a file of traces ({error})") from None
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"--traces {path}: format {metadata.get('format')!r} is not {FORMAT}; make it with `draftsmith simulate`"
        )
    try:
        return _read(arrays, metadata)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"--traces {path}: damaged ({error})") from None


def _read(arrays: Arrays, metadata: dict[str, str]) -> TraceSet:
    block_size = int(metadata["block_size"])
    ids, domains = json.loads(metadata["document_ids"]), json.loads(metadata["domains"])
    count, total = len(ids), len(arrays["accepted"])
    shapes: dict[str, tuple[int, ...]] = {
        "accepted": (total,),
        "positions": (total,),
        "anchors": (count,),
        "spans": (int(arrays["span_counts"].sum()), 2),
        "span_counts": (count,),
        "ratio": (total,),
        "survival": (total, block_size - 1),
    }
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise ValueError(f"{name} has shape {array.shape}, not {shapes[name]}")
        if name not in ("ratio", "survival") and (array.dtype != np.int32 or (array < 0).any()):
            raise ValueError(f"{name} must hold counts")
        if name in ("ratio", "survival") and not ((array >= 0) & (array <= 1)).all():
            raise ValueError(f"{name} has values outside 0..1")
    if len(domains) != count or arrays["anchors"].sum() != total or block_size < 2:
        raise ValueError("counts do not add up")
    if (arrays["accepted"] >= block_size).any():
        raise ValueError(f"a block of {block_size} cannot have {arrays['accepted'].max()} drafts accepted")
    anchors = np.split(np.arange(total), np.cumsum(arrays["anchors"])[:-1])
    spans = np.split(arrays["spans"], np.cumsum(arrays["span_counts"])[:-1])
    ratio, survival = arrays.get("ratio"), arrays.get("survival")
    traces = [
        BlockTrace(
            str(name),
            [(int(first), int(last)) for first, last in own_spans],
            {int(position): row for row, position in enumerate(arrays["positions"][rows])},
            arrays["accepted"][rows].astype(np.int64),
            None if ratio is None else ratio[rows].astype(np.float64),
            None if survival is None else survival[rows].astype(np.float64),
            str(domain),
        )
        for name, domain, rows, own_spans in zip(ids, domains, anchors, spans, strict=True)
    ]
    for trace in traces:
        for first, last in trace.spans:
            for position in range(first, last):
                row = trace.row_of.get(position)
                if row is None or trace.accepted_A[row] > last - position:
                    raise ValueError(f"{trace.document_id}: no block at {position}, or one past the end")
    return TraceSet(
        traces, block_size, metadata["target_id"], metadata["drafter_version"], metadata["source"]
    )


def _joined(parts: Sequence[Any], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.asarray(part, dtype=dtype) for part in parts]) if parts else np.zeros(0, dtype)

"""Documents, and batches of them laid end to end.

A batch is one flat row without padding: document after document, each with positions counted from zero. Everything
downstream (target forward, drafter attention, losses) treats documents as isolated from each other.

Shapes: T flat tokens of all documents, N blocks (one per anchor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from drafters.errors import UserError

AnchorSource = Literal["random", "rounds", "all"]


@dataclass(frozen=True)
class Document:
    """One conversation in token ids, never text.

    `response_mask` is True where the target produced the token; anchors and predicted tokens live there.
    `round_starts` are absolute positions at which serving began a verification round, if known.
    """

    token_ids: list[int]
    response_mask: list[bool]
    document_id: str
    domain: str = "default"
    conversation_key: str = ""
    round_starts: list[int] | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.response_mask):
            raise UserError(
                f"document {self.document_id}: {len(self.token_ids)} tokens but a response mask of "
                f"{len(self.response_mask)}"
            )

    def truncated(self, max_length: int) -> Document:
        """The first `max_length` tokens (training length cap)."""
        if len(self.token_ids) <= max_length:
            return self
        starts = self.round_starts
        return replace(
            self,
            token_ids=self.token_ids[:max_length],
            response_mask=self.response_mask[:max_length],
            round_starts=None if starts is None else [s for s in starts if s < max_length],
        )

    def prompt_and_output(self) -> tuple[list[int], list[int]]:
        """A single-turn document split where its response begins."""
        start = self.response_mask.index(True)
        return self.token_ids[:start], self.token_ids[start:]

    def anchor_positions(self) -> list[int]:
        """Positions that can be an anchor: a response token directly followed by another one."""
        mask = self.response_mask
        return [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]


@dataclass(frozen=True)
class PackedBatch:
    """Documents laid end to end, with the anchors of the blocks to train or replay.

    `input_ids_T`, `document_ids_T` (0, 1, …), `position_ids_T` are int64; `response_mask_T` is bool;
    `anchors_N` are flat int64 indices in increasing order.
    """

    input_ids_T: torch.Tensor
    document_ids_T: torch.Tensor
    position_ids_T: torch.Tensor
    response_mask_T: torch.Tensor
    anchors_N: torch.Tensor
    domains: list[str] = field(default_factory=list)
    document_names: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids_T.numel())

    @property
    def num_blocks(self) -> int:
        return int(self.anchors_N.numel())

    def document_lengths(self) -> list[int]:
        """Number of tokens of each document, in order."""
        return torch.bincount(self.document_ids_T, minlength=len(self.document_names)).tolist()

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on another device."""
        return replace(
            self,
            input_ids_T=self.input_ids_T.to(device),
            document_ids_T=self.document_ids_T.to(device),
            position_ids_T=self.position_ids_T.to(device),
            response_mask_T=self.response_mask_T.to(device),
            anchors_N=self.anchors_N.to(device),
        )


def anchor_candidates(document: Document, source: AnchorSource) -> list[int]:
    """Positions that `source` may choose anchors from, sorted; see `choose_anchors`."""
    candidates = document.anchor_positions()
    if source == "rounds" and document.round_starts is not None:
        candidates = sorted(set(candidates) & set(document.round_starts))
    return candidates


def choose_anchors(
    document: Document,
    count: int,
    source: AnchorSource,
    generator: torch.Generator | None,
) -> list[int]:
    """Anchor positions of one document, sorted, without replacement.

    Args:
        document: the document; a short one simply yields fewer anchors, none is ever repeated.
        count: the most anchors to take (ignored for `all`).
        source: `random` draws uniformly from the candidates; `rounds` takes the positions where serving
            really started a round (drawing `count` of them if there are more), and falls back to `random` for a document
            whose rounds are unknown; `all` takes every candidate.
        generator: source of randomness; None uses torch's global one.
    """
    candidates = anchor_candidates(document, source)
    if source == "all" or len(candidates) <= count:
        return candidates
    order = torch.randperm(len(candidates), generator=generator)[:count].tolist()
    return sorted(candidates[i] for i in order)


def pack_documents(
    documents: Sequence[Document],
    *,
    anchors_per_document: int,
    generator: torch.Generator | None = None,
    anchor_source: AnchorSource = "random",
) -> PackedBatch:
    """Lay documents end to end and choose anchors in each.

    Anchors are drawn per document, not per row, so packing a short document beside a long one does not starve it.

    Raises:
        UserError: without documents, or with an empty one.
    """
    if not documents:
        raise UserError("cannot pack an empty list of documents")
    tokens: list[int] = []
    owners: list[int] = []
    positions: list[int] = []
    mask: list[bool] = []
    anchors: list[int] = []
    for index, document in enumerate(documents):
        length = len(document.token_ids)
        if length == 0:
            raise UserError(f"document {document.document_id} is empty")
        chosen = choose_anchors(document, anchors_per_document, anchor_source, generator)
        anchors += [len(tokens) + position for position in chosen]
        tokens += document.token_ids
        owners += [index] * length
        positions += range(length)
        mask += document.response_mask
    return PackedBatch(
        input_ids_T=torch.tensor(tokens, dtype=torch.long),
        document_ids_T=torch.tensor(owners, dtype=torch.long),
        position_ids_T=torch.tensor(positions, dtype=torch.long),
        response_mask_T=torch.tensor(mask, dtype=torch.bool),
        anchors_N=torch.tensor(anchors, dtype=torch.long),
        domains=[document.domain for document in documents],
        document_names=[document.document_id for document in documents],
    )

"""Replay τ: acceptance length of a drafter on text the target has already produced.

The drafter fills a full block at every anchor of the text in packed passes; then the verification rounds are walked as greedy
decoding would. For greedy text the result equals real decoding up to float ties, does not depend on load or on the
length policy, and costs far less than decoding.

Shapes: N blocks, B block size, T flat tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from drafters.fill import Drafter, block_filler, draft_head
from drafters.packing import Document, PackedBatch, pack_documents
from drafters.target import Target

Fill = Callable[[PackedBatch], Iterable[torch.Tensor]]
"""Blocks at the anchors of a batch, filled by each of several variants: hidden_NBH of each."""

REPLAY_TOKENS = 1024
"""Flat tokens per replay pass."""

REPLAY_BLOCKS = 512
"""Blocks per drafter pass, so that memory does not grow with the number of anchors."""


@dataclass(frozen=True)
class ReplayResult:
    """Rounds of one document.

    `accepted_per_round[i]` drafts were accepted in the round anchored at `round_starts[i]`; `committed` counts tokens
    after the prefill's first one and none past the end of the text; `reached_B[j]` / `matched_B[j]` count rounds in which slot j
    was reached (all earlier drafts matched, inside the text) and matched.
    """

    document_id: str
    domain: str
    committed: int
    rounds: int
    accepted_per_round: list[int] = field(default_factory=list)
    round_starts: list[int] = field(default_factory=list)
    reached_B: list[int] = field(default_factory=list)
    matched_B: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """τ of this document; nan without a round."""
        return self.committed / self.rounds if self.rounds else float("nan")


def total_acceptance_length(results: Sequence[ReplayResult]) -> float:
    """τ = Σ committed / Σ rounds over documents; nan without a round."""
    rounds = sum(r.rounds for r in results)
    return sum(r.committed for r in results) / rounds if rounds else float("nan")


def position_acceptance(results: Sequence[ReplayResult]) -> list[float]:
    """P(slot j accepted | slots before it accepted) for j = 1..B-1; nan where never reached."""
    if not results:
        return []
    block_size = len(results[0].reached_B)
    reached = [sum(r.reached_B[j] for r in results) for j in range(1, block_size)]
    matched = [sum(r.matched_B[j] for r in results) for j in range(1, block_size)]
    return [m / n if n else float("nan") for m, n in zip(matched, reached, strict=True)]


def iterate_packs(documents: Sequence[Document], max_tokens: int) -> Iterator[list[Document]]:
    """Consecutive documents in groups of at most `max_tokens` tokens (one longer document stands alone)."""
    pack: list[Document] = []
    used = 0
    for document in documents:
        if pack and used + len(document.token_ids) > max_tokens:
            yield pack
            pack, used = [], 0
        pack.append(document)
        used += len(document.token_ids)
    if pack:
        yield pack


def chunked_argmax(hidden_RH: torch.Tensor, head_VH: torch.Tensor, rows: int = 512) -> torch.Tensor:
    """Head argmax [R] without ever holding [R, V]."""
    parts = [(part.to(head_VH.dtype) @ head_VH.T).max(dim=-1).indices for part in hidden_RH.split(rows)]
    return torch.cat(parts) if parts else hidden_RH.new_zeros(0, dtype=torch.long)


def draft_all_anchors(
    drafter: Drafter, target: Target, documents: Sequence[Document]
) -> Iterator[tuple[Document, list[int], torch.Tensor]]:
    """Argmax drafts at every anchor of every document.

    Yields:
        (document, anchor positions, drafts [A, B-1] int64 on the CPU).
    """

    def prepare(whole: PackedBatch) -> Fill:
        fill = block_filler(drafter, target, whole)
        return lambda batch: [fill(batch)]

    head_VH = draft_head(drafter, target)
    for document, anchors, (drafts,) in draft_variants(documents, head_VH, drafter.block_size, prepare):
        yield document, anchors, drafts


@torch.no_grad()
def draft_variants(
    documents: Sequence[Document],
    head_VH: torch.Tensor,
    block_size: int,
    prepare: Callable[[PackedBatch], Fill],
) -> Iterator[tuple[Document, list[int], list[torch.Tensor]]]:
    """Argmax drafts at every anchor by several variants of a drafter, which may share work.

    Args:
        documents: texts of the target.
        head_VH: the head of all variants.
        block_size: theirs.
        prepare: given the documents of a pack, what fills blocks at some of their anchors by each variant.

    Yields:
        (document, anchor positions, drafts [A, B-1] int64 on the CPU of each variant).
    """
    for pack in iterate_packs(documents, REPLAY_TOKENS):
        full = pack_documents(pack, anchors_per_document=0, anchor_source="all").to(head_VH.device)
        fill = prepare(full)
        parts: list[list[torch.Tensor]] = []
        for anchors in full.anchors_N.split(REPLAY_BLOCKS):
            drafts = []
            for hidden_NBH in fill(_with_anchors(full, anchors)):
                flat = hidden_NBH[:, 1:].reshape(-1, hidden_NBH.shape[-1])
                drafts.append(chunked_argmax(flat, head_VH).view(-1, block_size - 1).cpu())
            parts.append(drafts)
        variants = [torch.cat(variant) for variant in zip(*parts, strict=True)]
        first = 0
        for document in pack:
            anchors_of = document.anchor_positions()
            rows = slice(first, first + len(anchors_of))
            yield document, anchors_of, [drafts_NB[rows] for drafts_NB in variants]
            first += len(anchors_of)


def _with_anchors(batch: PackedBatch, anchors_N: torch.Tensor) -> PackedBatch:
    return PackedBatch(
        batch.input_ids_T,
        batch.document_ids_T,
        batch.position_ids_T,
        batch.response_mask_T,
        anchors_N,
        batch.domains,
        batch.document_names,
    )


def walk_rounds(
    document: Document, anchors: Sequence[int], drafts_AB: torch.Tensor, block_size: int
) -> ReplayResult:
    """Walk the verification rounds over a served text.

    Each response span (one assistant turn) begins with the prefill's token; a round anchored at t with m matching drafts
    commits min(m+1, last-t) tokens, `last` being the span's last position.
    """
    row_of = {anchor: row for row, anchor in enumerate(anchors)}
    tokens = torch.tensor(document.token_ids)
    committed = rounds = 0
    accepted_per_round: list[int] = []
    starts: list[int] = []
    reached = [0] * block_size
    matched = [0] * block_size
    for first, last in response_spans(document.response_mask):
        t = first
        while t < last:
            draft = drafts_AB[row_of[t]]
            inside = min(block_size - 1, last - t)
            same = (draft[:inside] == tokens[t + 1 : t + 1 + inside]).long().cumprod(dim=0)
            accepted = int(same.sum())
            for j in range(1, min(accepted + 1, inside) + 1):
                reached[j] += 1
                matched[j] += int(j <= accepted)
            rounds += 1
            starts.append(t)
            accepted_per_round.append(accepted)
            step = min(accepted + 1, last - t)
            committed += step
            t += step
    return ReplayResult(
        document.document_id,
        document.domain,
        committed,
        rounds,
        accepted_per_round,
        starts,
        reached,
        matched,
    )


def response_spans(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """(first, last) positions of each run of True."""
    spans: list[tuple[int, int]] = []
    start: int | None = None
    for i, on in enumerate([*mask, False]):
        if on and start is None:
            start = i
        elif not on and start is not None:
            spans.append((start, i - 1))
            start = None
    return spans


def replay(drafter: Drafter, target: Target, documents: Sequence[Document]) -> list[ReplayResult]:
    """Replay every document; results in the documents' order."""
    return [
        walk_rounds(document, anchors, drafts, drafter.block_size)
        for document, anchors, drafts in draft_all_anchors(drafter, target, documents)
    ]

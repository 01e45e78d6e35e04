"""What would happen at every place of a served text where a round may begin, whatever came before it.

The drafter's whole block at each anchor, compared with the text, says how many drafts would be accepted under any verify_len;
the heads say what they would have answered. So any policy can be walked over a text afterwards, its own round starts included.
For greedy text that is exact up to float ties. The logged rounds of a record alone would not do: another policy begins its
rounds elsewhere.

Shapes: A anchors of a document, N blocks, B block size, D drafts of a block (B-1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.acceptance_head import confident_argmax
from drafters.block_loss import accepted_prefix
from drafters.checkpoint import LoadedDrafter
from drafters.fill import draft_head, features_of, fill_blocks
from drafters.packing import Document, PackedBatch, pack_documents
from drafters.replay import REPLAY_BLOCKS, REPLAY_TOKENS, iterate_packs, response_spans
from drafters.target import Target


@dataclass(frozen=True)
class BlockTrace:
    """One document: `row_of` maps an anchor to its row.

    `accepted_A` drafts of the whole block that the text confirms, none past its end. `ratio_A` is the length head's â and
    `survival_AD` the acceptance head's S, None without the head. `spans` are (first, last) positions of each response.
    """

    document_id: str
    spans: list[tuple[int, int]]
    row_of: dict[int, int]
    accepted_A: NDArray[np.int64]
    ratio_A: NDArray[np.float64] | None
    survival_AD: NDArray[np.float64] | None
    domain: str = "default"


@torch.no_grad()
def trace_documents(
    loaded: LoadedDrafter, target: Target, documents: Sequence[Document]
) -> Iterator[BlockTrace]:
    """Traces of the documents, in their order."""
    for pack in iterate_packs(documents, REPLAY_TOKENS):
        full = pack_documents(pack, anchors_per_document=0, anchor_source="all").to(target.device)
        features = features_of(loaded.drafter, target, full)
        parts = [
            _outcomes(loaded, target, replace(full, anchors_N=anchors), features)
            for anchors in full.anchors_N.split(REPLAY_BLOCKS)
        ]
        accepted_N, ratio_N, survival_ND = (
            None if column[0] is None else torch.cat([part for part in column if part is not None]).numpy()
            for column in zip(*parts, strict=True)
        )
        assert accepted_N is not None
        first = 0
        for document in pack:
            anchors_of = document.anchor_positions()
            rows = slice(first, first + len(anchors_of))
            first = rows.stop
            yield BlockTrace(
                document.document_id,
                [span for span in response_spans(document.response_mask) if span[0] < span[1]],
                {anchor: row for row, anchor in enumerate(anchors_of)},
                accepted_N[rows],
                None if ratio_N is None else ratio_N[rows],
                None if survival_ND is None else survival_ND[rows],
                document.domain,
            )


def _outcomes(
    loaded: LoadedDrafter, target: Target, batch: PackedBatch, features: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(accepted_N, ratio_N, survival_ND) on the CPU."""
    filled = fill_blocks(loaded.drafter, target, batch, features)
    layout, shape = filled.layout, filled.layout.targets_NB.shape
    drafts_R, confidence_R = confident_argmax(
        filled.hidden_NBH.flatten(0, 1), draft_head(loaded.drafter, target)
    )
    match_NB = (drafts_R.view(shape) == batch.input_ids_T[layout.targets_NB]) & layout.valid_NB
    ratio_N = survival_ND = None
    if loaded.length_head is not None:
        head = loaded.length_head.to(target.device)
        ratio_N = head(filled.hidden_NBH if head.features == "hidden" else filled.embeddings_NBH)
        ratio_N = ratio_N.double().cpu()
    if loaded.acceptance_head is not None:
        survival_ND = loaded.acceptance_head.to(target.device).survival(
            filled.hidden_NBH, confidence_R.view(shape)[:, 1:]
        )
        survival_ND = survival_ND.double().cpu()
    return accepted_prefix(match_NB).cpu(), ratio_N, survival_ND

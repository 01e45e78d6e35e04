"""How far the drafter's distributions are from the target's along a served text (AdaFlash Fig. 3).

Blocks are filled where verification rounds begin, so that every token is judged in the slot it was really drafted in.

Shapes: N blocks, B block size, T tokens, R rows (slots that were reached), H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from drafters.fill import Drafter, draft_head, fill_blocks
from drafters.packing import Document, pack_documents
from drafters.replay import replay
from drafters.target import Target

CHUNK_ROWS = 128


@dataclass(frozen=True)
class TokenDivergence:
    """A token of the text: absolute position, slot of the block that drafted it, KL(q‖p) in nats, whether it was accepted."""

    position: int
    slot: int
    divergence: float
    accepted: bool


def reverse_kl(
    draft_RH: torch.Tensor, draft_head_VH: torch.Tensor, target_RH: torch.Tensor, target_head_VH: torch.Tensor
) -> torch.Tensor:
    """KL(q‖p) in nats of each row at temperature 1, fp32 [R] (fp64 for fp64 heads); q the drafter's, p the target's.

    Args:
        draft_RH, target_RH: what goes into each head; their widths may differ.
        draft_head_VH, target_head_VH: the heads, of one vocabulary.
    """
    accumulate = torch.float64 if target_head_VH.dtype == torch.float64 else torch.float32
    parts = []
    for draft, target in zip(draft_RH.split(CHUNK_ROWS), target_RH.split(CHUNK_ROWS), strict=True):
        logq = (draft.to(draft_head_VH.dtype) @ draft_head_VH.T).to(accumulate).log_softmax(dim=-1)
        logp = (target.to(target_head_VH.dtype) @ target_head_VH.T).to(accumulate).log_softmax(dim=-1)
        parts.append((logq.exp() * (logq - logp)).sum(dim=-1))
    return torch.cat(parts) if parts else draft_RH.new_zeros(0, dtype=accumulate)


@torch.no_grad()
def token_divergence(drafter: Drafter, target: Target, document: Document) -> list[TokenDivergence]:
    """Divergence at every token that a round drafted: accepted ones and each round's first rejected one.

    A token after a block that was accepted whole is the target's own and was not drafted; it has no entry. The text's
    rounds are walked as greedy decoding would with whole blocks.

    Args:
        drafter: whose q.
        target: whose p, on the text itself (teacher forcing).
        document: the text.
    """
    (walked,) = replay(drafter, target, [document])
    if not walked.rounds:
        return []
    at_rounds = replace(document, round_starts=walked.round_starts)
    batch = pack_documents([at_rounds], anchors_per_document=walked.rounds, anchor_source="rounds").to(
        target.device
    )
    output = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    hidden_NBH = fill_blocks(drafter, target, batch, output.features_TC).hidden_NBH
    rows: list[tuple[int, int, int, bool]] = []
    last = len(document.token_ids) - 1
    for block, (start, accepted) in enumerate(
        zip(walked.round_starts, walked.accepted_per_round, strict=True)
    ):
        end = _span_end(document, start, last)
        for slot in range(1, min(accepted + 1, drafter.block_size - 1, end - start) + 1):
            rows.append((block, slot, start + slot, slot <= accepted))
    blocks = torch.tensor([row[0] for row in rows], device=target.device)
    slots = torch.tensor([row[1] for row in rows], device=target.device)
    positions = torch.tensor([row[2] for row in rows], device=target.device)
    values = reverse_kl(
        hidden_NBH[blocks, slots],
        draft_head(drafter, target),
        output.hidden_TH[positions - 1],
        target.head_VH,
    )
    return [
        TokenDivergence(position, slot, value, accepted)
        for (_, slot, position, accepted), value in zip(rows, values.tolist(), strict=True)
    ]


def _span_end(document: Document, start: int, last: int) -> int:
    """Last position of the response span that `start` lies in."""
    end = start
    while end < last and document.response_mask[end + 1]:
        end += 1
    return end

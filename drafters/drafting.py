"""The drafter's share of a round: one pass over the blocks of several sessions, whatever of their text it has not read included.

Shapes: N sessions, B block size, T tokens, H hidden, C feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from drafters.blocks import AttentionGroup
from drafters.d3d import D3DDrafter
from drafters.dflash import ContextCache, DFlashDrafter
from drafters.fill import Drafter

if TYPE_CHECKING:
    from drafters.decoding import DecodingSession


@torch.no_grad()
def embed_blocks(sessions: Sequence[DecodingSession], drafter: Drafter) -> torch.Tensor:
    """embeddings_NBH of the blocks that the sessions are at: anchor and masks."""
    target = sessions[0].target
    blocks_NB = torch.full(
        (len(sessions), drafter.block_size), drafter.spec.mask_token_id, device=target.device
    )
    blocks_NB[:, 0] = torch.tensor([session.tokens[-1] for session in sessions], device=target.device)
    return drafter.embed(blocks_NB) if isinstance(drafter, D3DDrafter) else target.embed(blocks_NB)


@torch.no_grad()
def draft_blocks(sessions: Sequence[DecodingSession], drafter: Drafter) -> torch.Tensor:
    """Fill one block for each session that has begun; returns hidden_NBH."""
    target = sessions[0].target
    if isinstance(drafter, D3DDrafter):
        tokens, starts, caches = zip(*(session._unread(drafter) for session in sessions), strict=True)
        return drafter.draft(tokens, starts, caches)
    _encode(sessions, drafter)
    starts_N = torch.tensor([session._start for session in sessions], device=target.device)
    groups: list[AttentionGroup] = []
    first = 0
    for number, session in enumerate(sessions):
        assert session._context.length == session._start, (session._context.length, session._start)
        last = first + session._context.length
        groups.append(AttentionGroup(slice(number, number + 1), slice(first, last), None))
        first = last
    return drafter(
        embed_blocks(sessions, drafter),
        starts_N[:, None] + torch.arange(drafter.block_size, device=target.device),
        ContextCache.cat([session._context for session in sessions]),
        groups,
    )


def _encode(sessions: Sequence[DecodingSession], drafter: DFlashDrafter) -> None:
    """Bring each session's drafter context up to its anchor, with one pass over all new features."""
    fresh = [(session, session._unencoded(drafter)) for session in sessions]
    pieces = [(session, features) for session, features in fresh if features is not None]
    if not pieces:
        return
    lengths = [features.shape[0] for _, features in pieces]
    positions = [
        torch.arange(session._start - length, session._start, device=session.target.device)
        for (session, _), length in zip(pieces, lengths, strict=True)
    ]
    layers = drafter.context_key_values(torch.cat([features for _, features in pieces]), torch.cat(positions))
    split = [(keys.split(lengths), values.split(lengths)) for keys, values in layers]
    for number, (session, _) in enumerate(pieces):
        session._extend_context([(keys[number], values[number]) for keys, values in split])

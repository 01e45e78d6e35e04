"""Traced texts as requests: for every token that could be an anchor, what a whole block there would have been worth.

Shapes: Q requests, A anchors of all requests end to end, N running requests, B block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.acceptance_head import AcceptanceHead
from drafters.errors import UserError
from drafters.length_head import LengthHead
from pipeline.block_traces import BlockTrace

Ints = NDArray[np.int64]


class TracedLengthHead(LengthHead):
    """Answers what the traced length head answered: â lies in slot 0 of `Requests.blocks`."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, features_NBH: torch.Tensor) -> torch.Tensor:
        """â [N], fp32."""
        return features_NBH[:, 0, 0]


class TracedAcceptanceHead(AcceptanceHead):
    """Answers what the traced acceptance head answered: S lies in slots 1..B-1 of `Requests.blocks`."""

    def __init__(self, block_size: int) -> None:
        super().__init__(1, block_size, 1, confidence=False)

    def survival(self, hidden_NBH: torch.Tensor, confidence_ND: torch.Tensor | None = None) -> torch.Tensor:
        """S [N, D], fp32."""
        return hidden_NBH[:, 1:, 0]


@dataclass(frozen=True)
class Requests:
    """One request for each response of the traces.

    `first_Q` is the anchor row of a request's first round, `end_Q` the row behind its last; so `end_Q - first_Q` tokens are to be
    committed. `prompt_Q` tokens lie before its first anchor, the target's own first token, and `document_Q` says which trace it
    is of. `accepted_A` drafts are accepted if a whole block is verified, none past the end of the text.
    """

    block_size: int
    first_Q: Ints
    end_Q: Ints
    prompt_Q: Ints
    document_Q: Ints
    accepted_A: Ints
    heads_AB: torch.Tensor
    length_head: TracedLengthHead | None
    acceptance_head: TracedAcceptanceHead | None

    @property
    def count(self) -> int:
        """Q."""
        return len(self.first_Q)

    def blocks(self, anchors_N: Ints) -> torch.Tensor:
        """What policies read of the blocks at these rows, in place of hidden states: [N, B, 1] fp32, as the heads gave it."""
        return self.heads_AB[torch.from_numpy(anchors_N)][..., None]

    def committed(self, anchors_N: Ints, ends_N: Ints, lengths_N: Ints) -> Ints:
        """Tokens that rounds at these rows commit with so many slots verified: min(accepted, length - 1) + 1 inside the text."""
        return np.minimum(np.minimum(self.accepted_A[anchors_N], lengths_N - 1) + 1, ends_N - anchors_N)

    @classmethod
    def of(cls, traces: Sequence[BlockTrace], block_size: int) -> Requests:
        """Every response with a round in it.

        Raises:
            UserError: when there is none, or only some texts have a head's answers.
        """
        spans = [(index, *span) for index, trace in enumerate(traces) for span in trace.spans]
        if not spans:
            raise UserError("no traced text has a round")
        rows = [[traces[i].row_of[p] for p in range(first, last)] for i, first, last in spans]
        counts_Q = np.asarray([len(r) for r in rows])
        ends_Q = np.cumsum(counts_Q)
        heads_AB = torch.zeros(int(ends_Q[-1]), block_size)
        ratios = [traces[i].ratio_A for i, *_ in spans]
        survivals = [traces[i].survival_AD for i, *_ in spans]
        for name, found in (("length head", ratios), ("acceptance head", survivals)):
            if len({part is None for part in found}) > 1:
                raise UserError(f"some traced texts have answers of the {name} and others none")
        for end, own, ratio_A, survival_AD in zip(ends_Q, rows, ratios, survivals, strict=True):
            place = slice(end - len(own), end)
            if ratio_A is not None:
                heads_AB[place, 0] = torch.from_numpy(ratio_A[own]).float()
            if survival_AD is not None:
                heads_AB[place, 1:] = torch.from_numpy(survival_AD[own]).float()
        return cls(
            block_size=block_size,
            first_Q=ends_Q - counts_Q,
            end_Q=ends_Q,
            prompt_Q=np.asarray([first for _, first, _ in spans]),
            document_Q=np.asarray([i for i, *_ in spans]),
            accepted_A=np.concatenate(
                [traces[i].accepted_A[own] for (i, *_), own in zip(spans, rows, strict=True)]
            ).astype(np.int64),
            heads_AB=heads_AB,
            length_head=None if ratios[0] is None else TracedLengthHead(),
            acceptance_head=None if survivals[0] is None else TracedAcceptanceHead(block_size),
        )

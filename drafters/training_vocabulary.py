"""The part of the vocabulary that a training loss sees.

On a small corpus most head rows never matter, yet the head is most of a step's cost. Loss and teacher are then normalised over
the kept tokens alone. Serving drafts over the whole vocabulary as ever, so validation shows what the omission costs.

Shapes: V vocabulary, U kept tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from drafters.packing import Document


@dataclass(frozen=True)
class TrainingVocabulary:
    """`ids_U` kept tokens in ascending order; `index_V` the place of each token among them, -1 for those left out."""

    ids_U: torch.Tensor
    index_V: torch.Tensor

    @classmethod
    def of(cls, documents: Iterable[Document], vocab_size: int, size: int) -> TrainingVocabulary:
        """The tokens of the documents, filled up to `size` with the tokenizer's first ones.

        Tokenizers number their merges by frequency, so the first tokens are the common ones. More than `size` distinct
        tokens in the documents are all kept.
        """
        seen = {token for document in documents for token in document.token_ids}
        for token in range(vocab_size):
            if len(seen) >= size:
                break
            seen.add(token)
        ids_U = torch.tensor(sorted(seen))
        index_V = torch.full((vocab_size,), -1)
        index_V[ids_U] = torch.arange(ids_U.numel())
        return cls(ids_U, index_V)

    def head(self, head_VH: torch.Tensor) -> torch.Tensor:
        """Head rows of the kept tokens, [U, H]."""
        return head_VH[self.ids_U.to(head_VH.device)].contiguous()

    def index(self, tokens: torch.Tensor) -> torch.Tensor:
        """Places of tokens, any shape."""
        return self.index_V.to(tokens.device)[tokens]

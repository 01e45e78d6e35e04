"""The target's output of each document, computed once and kept: epochs after the first skip the target's forward.

A document is always run alone, whatever row it is packed into, so what is returned does not depend on the order of documents and
a resumed run computes bit for bit what the uninterrupted one had kept.

Shapes: T flat tokens, H hidden, C feature width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from drafters.packing import PackedBatch
from drafters.target import Target, TargetOutput
from drafters.teacher import TeacherMoments


class FeatureCache:
    """Outputs per document, up to a limit of memory.

    Documents are told apart by their tokens and response masks. When the memory is used up, further documents are
    computed at every visit; nothing is evicted.

    Args:
        target: the frozen target.
        max_bytes: most memory to hold.
        moments: makes the teacher's moments from final hidden states, to be kept beside them for the positions that
            predict a response token; None keeps none.
    """

    def __init__(
        self,
        target: Target,
        max_bytes: int,
        *,
        moments: Callable[[torch.Tensor], TeacherMoments] | None = None,
    ) -> None:
        self.target = target
        self.max_bytes = max_bytes
        self.moments = moments
        self.used_bytes = 0
        self._outputs: dict[bytes, TargetOutput] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._outputs.clear()
        self.used_bytes = 0

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """The target's output over the batch's tokens, as `Target.forward_packed` lays it out."""
        outputs: list[TargetOutput] = []
        start = 0
        for length in batch.document_lengths():
            rows = slice(start, start + length)
            outputs.append(self._document(batch.input_ids_T[rows], batch.response_mask_T[rows]))
            start += length
        return TargetOutput.cat(outputs)

    def _document(self, input_ids_T: torch.Tensor, response_mask_T: torch.Tensor) -> TargetOutput:
        key = input_ids_T.cpu().numpy().tobytes() + response_mask_T.cpu().numpy().tobytes()
        known = self._outputs.get(key)
        if known is not None:
            return known
        positions_T = torch.arange(input_ids_T.numel(), device=input_ids_T.device)
        output = self.target.forward_packed(input_ids_T, positions_T)
        if self.moments is not None:
            # also for a document that will not be kept: what a loss is made of must not depend on what else was kept
            predicting_T = response_mask_T.roll(-1)
            predicting_T[-1] = False
            moments = self.moments(output.hidden_TH[predicting_T]).spread(predicting_T)
            output = replace(output, moments=moments)
        if self.used_bytes + output.nbytes <= self.max_bytes:
            self._outputs[key] = output
            self.used_bytes += output.nbytes
        return output

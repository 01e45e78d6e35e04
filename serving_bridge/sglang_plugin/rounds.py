"""What a verification round leaves behind on the device, on its way to the host without a wait.

The copy is ordered behind the round's own work. The scheduler waits for that work before it reads the round's result, so
by then the copy is done as well and reading it costs no further synchronisation.

Shapes: R requests, B block size, K best tokens of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class RoundCapture:
    """One round of a batch.

    candidates_RB: anchor and drafts, int.
    verify_lens: per request; None when whole blocks were verified.
    top_ids_RBK, top_logprobs_RBK: the target's best tokens, if asked for.
    """

    drafter_version: str
    candidates_RB: torch.Tensor
    verify_lens: list[int] | None
    top_ids_RBK: torch.Tensor | None = None
    top_logprobs_RBK: torch.Tensor | None = None

    def draft_ids(self, request: int) -> list[int]:
        """All B-1 drafts."""
        return self._candidates[request][1:]

    @cached_property
    def _candidates(self) -> list[list[int]]:
        # once for the whole batch: a tensor row costs more to slice than to read
        rows: list[list[int]] = self.candidates_RB.tolist()
        return rows

    def verify_len(self, request: int) -> int:
        if self.verify_lens is None:
            return int(self.candidates_RB.shape[1])
        return self.verify_lens[request]

    def target_top_k(self, request: int) -> list[list[tuple[int, float]]] | None:
        """Per verified slot; a log-probability of -inf, which JSON cannot hold, leaves its token out."""
        if self.top_ids_RBK is None or self.top_logprobs_RBK is None:
            return None
        slots = self.verify_len(request)
        ids = self.top_ids_RBK[request, :slots].tolist()
        logprobs = self.top_logprobs_RBK[request, :slots].tolist()
        return [
            [(i, p) for i, p in zip(row_ids, row_logprobs, strict=True) if p > -float("inf")]
            for row_ids, row_logprobs in zip(ids, logprobs, strict=True)
        ]


def capture(
    *,
    drafter_version: str,
    candidates_RB: torch.Tensor,
    verify_lens: list[int] | None,
    logits: torch.Tensor | None,
    top_k: int,
) -> RoundCapture:
    """Start the copies. `logits` [R*B, V] may be None where the engine gathers only the best token across ranks."""
    top_ids = top_logprobs = None
    if top_k and logits is not None:
        requests, block = candidates_RB.shape
        top = logits.float().log_softmax(-1).topk(min(top_k, logits.shape[-1]), -1)
        top_ids = to_host(top.indices.view(requests, block, -1))
        top_logprobs = to_host(top.values.view(requests, block, -1))
    return RoundCapture(drafter_version, to_host(candidates_RB), verify_lens, top_ids, top_logprobs)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory: the engine reuses its buffers in the next round."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    # only a copy into pinned memory returns before it is done; torch keeps and reuses such blocks
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)

"""Compact verification: only the slots that are verified go through the target.

Shapes: R requests, B block size, P = Σ verify_len packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def packed_rows(verify_lens: Sequence[int], block_size: int) -> list[int]:
    """Rows of the dense [R, B] layout that are verified: the first `verify_len` slots of each block."""
    for length in verify_lens:
        if not 1 <= length <= block_size:
            raise ValueError(f"verify_len {length} is outside [1, {block_size}]")
    return [
        request * block_size + slot for request, length in enumerate(verify_lens) for slot in range(length)
    ]


def scatter_rows(packed_PX: torch.Tensor, rows_P: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Packed rows at their places in the dense layout, zeros between. `packed_PX` may have padding at its end."""
    dense = packed_PX.new_zeros((num_rows, packed_PX.shape[-1]))
    dense[rows_P] = packed_PX[: rows_P.numel()]
    return dense


def cap_candidates(candidates_RB: torch.Tensor, verify_lens: Sequence[int]) -> torch.Tensor:
    """Candidates of which none beyond `verify_len` can be accepted: those slots hold an id that no token has.

    Only for greedy verification, which compares ids; one that looks up probabilities would index with it.
    """
    slots_B = torch.arange(candidates_RB.shape[1], device=candidates_RB.device)
    lens_R = torch.tensor(list(verify_lens), device=candidates_RB.device)
    return candidates_RB.masked_fill(slots_B >= lens_R[:, None], -1)

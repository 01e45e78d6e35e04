"""The functions that SGLang imports from its kernel package when it runs on a CPU, in plain torch.

Request i owns the row `req_pool_indices[i]` of `req_to_token`, which maps its positions to cache slots. Names that are
imported but not needed for DFLASH raise when called. Only names ending in `_cpu` exist: SGLang takes the presence of others
for the presence of a GPU kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__version__ = "0+draftsmith.cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Note the slots in `out_cache_loc`, in order, as those of positions start..end-1 of each request."""
    taken = 0
    for row, first, last in _spans(req_pool_indices, start, end):
        slots = out_cache_loc[taken : taken + last - first]
        req_to_token[row, first:last] = slots.to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The other way: write the slots of positions start..end-1 of each request to `out_cache_loc`."""
    spans = [req_to_token[row, first:last] for row, first, last in _spans(req_pool_indices, start, end)]
    slots = torch.cat(spans)
    out_cache_loc[: slots.numel()] = slots.to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """In every layer's buffer, copy the slots `src_loc` to `tgt_loc`; a slot is `strides` bytes at an address.

    All sources are read before anything is written, as the two may overlap.
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + source * size, size) for source in sources]
        for target, slot in zip(targets, slots, strict=True):
            ctypes.memmove(base + target * size, slot, size)


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name}: not available in draftsmith's CPU stand-in for sgl_kernel")

    return missing


def _spans(rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> zip[tuple[int, int, int]]:
    return zip(rows.tolist(), start.tolist(), end.tolist(), strict=False)

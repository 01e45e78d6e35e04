"""Losses of a batch that several processes share.

Each process has slots of its own, and how many (and with what weights) differs. A mean of the processes' means would favour the
slots of short batches; what is wanted is the mean that one process has over the same documents.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def over_all_ranks(*means: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Weighted means over this process's slots as means over the slots of all, Σ_r S_r / Σ_r W_r.

    Args:
        means: pairs of a mean S/W, scalar with a graph, and the sum of its weights W, scalar.

    Returns:
        For each pair a scalar with the same value in all processes, so that they judge it alike (a NaN anywhere is one
        everywhere). Its gradient is that of this process's share S_r / Σ W times the number of processes: averaged over
        processes, as DDP and FSDP do, it is the gradient of the value. One process gets its means back as they are.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return [mean for mean, _ in means]
    weights = torch.stack([weight.detach().double() for _, weight in means])
    sums = torch.stack([mean.detach().double() for mean, _ in means]) * weights
    totals = torch.stack([sums, weights])
    dist.all_reduce(totals)
    total_weights = totals[1].clamp_min(torch.finfo(torch.float64).tiny)
    shares = weights * dist.get_world_size() / total_weights
    shared = []
    for (mean, _), share, total in zip(means, shares, totals[0] / total_weights, strict=True):
        own = mean * share.to(mean.dtype)
        shared.append(total.to(mean.dtype) + (own - own.detach()))
    return shared

"""The length head: how much of a drafted block is worth verifying (AdaFlash §3.2).

Shapes: N blocks, B block size, H hidden size.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

LengthFeatures = Literal["hidden", "embedding"]


class LengthHead(nn.Module):
    """Predicts â in (0, 1), the share of a block that the target will commit.

    features [N, B, H] → Linear(H→width) + SiLU → mean over the B slots → Linear → sigmoid. `features` says whether the
    head reads the drafter's final hidden states (`hidden`) or its input (`embedding`); the paper's text says the latter,
    its code does the former. Inputs are detached: its loss never reaches the drafter.
    """

    def __init__(self, hidden_size: int, width: int = 128, features: LengthFeatures = "hidden") -> None:
        super().__init__()
        self.features: LengthFeatures = features
        self.proj = nn.Linear(hidden_size, width)
        self.out = nn.Linear(width, 1)

    def logits(self, features_NBH: torch.Tensor) -> torch.Tensor:
        """Pre-sigmoid scores [N]."""
        x = features_NBH.detach().to(self.proj.weight.dtype)
        return self.out(F.silu(self.proj(x)).mean(dim=1)).squeeze(-1)

    def forward(self, features_NBH: torch.Tensor) -> torch.Tensor:
        """â of each block, [N], fp32."""
        return torch.sigmoid(self.logits(features_NBH).float())


def length_targets(accepted_N: torch.Tensor, block_size: int) -> torch.Tensor:
    """a* = (1 + longest drafted prefix that matches the served continuation) / B, [N] fp32.

    `accepted_N` must come from the *full* block (all B-1 drafts), never from truncated verification: a label censored at
    verify_len, learned with a floor, walks down to 1 and stays there.
    """
    return (accepted_N.float() + 1.0) / block_size


def length_loss(
    predicted_N: torch.Tensor, accepted_N: torch.Tensor, complete_N: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Mean squared error over blocks whose acceptance is known in full.

    `complete_N` is False where the text ends (EOS, length cap) before the first mismatch, so that the label is only a
    lower bound. Returns 0 (with a graph) when no block is complete.
    """
    error_N = (predicted_N - length_targets(accepted_N, block_size)).square()
    kept_N = complete_N.to(error_N.dtype)
    return (error_N * kept_N).sum() / kept_N.sum().clamp_min(1.0)


def verify_len_from(ratio_N: torch.Tensor, gamma: float, block_size: int) -> torch.Tensor:
    """clamp(⌊â·γ·B⌋, 1, B), int64 [N]; counts the anchor."""
    # float64 and a hair of slack, so that â = v/B gives v and not v-1 by rounding
    scaled = ratio_N.double() * gamma * block_size
    return torch.floor(scaled + 1e-6).long().clamp(1, block_size)

"""Verification: which drafted tokens to commit, and the target's own token after them.

Greedy: the longest prefix equal to the target's argmax, then its argmax. Sampling: accept d_j with probability
min(1, p/q), else resample from the normalised residual (p-q)⁺; a draft chosen by argmax is q = one-hot, whose acceptance
probability is p(d_j). Temperature, top-k and top-p are applied to both sides before, so the output follows the warped
target distribution exactly.

Shapes: L = verify_len (anchor counted, so L-1 drafts), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafters.errors import UserError

MIN_TEMPERATURE = 1e-3
"""Logits divided by less overflow, and nothing above zero is as cold."""


@dataclass(frozen=True)
class SamplingParams:
    """Decoding parameters; temperature 0 is greedy. `top_k` 0 and `top_p` 1 switch them off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UserError(
                f"sampling: temperature {self.temperature} and top_k {self.top_k} must not be negative "
                f"and top_p {self.top_p} must lie in (0, 1]"
            )
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise UserError(f"sampling: temperature {self.temperature} is too small; 0 is greedy")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Verification:
    """`accepted` drafts (0..L-1), then `next_token` from the target; committed tokens = accepted + 1."""

    accepted: int
    next_token: int


def warp(logits_LV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Probabilities [L, V] after temperature, top-k and top-p, fp32 (fp64 stays fp64).

    Top-k keeps every entry tied with the k-th, so the set does not depend on sort order. Top-p keeps the smallest set of
    most likely entries whose mass reaches top_p, at least one. -inf logits get probability 0.
    """
    dtype = torch.float64 if logits_LV.dtype == torch.float64 else torch.float32
    scores = logits_LV.to(dtype) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    probs = scores.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.masked_fill(before >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, kept)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def verify_greedy(drafts: torch.Tensor, logits_LV: torch.Tensor) -> Verification:
    """Greedy verification.

    Args:
        drafts: int64 [L-1], drafted tokens of slots 1..L-1.
        logits_LV: target logits after the anchor and after each draft.
    """
    choice_L = logits_LV.max(dim=-1).indices
    accepted = int((drafts == choice_L[:-1]).long().cumprod(dim=0).sum())
    return Verification(accepted, int(choice_L[accepted]))


def residual(p_V: torch.Tensor, q_V: torch.Tensor) -> torch.Tensor:
    """Normalised (p-q)⁺; p itself when nothing remains (p = q up to rounding, where rejection has probability 0)."""
    rest = (p_V - q_V).clamp_min(0)
    total = rest.sum()
    return rest / total if total > 0 else p_V


def _draw(probs_V: torch.Tensor, generator: torch.Generator | None) -> int:
    # on the CPU, where the request's seeded generator lives
    return int(torch.multinomial(probs_V.cpu(), 1, generator=generator))


def verify_sampling(
    drafts: torch.Tensor,
    p_LV: torch.Tensor,
    q_LV: torch.Tensor | None,
    generator: torch.Generator | None = None,
) -> Verification:
    """Speculative sampling (Leviathan et al., 2023).

    Args:
        drafts: int64 [L-1].
        p_LV: warped target probabilities, row j for the token after slot j.
        q_LV: warped drafter probabilities the drafts were drawn from, row j for draft j+1 (its last row is
            not read); None when drafts were chosen by argmax (q = one-hot).
        generator: source of randomness.
    """
    for j, token in enumerate(drafts.tolist()):
        p = float(p_LV[j, token])
        q = 1.0 if q_LV is None else float(q_LV[j, token])
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
        if uniform * q < p:
            continue
        if q_LV is None:
            rest_V = p_LV[j].clone()
            rest_V[token] = 0
            rest_V = rest_V / rest_V.sum()
        else:
            rest_V = residual(p_LV[j], q_LV[j])
        return Verification(j, _draw(rest_V, generator))
    last_V = p_LV[len(drafts)]
    return Verification(len(drafts), _draw(last_V, generator))

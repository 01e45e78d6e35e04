"""What a drafter is trained on: the choice of loss, slot weights, and distillation in closed form.

q is the drafter's distribution at a slot, p the target's on the served prefix. All objectives are functions of the slot's
logits z with q = softmax(z); for a sum Σ_y f(q_y) the gradient is ∂/∂z_y = q_y (f'(q_y) - Σ_u q_u f'(q_u)), so no autograd
graph over the vocabulary is needed.

AdaFlash's loss is α·ℓ_hard + (1-α)·ℓ_rkl with ℓ_rkl = KL(q‖p) clipped. `clip` says how:

- `entry`: the paper, Σ_y min{q log(q/p), δ}. Terms with q<p are negative and never clipped, so this is no divergence: it can be
  negative, and alone it *lowers* the logit of a token whose excess terms are clipped away. Safe only beside the hard term.
- `position`: min{KL, δ} per slot; no gradient wherever KL > δ.
- `position_normalised`: Z·min{KL/Z, δ} with Z = Σ weights of the batch; nearly inert, kept for comparison.
- `bounded`: b = q log(q/p) - q + p ≥ 0, zero only at q = p; clipped at δ only where q > p.
- `none`: plain KL(q‖p).

Shapes: R slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from drafters.errors import UserError

Objective = Literal["ce", "opd", "osd"]
ClipMode = Literal["entry", "position", "position_normalised", "bounded", "none"]
Weighting = Literal["exponential", "uniform", "survival"]


@dataclass(frozen=True)
class LossSpec:
    """Which loss, and how slots are weighted.

    Attributes:
        objective: `ce` hard cross-entropy; `opd` AdaFlash's mixture; `osd` forward KL(p‖q) on the same stream.
        alpha: share of the hard term in `opd`.
        delta: clipping threshold δ, nats.
        clip: see the module docstring.
        temperature: T of the reverse KL; the term is scaled by T² so that gradients keep their size.
        weighting: `exponential` w_j = exp(-(j-1)/decay) (D3D eq. 5); `uniform` (AdaFlash's mean); `survival`
            w_j = Σ_{k≥j} Π_{i≤k} a_i with a_i the drafter's detached probability of the label, smoothed to
            (1-ε)a+ε: with CE and ε=0 exactly the gradient of minus the expected accepted length under sampled drafts.
        decay: γ_w in slots; None means block_size / 2.
        survival_floor: ε of `survival`.
    """

    objective: Objective = "ce"
    alpha: float = 0.8
    delta: float = 0.01
    clip: ClipMode = "bounded"
    temperature: float = 1.0
    weighting: Weighting = "exponential"
    decay: float | None = None
    survival_floor: float = 0.3

    def __post_init__(self) -> None:
        if self.clip == "position_normalised" and self.weighting == "survival":
            raise UserError("loss.clip: position_normalised needs weights known beforehand, not survival")

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's logits enter the loss itself."""
        return self.objective != "ce"


def fixed_weights(spec: LossSpec, block_size: int, device: torch.device | None = None) -> torch.Tensor:
    """w_j for j = 0..B-1, fp32; slot 0 has weight 0. Ones for `survival`, whose weights depend on the drafter."""
    slots = torch.arange(block_size, device=device, dtype=torch.float32)
    weights = torch.ones_like(slots)
    if spec.weighting == "exponential":
        weights = torch.exp(-(slots - 1) / (spec.decay or block_size / 2))
    weights[0] = 0.0
    return weights


def survival_weights(log_a_NB: torch.Tensor, valid_NB: torch.Tensor, floor: float) -> torch.Tensor:
    """w_j = Σ_{k≥j} Π_{i≤k} ã_i over the valid slots of each block, ã = (1-floor)·a + floor.

    Args:
        log_a_NB: drafter log-probability of the label at each slot; ignored where invalid.
        valid_NB: bool; valid slots are 1..m for some m.
    """
    smoothed = (1 - floor) * log_a_NB.exp() + floor
    survive = torch.where(valid_NB, smoothed, torch.ones_like(smoothed)).cumprod(dim=1) * valid_NB
    return survive.flip(1).cumsum(dim=1).flip(1) * valid_NB


TILE = 128
"""Entries of a row that `entries_above` looks through together."""


def entries_above(values_RV: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the values above the limit, in no particular order.

    Made for few of them: maxima of tiles are several times faster to compute than a mask with its indices.
    """
    whole = values_RV.shape[1] // TILE * TILE
    tiles_RUT = values_RV[:, :whole].unflatten(1, (whole // TILE, TILE))
    rows, tiles = (tiles_RUT.amax(dim=-1) > limit).nonzero(as_tuple=True)
    found, inside = (tiles_RUT[rows, tiles] > limit).nonzero(as_tuple=True)
    rest_rows, rest = (values_RV[:, whole:] > limit).nonzero(as_tuple=True)
    return torch.cat([rows[found], rest_rows]), torch.cat([tiles[found] * TILE + inside, whole + rest])


def clip_reverse_kl(
    terms_RV: torch.Tensor, q_RV: torch.Tensor, clip: ClipMode, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped KL(q‖p) per slot [R], and the constant c [R] that makes `terms_RV` - c·q its gradient.

    `terms_RV` = q log(q/p) becomes q·f'(q), up to a multiple of q per slot, which c takes away again. Only terms above the limit
    can be clipped, and they are few, because q sums to 1: they are picked out, and the rest is the plain KL.

    `limit` is δ, or δ·Z for `position_normalised`.
    """
    # a sum of b over the vocabulary is the KL itself: the sums of p and q are both 1
    kl_R = terms_RV.sum(dim=-1)
    if clip == "none":
        return kl_R, kl_R
    if clip in ("position", "position_normalised"):
        below_R = kl_R < limit
        terms_RV.mul_(below_R[:, None])
        return kl_R.clamp_max(limit), kl_R * below_R
    slots, entries = entries_above(terms_RV, limit)
    term, q = terms_RV[slots, entries], q_RV[slots, entries]
    if clip == "entry":
        terms_RV[slots, entries] = -q
        return kl_R.index_add(0, slots, limit - term), kl_R.index_add(0, slots, -term - q)
    gap = term - q + q * torch.exp(-term / q)
    clipped = gap > limit
    terms_RV[slots, entries] = term.masked_fill(clipped, 0.0)
    loss_R = kl_R.index_add(0, slots, (limit - gap) * clipped)
    return loss_R.clamp_min_(0), kl_R.index_add(0, slots, -term * clipped)


def softmax_and_normaliser(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax [R, V] and log Σ exp [R] of fp32 or fp64 logits, the latter through the top token, which cannot underflow."""
    q_RV = logits_RV.softmax(dim=-1)
    return q_RV, logits_RV.amax(dim=-1) - q_RV.amax(dim=-1).log()


def distillation_losses(
    logits_RV: torch.Tensor,
    teacher_RV: torch.Tensor,
    teacher_normaliser_R: torch.Tensor,
    labels_R: torch.Tensor,
    hard_R: torch.Tensor,
    spec: LossSpec,
    weight_sum: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`opd`: loss of each slot, its gradient with respect to the logits, and log q(label).

    Buffers of size [R, V] are reused where possible: this is the hot loop of distillation.

    Args:
        logits_RV: drafter logits, fp32 or fp64; overwritten.
        teacher_RV: the target's logits on the served prefix, before the temperature, likewise; overwritten.
        teacher_normaliser_R: their log Σ exp(logit / temperature).
        labels_R: the target's greedy token.
        hard_R: bool, False drops the hard label of a slot (sampled text, past the first token that differs from the
            target's argmax).
        spec: the objective.
        weight_sum: Z for `position_normalised`.

    Returns:
        loss [R], gradient [R, V], log q(label) [R] (for `survival` weights).
    """
    T, soft = spec.temperature, 1 - spec.alpha
    rows = torch.arange(labels_R.numel(), device=labels_R.device)
    q_RV, normaliser_R = softmax_and_normaliser(logits_RV)
    log_label_R = logits_RV[rows, labels_R] - normaliser_R
    hard_R = spec.alpha * hard_R.to(q_RV.dtype)
    q_T_RV = q_RV
    if T != 1:
        teacher_RV.div_(T)
        q_T_RV, normaliser_R = softmax_and_normaliser(logits_RV.div_(T))
    ratio_RV = logits_RV.sub_(teacher_RV).add_((teacher_normaliser_R - normaliser_R)[:, None])
    # p = 0 gives +inf, q = p = 0 gives nan: keep q·log(q/p) finite
    ratio_RV.nan_to_num_(nan=0.0, posinf=1e4, neginf=-1e4)
    grad_RV = ratio_RV.mul_(q_T_RV)
    limit = spec.delta * (weight_sum if spec.clip == "position_normalised" else 1.0)
    kl_R, inner_R = clip_reverse_kl(grad_RV, q_T_RV, spec.clip, limit)
    loss_R = soft * T * T * kl_R - log_label_R * hard_R
    grad_RV.mul_(soft * T)
    if T == 1:
        grad_RV.addcmul_(q_RV, (hard_R - soft * inner_R)[:, None])
    else:
        grad_RV.addcmul_(q_T_RV, (-soft * T * inner_R)[:, None]).addcmul_(q_RV, hard_R[:, None])
    grad_RV[rows, labels_R] -= hard_R
    return loss_R, grad_RV, log_label_R


def forward_kl_losses(
    logits_RV: torch.Tensor, teacher_logp_RV: torch.Tensor, labels_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`osd` with the whole distribution of the teacher: KL(p‖q) of each slot, and its gradient q - p.

    Args:
        logits_RV: drafter logits, fp32 or fp64.
        teacher_logp_RV: the target's log-probabilities on the served prefix; overwritten.
        labels_R: the target's greedy token.

    Returns:
        loss [R], gradient with respect to the logits [R, V], log q(label) [R] (for `survival` weights).
    """
    logq_RV = logits_RV.log_softmax(dim=-1)
    log_label_R = logq_RV.gather(1, labels_R[:, None])[:, 0]
    p_RV = teacher_logp_RV.exp()
    # p = 0: the term is 0, not 0 times minus infinity
    loss_R = (teacher_logp_RV.sub_(logq_RV).nan_to_num_(neginf=0.0) * p_RV).sum(dim=-1)
    return loss_R, logq_RV.exp_().sub_(p_RV), log_label_R

"""Calibration of predicted probabilities: how far they are off, and Platt's two numbers that bring them back.

Shapes: R predictions, P parameters.
"""

from __future__ import annotations

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

MIN_EVENTS = 10
"""With fewer of either outcome the scale is left at 1: a slope fitted to a handful of events means nothing."""

_NEWTON_STEPS = 50


def platt_scaling(logits_R: torch.Tensor, outcomes_R: torch.Tensor) -> tuple[float, float]:
    """(scale, shift) that make sigmoid(scale·logit + shift) likeliest for the outcomes (Platt, 1999), by Newton's method.

    Outcomes are smoothed as Platt does, (n₊+1)/(n₊+2) and 1/(n₋+2), so that separable data gives finite numbers. The scale is
    kept positive: a calibration must not turn the ranking round. Returns (1, 0) without predictions; with fewer than
    `MIN_EVENTS` of either outcome only the shift is fitted.
    """
    x, y = logits_R.detach().double().cpu(), outcomes_R.detach().double().cpu()
    if x.numel() == 0:
        return 1.0, 0.0
    hits = float(y.sum())
    misses = x.numel() - hits
    smooth = torch.where(y > 0.5, (hits + 1) / (hits + 2), 1 / (misses + 2))
    ones = torch.ones_like(x)
    spread = float(x.std()) if x.numel() > 1 else 0.0
    if min(hits, misses) < MIN_EVENTS or spread == 0:
        (shift,) = _logistic_fit(ones[:, None], x, smooth)
        return 1.0, shift
    # scaled, so that a step is of the size of what it changes
    scale, shift = _logistic_fit(torch.stack([x / spread, ones], dim=1), torch.zeros_like(x), smooth)
    return max(scale / spread, 1e-3), shift


def _logistic_fit(design_RP: torch.Tensor, offset_R: torch.Tensor, smooth_R: torch.Tensor) -> list[float]:
    """Parameters [P] of sigmoid(offset + design·parameters), by Newton's method with step halving from zero."""

    def loss(at_P: torch.Tensor) -> float:
        return float(binary_cross_entropy_with_logits(offset_R + design_RP @ at_P, smooth_R))

    parameters = torch.zeros(design_RP.shape[1], dtype=torch.float64)
    ridge = 1e-9 * torch.eye(len(parameters), dtype=torch.float64)
    current = loss(parameters)
    for _ in range(_NEWTON_STEPS):
        p_R = torch.sigmoid(offset_R + design_RP @ parameters)
        gradient_P = design_RP.T @ (p_R - smooth_R) / len(p_R)
        hessian_PP = (design_RP.T * (p_R * (1 - p_R))) @ design_RP / len(p_R)
        step_P = torch.linalg.solve(hessian_PP + ridge, gradient_P)
        # the loss is convex, so some share of the step helps until the optimum is reached
        size = 1.0
        while size > 1e-9 and loss(parameters - size * step_P) >= current:
            size /= 2
        if size <= 1e-9:
            break
        parameters = parameters - size * step_P
        previous, current = current, loss(parameters)
        if previous - current < 1e-13:
            break
    return parameters.tolist()


def calibration_error(predicted_R: torch.Tensor, outcomes_R: torch.Tensor, bins: int = 10) -> float:
    """Expected calibration error: Σ share of bin · |mean prediction - mean outcome|, over bins of equally many predictions.

    Equal counts rather than equal widths: acceptance crowds near 0 and 1. nan without predictions.
    """
    if predicted_R.numel() == 0:
        return float("nan")
    order = predicted_R.argsort(stable=True)
    predicted, outcomes = predicted_R[order].double(), outcomes_R[order].double()
    pairs = zip(predicted.chunk(bins), outcomes.chunk(bins), strict=True)
    total = sum(len(p) * abs(float(p.mean()) - float(y.mean())) for p, y in pairs)
    return total / predicted.numel()

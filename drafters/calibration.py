"""Calibration of predicted probabilities: how far they are off, and Platt's two numbers that bring them back.

Shapes: R predictions.
"""

from __future__ import annotations

import torch

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
    columns = [x, torch.ones_like(x)] if min(hits, misses) >= MIN_EVENTS else [torch.ones_like(x)]
    design = torch.stack(columns, dim=1)
    offset = torch.zeros_like(x) if len(columns) == 2 else x
    parameters = torch.zeros(len(columns), dtype=torch.float64)
    if len(columns) == 2:
        parameters[0] = 1.0

    def loss(at: torch.Tensor) -> float:
        z = offset + design @ at
        return float(torch.nn.functional.binary_cross_entropy_with_logits(z, smooth))

    current = loss(parameters)
    for _ in range(_NEWTON_STEPS):
        p = torch.sigmoid(offset + design @ parameters)
        gradient = design.T @ (p - smooth) / x.numel()
        hessian = (design.T * (p * (1 - p))) @ design / x.numel()
        step = torch.linalg.solve(hessian + 1e-9 * torch.eye(len(columns), dtype=torch.float64), gradient)
        # halved until it helps: far from the optimum a whole Newton step may overshoot
        size = 1.0
        while size > 1e-6 and loss(parameters - size * step) > current:
            size /= 2
        parameters = parameters - size * step
        previous, current = current, loss(parameters)
        if previous - current < 1e-12:
            break
    if len(columns) == 1:
        return 1.0, float(parameters[0])
    return max(float(parameters[0]), 1e-3), float(parameters[1])


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

"""Platt scaling undoes a known miscalibration, and the error it is judged by sees one."""

from __future__ import annotations

import math

import pytest
import torch

from drafters.calibration import calibration_error, platt_scaling


def outcomes_of(logits: torch.Tensor, scale: float, shift: float, seed: int = 0) -> torch.Tensor:
    chance = torch.sigmoid(logits * scale + shift)
    return torch.rand(chance.shape, generator=torch.Generator().manual_seed(seed)) < chance


LOGITS = 2.0 * torch.randn(40_000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("scale", "shift"), [(0.4, -0.7), (1.0, 0.0), (2.5, 1.0)])
def test_a_known_miscalibration_is_recovered(scale: float, shift: float) -> None:
    outcomes = outcomes_of(LOGITS, scale, shift)
    found = platt_scaling(LOGITS, outcomes)
    assert found == pytest.approx((scale, shift), abs=0.08)
    fresh = outcomes_of(LOGITS, scale, shift, seed=2)
    after = calibration_error(torch.sigmoid(LOGITS * found[0] + found[1]), fresh)
    assert after < 0.01
    if scale != 1.0:
        assert calibration_error(torch.sigmoid(LOGITS), fresh) > 0.1


def test_the_fit_is_the_likeliest() -> None:
    outcomes = outcomes_of(LOGITS[:500], 0.5, 0.3)
    scale, shift = platt_scaling(LOGITS[:500], outcomes)
    hits, misses = int(outcomes.sum()), int((~outcomes).sum())
    smooth = torch.where(outcomes, (hits + 1) / (hits + 2), 1 / (misses + 2)).double()

    def loss(a: float, b: float) -> float:
        z = LOGITS[:500].double() * a + b
        return float(torch.nn.functional.binary_cross_entropy_with_logits(z, smooth))

    best = loss(scale, shift)
    for da, db in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)):
        assert loss(scale + da, shift + db) > best


def test_hard_cases_stay_finite() -> None:
    assert platt_scaling(torch.zeros(0), torch.zeros(0, dtype=torch.bool)) == (1.0, 0.0)
    # separable: the likeliest slope without smoothing is infinite
    scale, shift = platt_scaling(LOGITS[:200], LOGITS[:200] > 0)
    assert 1 < scale < 1e3 and math.isfinite(shift)
    # far too sure of itself, and confidently wrong: a ranking is never turned round
    scale, shift = platt_scaling(50 * LOGITS[:200], LOGITS[:200] < 0)
    assert 0 < scale < 0.1 and math.isfinite(shift)
    # a handful of misses give a level, not a slope
    few = torch.ones(500, dtype=torch.bool)
    few[:3] = False
    scale, shift = platt_scaling(torch.full((500,), -1.0), few)
    assert scale == 1.0
    assert torch.sigmoid(torch.tensor(shift - 1.0)).item() == pytest.approx(0.99, abs=0.01)


def test_calibration_error_by_hand() -> None:
    predicted = torch.tensor([0.1, 0.1, 0.8, 0.8])
    outcomes = torch.tensor([False, True, True, True])
    assert calibration_error(predicted, outcomes, bins=2) == pytest.approx(0.5 * 0.4 + 0.5 * 0.2)
    # over- and underestimates of one bin cancel, those of two do not
    assert calibration_error(predicted, outcomes, bins=1) == pytest.approx(0.3)
    assert math.isnan(calibration_error(predicted[:0], outcomes[:0]))
    assert calibration_error(predicted[:3], outcomes[:3]) == pytest.approx((0.1 + 0.9 + 0.2) / 3)

"""A sequential test of a mean's sign: look after every observation, at a stated rate of wrong verdicts all the same.

The boundary is the normal-mixture confidence sequence (Robbins 1970) with the estimated variance (asymptotic confidence
sequences, Waudby-Smith et al. 2021): the interval holds the mean at all times together with probability 1-α, so that
stopping when it leaves zero behind is no peeking. Being asymptotic it wants a few observations first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class SignTest:
    """Tells a mean above zero from one below.

    Attributes:
        error_rate: α, bound on the probability of ever giving a wrong verdict, on each side.
        first_look: observations before the first verdict; the boundary is tightest there.
    """

    error_rate: float
    first_look: int
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """One more observation."""
        self.values.append(value)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else 0.0

    def half_width(self) -> float:
        """Of the confidence sequence around the mean; infinite before the first look."""
        n = len(self.values)
        if n < max(2, self.first_look):
            return math.inf
        mean = self.mean
        deviation = math.sqrt(sum((v - mean) ** 2 for v in self.values) / (n - 1))
        log_term = -2 * math.log(self.error_rate)
        # the ρ² that makes the boundary tightest at the first look
        rho = (log_term + math.log(log_term) + 1) / max(2, self.first_look)
        spread = n * rho + 1
        return deviation / n * math.sqrt(spread / rho * math.log(spread / self.error_rate**2))

    def verdict(self) -> bool | None:
        """True for above zero, False for below, None for not yet known."""
        width = self.half_width()
        if math.isinf(width):
            return None
        if self.mean - width > 0:
            return True
        if self.mean + width < 0:
            return False
        return None

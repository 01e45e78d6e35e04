"""How many requests to run at once, estimated from how many ran (AdaFlash §3.3)."""

from __future__ import annotations

import math


class AdmissionEstimate:
    """N̂ ← (1-β)·N̂ + β·N over rounds, N being the requests of a round.

    The engine itself takes requests back to its queue when memory runs out. It would admit as many again at once, and
    take them back again; for `memory_rounds` rounds after that has happened, at most one more than N̂ may run.
    Without memory trouble nothing is held back, so that a burst is admitted whole.
    """

    def __init__(self, beta: float, memory_rounds: int = 64) -> None:
        if not 0 < beta < 1:
            raise ValueError(f"beta {beta} is outside (0, 1)")
        self.beta = beta
        self.memory_rounds = memory_rounds
        self.estimate = 0.0
        self.overflows = 0
        self._rounds_held = 0

    def observe(self, running: int) -> None:
        """A round of so many requests was processed."""
        self.estimate += self.beta * (running - self.estimate)
        self._rounds_held = max(0, self._rounds_held - 1)

    def overflow(self) -> None:
        """Requests had to be taken back."""
        self.overflows += 1
        self._rounds_held = self.memory_rounds

    def admissible(self, running: int, engine_limit: int) -> int:
        """Requests that may be admitted now, given how many run and what the engine would allow."""
        if not self._rounds_held:
            return engine_limit
        # one at least while nothing runs, or a low estimate would stop serving
        return max(0, min(engine_limit, max(1, math.ceil(self.estimate) + 1) - running))

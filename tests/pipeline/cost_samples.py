"""Costs of rounds for tests of what is simulated with them."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.simulation.costs import DraftWork, VerifyWork


@dataclass
class LinearCosts:
    """fixed + row·rows seconds of verification, `draft` seconds of drafting; keeps what it was asked."""

    fixed: float
    row: float
    draft: float
    drafted: list[DraftWork] = field(default_factory=list)
    verified: list[VerifyWork] = field(default_factory=list)

    def draft_s(self, work: DraftWork) -> float:
        self.drafted.append(work)
        return self.draft

    def verify_s(self, work: VerifyWork) -> float:
        self.verified.append(work)
        return self.fixed + self.row * work.rows

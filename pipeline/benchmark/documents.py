"""Answers summed over conversations, which are what the bootstrap resamples: rounds of one are not independent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pipeline.benchmark.answers import Answer
from pipeline.config import BenchmarkConfig


@dataclass(frozen=True)
class DocumentSums:
    """A conversation's turns added up; `seconds` is the sum of its latencies."""

    document_id: str
    domain: str
    language: str
    committed: int
    rounds: int
    tokens: int
    seconds: float

    @property
    def acceptance_length(self) -> float:
        return self.committed / self.rounds


@dataclass(frozen=True)
class Resampling:
    """How intervals are made: two-sided, at this confidence."""

    samples: int
    confidence: float
    seed: int

    @classmethod
    def of(cls, config: BenchmarkConfig, seed: int) -> Resampling:
        """As configured."""
        return cls(config.bootstrap_samples, config.confidence, seed)

    def options(self) -> dict[str, Any]:
        """For the bootstrap, whose bounds are one-sided each."""
        return {"samples": self.samples, "confidence": (1 + self.confidence) / 2, "seed": self.seed}


def document_sums(answers: Iterable[Answer]) -> list[DocumentSums]:
    """Turns summed over each conversation, in order."""
    found = []
    for document_id, group in groupby(answers, key=lambda answer: answer.document_id):
        turns = list(group)
        found.append(
            DocumentSums(
                document_id,
                turns[0].domain,
                turns[0].language,
                committed=sum(t.committed for t in turns),
                rounds=sum(t.rounds for t in turns),
                tokens=sum(len(t.output_ids) for t in turns),
                seconds=sum(t.seconds for t in turns),
            )
        )
    return found


def paired(a: Sequence[DocumentSums], b: Sequence[DocumentSums]) -> list[tuple[DocumentSums, DocumentSums]]:
    """Conversations of both sides by id, in a's order."""
    others = {d.document_id: d for d in b}
    return [(d, others[d.document_id]) for d in a if d.document_id in others]

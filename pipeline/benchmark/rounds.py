"""What single rounds tell of a cell: acceptance by slot, lengths, contexts, and how uneven drafting is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from pipeline.benchmark.answers import Answer, slot_counts, sums_by_context
from pipeline.benchmark.cells import Cell
from pipeline.benchmark.documents import DocumentSums, Resampling
from pipeline.bootstrap import bootstrap_ratio


def mean_verify_len(cell: Cell) -> float | None:
    """Slots that the target read in a round with drafts, the anchor included; None where nothing tells."""
    if cell.block_size == 1:
        return 1.0
    lengths = [length for answer in cell.answers for length in answer.verify_lens]
    if lengths:
        return float(np.mean(lengths))
    return None if cell.verified_share is None else cell.verified_share * cell.block_size


def positions(answers: Sequence[Answer], drafts: int) -> dict[str, Any] | None:
    """Acceptance of slots 1..B-1: given that the slot was verified after all before it were accepted; and over all rounds with
    drafts. A slot beyond verify_len counts as not accepted in the latter.
    """
    counts = [slot_counts(answer) for answer in answers]
    if not drafts or any(count is None for count in counts):
        return None
    known = [count for count in counts if count is not None]
    reached = np.sum([r for r, _ in known], axis=0)
    accepted = np.sum([a for _, a in known], axis=0)
    rounds = sum(
        sum(a.accepted_histogram) if a.accepted_histogram is not None else len(a.starts) for a in answers
    )
    return {
        "rounds": rounds,
        "reached": reached.tolist(),
        "accepted": accepted.tolist(),
        "conditional": [
            a / r if r else None for a, r in zip(accepted.tolist(), reached.tolist(), strict=True)
        ],
        "overall": [a / rounds if rounds else None for a in accepted.tolist()],
    }


def by_context(cell: Cell, bounds: Sequence[int], how: Resampling) -> list[dict[str, Any]]:
    """τ of the rounds that began in each bucket of context lengths; nothing where rounds are not known."""
    found = []
    lows = [0, *bounds]
    documents: dict[str, list[list[tuple[int, int]]]] = {}
    for answer in cell.answers:
        documents.setdefault(answer.document_id, []).append(sums_by_context(answer, bounds))
    for index, low in enumerate(lows):
        sums = [
            (sum(turn[index][0] for turn in turns), sum(turn[index][1] for turn in turns))
            for turns in documents.values()
        ]
        counted = [(committed, rounds) for committed, rounds in sums if rounds]
        if counted:
            tau = bootstrap_ratio([c for c, _ in counted], [r for _, r in counted], **how.options())
            high = bounds[index] if index < len(bounds) else None
            found.append(
                {
                    "from": low,
                    "below": high,
                    "conversations": len(counted),
                    "rounds": sum(r for _, r in counted),
                    "acceptance_length": asdict(tau),
                }
            )
    return found


def variance(
    documents: Sequence[DocumentSums], drafts: int, answers: Sequence[Answer]
) -> dict[str, Any] | None:
    """How uneven drafting is (AdaFlash Fig. 1 and 2): between domains, between conversations of one, between rounds.

    `between_domains` is the ratio of the highest to the lowest τ of a domain, as the paper quotes it, and the standard deviation
    of the domains' τ; `within_domains` has the quartiles of the conversations' acceptance rates; `rounds` the mean and
    standard deviation of accepted drafts.
    """
    counted = [d for d in documents if d.rounds]
    if not drafts or not counted:
        return None
    rates: dict[str, list[float]] = {}
    for document in counted:
        rates.setdefault(document.domain, []).append((document.acceptance_length - 1) / drafts)
    taus = {
        domain: sum(d.committed for d in counted if d.domain == domain)
        / sum(d.rounds for d in counted if d.domain == domain)
        for domain in sorted(rates)
    }
    accepted = [n for answer in answers for n in _accepted(answer)]
    return {
        "between_domains": {
            "highest_over_lowest": max(taus.values()) / min(taus.values()),
            "standard_deviation": float(np.std(list(taus.values()))),
        },
        "within_domains": {
            domain: {
                "conversations": len(rates[domain]),
                "standard_deviation": float(np.std(rates[domain])),
                **{f"p{p}": float(np.percentile(rates[domain], p)) for p in (25, 50, 75)},
            }
            for domain in sorted(rates)
        },
        "rounds": {"mean": float(np.mean(accepted)), "standard_deviation": float(np.std(accepted))}
        if accepted
        else None,
    }


def _accepted(answer: Answer) -> list[int]:
    if answer.accepted_histogram is None:
        return answer.accepted
    return [count for count, rounds in enumerate(answer.accepted_histogram) for _ in range(rounds)]


def prepared_rate(cell: Cell) -> float | None:
    """Share of rounds whose block was drafted ahead; None without any."""
    rounds = sum(len(answer.starts) for answer in cell.answers)
    prepared = sum(answer.prepared for answer in cell.answers)
    return prepared / rounds if prepared else None

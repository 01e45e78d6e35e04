"""Traces from the rounds that serving logged, without any model.

A record says what whole blocks would have brought where serving began a round, as all their drafts are logged. A policy that
begins its rounds elsewhere needs blocks that were never drafted. Those are estimated: a block that began inside a logged one,
behind i of its accepted drafts, is given the rest of them, a - i. So a policy that begins its rounds where serving did is judged
exactly, and another probably too low: a fresh block would see more text. Heads are not in records; replaying the texts through
the drafter (`pipeline.block_traces`) gives exact traces with heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.block_traces import BlockTrace
from serving_bridge.records import VerificationRecord


def trace_of_record(record: VerificationRecord) -> BlockTrace:
    """One greedy record's text.

    A stretch that no round covers (served plainly, or prefilled again) is left out: the text goes on behind it, as one response
    whose anchors are numbered without a gap. So contexts behind such a stretch are shorter than they were.
    """
    tokens = [*record.prompt_ids, *record.output_ids]
    end = len(tokens) - 1
    accepted: dict[int, int] = {}
    for this in record.rounds:
        matched = _matching(this.draft_ids, tokens[this.start + 1 :])
        step = min(matched + 1, end - this.start)
        for inside in range(step):
            # a later round is nearer to what would be drafted there
            accepted[this.start + inside] = matched - inside
    positions = sorted(accepted)
    first = positions[0] if positions else 0
    return BlockTrace(
        record.request_id,
        [(first, first + len(positions))] if positions else [],
        {first + row: row for row in range(len(positions))},
        np.asarray([accepted[p] for p in positions], dtype=np.int64),
        None,
        None,
        record.domain,
    )


def _matching(drafts: Sequence[int], text: Sequence[int]) -> int:
    """Leading drafts that are the text's next tokens."""
    count = 0
    for draft, token in zip(drafts, text, strict=False):
        if draft != token:
            break
        count += 1
    return count

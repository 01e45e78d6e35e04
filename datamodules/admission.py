"""Which verification records may become training or held-out documents. Training and surveys of a log ask the same."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable

from serving_bridge.records import VerificationRecord

CLOCK_SLACK_S = 300.0
"""By how much the clocks of servers may be ahead."""


class Admission:
    """The rules, with what they remember: ids seen so far and the time of the newest record that was admitted.

    Args:
        target_id: records of other targets are refused.
        max_length: tokens that a document may have.
        max_age_s: records this much older than the newest one are stale; None keeps all.
        seen: request ids that were admitted earlier.
        newest_time: of the records admitted earlier, unix seconds.
        clock: the present, unix seconds. A record from more than `CLOCK_SLACK_S` later does not make others stale.
    """

    def __init__(
        self,
        target_id: str,
        max_length: int,
        *,
        max_age_s: float | None = None,
        seen: Iterable[str] = (),
        newest_time: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._target_id = target_id
        self._max_length = max_length
        self._max_age_s = max_age_s
        self._seen = set(seen)
        self._clock = clock
        # an older release may have kept a time from the future
        self.newest_time = min(newest_time, clock() + CLOCK_SLACK_S)

    def refusal(self, record: VerificationRecord) -> str | None:
        """Why a record is refused, as the name of a counter; None admits it, and its id from then on no more."""
        if record.target_id != self._target_id:
            return "refused_other_target"
        if record.request_id in self._seen:
            return "refused_repeated"
        if self._max_age_s is not None and record.time < self.newest_time - self._max_age_s:
            return "refused_stale"
        # two response tokens inside the cap are the least that give a block
        if min(len(record.output_ids), self._max_length - len(record.prompt_ids)) < 2:
            return "refused_short"
        self.newest_time = max(self.newest_time, min(record.time, self._clock() + CLOCK_SLACK_S))
        self._seen.add(record.request_id)
        return None


def is_held_out(conversation_key: str, fraction: float) -> bool:
    """Whether a conversation belongs to the gate: a function of its key alone, so it never changes sides."""
    digest = hashlib.sha256(b"gate\x1f" + conversation_key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64

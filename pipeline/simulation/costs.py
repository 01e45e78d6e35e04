"""What a round costs: the interface, and the table that an engine has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from drafters.errors import UserError
from drafters.step_cost import StepCosts


@dataclass(frozen=True)
class DraftWork:
    """A drafting pass: a block for each of `requests`.

    `unread` tokens that the drafter has not read before, `keys` tokens of text before the anchors; both of all requests together.
    """

    requests: int
    unread: int
    keys: int


@dataclass(frozen=True)
class VerifyWork:
    """A pass of the target: `rows` tokens of `requests`, new prompts included.

    `head_rows` of them need logits. `keys` tokens are in caches, and `pairs` are queries × keys, both of all requests together.
    """

    requests: int
    rows: int
    head_rows: int
    keys: int
    pairs: int


class RoundCosts(Protocol):
    """Seconds of the two passes of a round, whatever else they take included."""

    def draft_s(self, work: DraftWork) -> float: ...

    def verify_s(self, work: VerifyWork) -> float: ...


class TableCosts:
    """A measured table. It knows rows and requests; contexts are those of the texts it was measured on.

    Raises:
        UserError: when the table lacks verification or drafting.
    """

    def __init__(self, table: StepCosts) -> None:
        if not table.known:
            raise UserError(
                "the cost table has too few rounds: it must hold drafting, and two numbers of rows"
            )
        self.table = table
        self._verify: dict[tuple[int, int], float] = {}
        self._draft: dict[int, float] = {}

    def draft_s(self, work: DraftWork) -> float:
        if work.requests not in self._draft:
            self._draft[work.requests] = self.table.draft_s(work.requests)
        return self._draft[work.requests]

    def verify_s(self, work: VerifyWork) -> float:
        key = work.rows, work.requests
        if key not in self._verify:
            self._verify[key] = float(self.table.verify_s([work.rows], work.requests)[0])
        return self._verify[key]

    def beyond(self, requests: int, rows: int) -> bool:
        """Whether a round of this size is larger than any that was measured, so that its cost is extrapolated."""
        return requests > self.table.most_requests or rows > 1.05 * self.table.most_rows

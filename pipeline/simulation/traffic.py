"""When requests come: clients that ask again once answered, or arrivals at random times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Traffic:
    """Who asks.

    Attributes:
        concurrency: requests that run together at most.
        rate: requests per second, at times of a Poisson process; what finds no place waits in order. None: as many clients as
            places, each of which asks again as soon as it has its answer.
        prompts: prompts are read in the rounds, as the embedded engine does; False: by others, at no cost here.
        seed: of the order of the texts and of the times of arrival.
    """

    concurrency: int
    rate: float | None = None
    prompts: bool = False
    seed: int = 0


class Arrivals:
    """Requests in the order in which they come: the texts in random order, over and over."""

    def __init__(self, traffic: Traffic, count: int) -> None:
        generator = np.random.default_rng(traffic.seed)
        self.traffic = traffic
        self._order = generator.permutation(count)
        self._taken = 0
        self._times = None if traffic.rate is None else _poisson(traffic.rate, generator)
        self._next = 0.0 if self._times is None else next(self._times)

    def take(self, now: float, places: int) -> list[tuple[int, float]]:
        """(request, time of arrival) of those that begin now, at most `places`."""
        found: list[tuple[int, float]] = []
        while len(found) < places and self._next <= now:
            arrived = now if self._times is None else self._next
            found.append((int(self._order[self._taken % len(self._order)]), arrived))
            self._taken += 1
            if self._times is not None:
                self._next = next(self._times)
        return found

    @property
    def next_s(self) -> float:
        """When the next one comes, or came; of clients, at once."""
        return self._next


def _poisson(rate: float, generator: np.random.Generator) -> Iterator[float]:
    time = 0.0
    while True:
        time += generator.exponential(1 / rate)
        yield time

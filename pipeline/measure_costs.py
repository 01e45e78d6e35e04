"""What rounds cost on this machine, at several numbers of requests and lengths."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch

from drafters.decoding import DecodingSession, ServingDrafter, decode_round
from drafters.fill import Drafter
from drafters.packing import Document
from drafters.policies import Load, RoundTiming
from drafters.step_cost import StepCosts
from drafters.verify import SamplingParams
from pipeline.models import TargetBundle

PLAIN_EVERY = 5


class _Measuring:
    """Random lengths, and plain rounds among them, into a cost table."""

    name = "measuring"

    def __init__(self, costs: StepCosts, seed: int) -> None:
        self.costs = costs
        self._rounds = 0
        self._random = random.Random(seed)

    def wants_draft(self, load: Load) -> bool:
        self._rounds += 1
        return self._rounds % PLAIN_EVERY != 0

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        # one length for all, so that every number of rows between N and N·B comes up
        length = self._random.randint(1, hidden_NBH.shape[1])
        return torch.full((len(hidden_NBH),), length, device=hidden_NBH.device)

    def observe(self, timing: RoundTiming) -> None:
        self.costs.observe_verify(timing.rows, timing.requests, timing.verify_s)
        if timing.draft_s is not None:
            self.costs.observe_draft(timing.requests, timing.draft_s)


def measure_costs(
    bundle: TargetBundle,
    drafter: Drafter,
    documents: Sequence[Document],
    loads: Sequence[int],
    *,
    rounds: int,
    max_new_tokens: int,
    seed: int = 0,
) -> StepCosts:
    """Decode prompts of the documents for so many rounds at each number of requests."""
    costs = StepCosts()
    serving = ServingDrafter(drafter, _Measuring(costs, seed), "measured")
    prompts = itertools.cycle([document.prompt_and_output()[0] for document in documents])
    for load in loads:
        sessions: list[DecodingSession] = []
        before = costs.observed
        while costs.observed - before < rounds:
            sessions = [session for session in sessions if not session.finished]
            while len(sessions) < load:
                sessions.append(
                    DecodingSession(
                        bundle.target,
                        next(prompts),
                        sampling=SamplingParams(),
                        max_new_tokens=max_new_tokens,
                    )
                )
            for error in decode_round(sessions, serving).values():
                raise error
    return costs

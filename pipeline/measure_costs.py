"""What rounds cost on this machine, at several numbers of requests and lengths."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch

from drafters.decoding import DecodingSession, ServingDrafter, decode_round
from drafters.errors import UserError
from drafters.fill import Drafter
from drafters.packing import Document
from drafters.policies import Load, RoundTiming
from drafters.step_cost import StepCosts
from drafters.verify import SamplingParams
from pipeline.models import TargetBundle

PLAIN_EVERY = 5

ATTEMPTS = 10
"""Rounds that may be decoded for each that is to be observed."""


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
        self.costs.observe(timing)


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
    """Decode prompts of the documents for so many rounds at each number of requests.

    Where new prompts leave few rounds without one, which alone are observed, fewer do.

    Raises:
        UserError: when no prompt leaves room for an answer, or hardly a round was without a new prompt.
    """
    costs = StepCosts()
    serving = ServingDrafter(drafter, _Measuring(costs, seed), "measured")
    limit = getattr(bundle.target.config, "max_position_embeddings", None)
    found = []
    for document in documents:
        prompt, _ = document.prompt_and_output()
        room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(prompt))
        if room > 0:
            found.append((prompt, room))
    if not found:
        raise UserError(f"no prompt leaves room for an answer in the target's context of {limit}")
    prompts = itertools.cycle(found)
    for load in loads:
        sessions: list[DecodingSession] = []
        before = costs.observed
        for _ in range(ATTEMPTS * rounds):
            sessions = [session for session in sessions if not session.finished]
            while len(sessions) < load:
                prompt, room = next(prompts)
                sessions.append(
                    DecodingSession(bundle.target, prompt, sampling=SamplingParams(), max_new_tokens=room)
                )
            for error in decode_round(sessions, serving).values():
                raise error
            if costs.observed - before == rounds:
                break
        if costs.observed == before or not costs.draft_s(load):
            raise UserError(
                f"{load} requests: nearly every round had a new prompt; "
                f"answers of {max_new_tokens} tokens are too short to measure"
            )
    return costs

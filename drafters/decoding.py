"""Speculative decoding of one request, round by round.

A session owns the target's KV cache, the committed tokens and the target's features of everything before the anchor. The
drafter is handed in at each step, so a new one can be swapped in between two rounds: the session notices that
its context keys and values were made by another drafter and rebuilds them from the raw features.

Shapes: S prompt tokens, B block size, L verify_len, H hidden, V vocabulary, C feature width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import DynamicCache

from drafters.dflash import ContextCache, DFlashDrafter
from drafters.errors import UserError
from drafters.policies import LengthPolicy, Load
from drafters.target import Target, TargetOutput
from drafters.verify import (
    SamplingParams,
    Verification,
    verify_greedy,
    verify_sampling,
    warp,
)

DraftSampling = Literal["argmax", "sample"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class ServingDrafter:
    """One drafter version as serving uses it: swapped as a whole."""

    drafter: DFlashDrafter
    policy: LengthPolicy
    drafter_version: str
    draft_sampling: DraftSampling = "argmax"


@dataclass(frozen=True)
class DecodedRound:
    """One verification round.

    `start` is the anchor's absolute position, `draft_ids` all B-1 drafts, also those beyond verify_len; `committed` counts
    tokens kept after cutting at EOS and the length limit.
    """

    start: int
    drafter_version: str
    verify_len: int
    accepted: int
    draft_ids: list[int]
    committed: int


class DecodingSession:
    """One request.

    Args:
        target: the frozen target.
        prompt_ids: prompt token ids, at least one.
        sampling: temperature 0 is greedy.
        max_new_tokens: at least one.
        eos_ids: tokens that end the text; kept as its last token.
    """

    def __init__(
        self,
        target: Target,
        prompt_ids: Sequence[int],
        *,
        sampling: SamplingParams,
        max_new_tokens: int,
        eos_ids: Sequence[int] = (),
    ) -> None:
        if not prompt_ids:
            raise UserError("prompt_ids: the prompt is empty")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {max_new_tokens} must be at least 1")
        limit = getattr(target.config, "max_position_embeddings", None)
        if limit is not None and len(prompt_ids) + max_new_tokens > limit:
            raise UserError(
                f"prompt of {len(prompt_ids)} tokens plus {max_new_tokens} new ones exceeds the "
                f"target's context of {limit}"
            )
        self.target = target
        self.prompt_length = len(prompt_ids)
        self.tokens = list(prompt_ids)
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.eos_ids = frozenset(eos_ids)
        self.rounds: list[DecodedRound] = []
        self.finish_reason: FinishReason | None = None
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._target_cache = DynamicCache(config=target.config)
        # raw target features in the pieces they came in; the first `_encoded` are in the drafter's context
        self._features: list[torch.Tensor] = []
        self._encoded = 0
        self._context = ContextCache()
        self._context_owner: DFlashDrafter | None = None

    @property
    def output_ids(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def prefill(self) -> None:
        """Read the prompt and commit the target's first token."""
        prompt = torch.tensor(self.tokens, device=self.target.device)
        output = self.target.forward_cached(prompt, 0, self._target_cache)
        self._features.append(output.features_TC)
        logits_1V = self.target.logits(output.hidden_TH[-1:])
        empty = prompt.new_zeros(0)
        self._commit([self._verify(empty, logits_1V, None).next_token])

    @torch.no_grad()
    def step(self, serving: ServingDrafter, load: Load | None = None) -> DecodedRound:
        """Draft a block, verify verify_len slots of it, commit."""
        start = len(self.tokens) - 1
        drafter = serving.drafter
        hidden_BH, embeddings_BH = self._draft_block(drafter, start)
        draft_logits = self.target.logits(hidden_BH[1:].to(self.target.dtype))
        if self.sampling.greedy or serving.draft_sampling == "argmax":
            drafts, q_LV = draft_logits.max(dim=-1).indices, None
        else:
            q_LV = warp(draft_logits, self.sampling)
            drafts = torch.multinomial(q_LV.cpu(), 1, generator=self._generator)[:, 0]
            drafts = drafts.to(draft_logits.device)
        verify_len = int(serving.policy.verify_len(hidden_BH[None], embeddings_BH[None], load or Load())[0])
        verified = drafts[: verify_len - 1]
        anchor = drafts.new_tensor([self.tokens[start]])
        output = self.target.forward_cached(torch.cat([anchor, verified]), start, self._target_cache)
        outcome = self._verify(verified, self.target.logits(output.hidden_TH), q_LV)
        self._keep(output, start, outcome.accepted + 1)
        new_tokens = [*verified[: outcome.accepted].tolist(), outcome.next_token]
        record = DecodedRound(
            start=start,
            drafter_version=serving.drafter_version,
            verify_len=verify_len,
            accepted=outcome.accepted,
            draft_ids=drafts.tolist(),
            committed=self._commit(new_tokens),
        )
        self.rounds.append(record)
        return record

    def run(self, serving: ServingDrafter) -> list[int]:
        """Decode to the end with one drafter; returns the output ids."""
        self.prefill()
        while not self.finished:
            self.step(serving)
        return self.output_ids

    def _draft_block(self, drafter: DFlashDrafter, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._context_owner is not drafter:
            self._context, self._context_owner, self._encoded = ContextCache(), drafter, 0
        if self._encoded < len(self._features):
            new = torch.cat(self._features[self._encoded :])
            positions = torch.arange(start - new.shape[0], start, device=new.device)
            self._context.append(drafter.context_key_values(new, positions))
            self._encoded = len(self._features)
        block = torch.full((drafter.block_size,), drafter.spec.mask_token_id)
        block[0] = self.tokens[start]
        embeddings_BH = self.target.embed(block.to(self.target.device))
        return drafter.draft(embeddings_BH, start, self._context), embeddings_BH

    def _verify(
        self, drafts: torch.Tensor, logits_LV: torch.Tensor, q_LV: torch.Tensor | None
    ) -> Verification:
        if self.sampling.greedy:
            return verify_greedy(drafts, logits_LV)
        return verify_sampling(drafts, warp(logits_LV, self.sampling), q_LV, self._generator)

    def _keep(self, output: TargetOutput, start: int, count: int) -> None:
        self._features.append(output.features_TC[:count])
        surplus = self._target_cache.get_seq_length() - (start + count)
        if surplus:
            self._target_cache.crop(-surplus)

    def _commit(self, new_tokens: list[int]) -> int:
        """Append tokens up to EOS or the limit; returns how many were kept."""
        for kept, token in enumerate(new_tokens, start=1):
            self.tokens.append(token)
            if token in self.eos_ids:
                self.finish_reason = "stop"
                return kept
            if len(self.tokens) - self.prompt_length >= self.max_new_tokens:
                self.finish_reason = "length"
                return kept
        return len(new_tokens)


def acceptance_length(sessions: Sequence[DecodingSession]) -> float:
    """τ of real decoding, Σ committed / Σ rounds; nan without a round."""
    rounds = sum(len(s.rounds) for s in sessions)
    return sum(r.committed for s in sessions for r in s.rounds) / rounds if rounds else float("nan")

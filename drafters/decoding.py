"""Speculative decoding, round by round, of one request or several together.

A session owns the target's KV cache, the committed tokens and the target's features of everything before the anchor. A round
of several sessions is one pass of the drafter over all their blocks and one of the target over all rows that are to be
verified, Σ verify_len of them; sessions that have not begun read their prompts in that same pass. The drafter is handed in at
each round, so a new one can be swapped in between two: a session notices that its context keys and values were
made by another drafter and rebuilds them from the raw features.

A D3D drafter may draft ahead while the target verifies (`Lookahead`): sessions whose verification ends as one of the prepared
blocks assumed go on with that block, the others draft.

A policy may find that drafting does not pay (`AdaptivePolicy`): the target then reads anchors alone, which is plain decoding. The
drafter reads what it missed when it drafts again.

Shapes: N sessions, S prompt tokens, B block size, D drafts of a block (B-1; B-2 in a block prepared for full acceptance), L
verify_len, H hidden, V vocabulary, C feature width.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import DynamicCache

from drafters.acceptance_head import draft_confidence
from drafters.branches import Branch
from drafters.d3d import AheadRows, D3DDrafter
from drafters.dflash import ContextCache, DFlashDrafter, KeyValue
from drafters.drafting import draft_blocks, embed_blocks
from drafters.errors import UserError
from drafters.fill import Drafter, draft_head
from drafters.lookahead import BlockUnderVerification, Lookahead, Preparation, Prepared
from drafters.policies import AdaptivePolicy, LengthPolicy, Load, RoundTiming, reads_confidence
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

    drafter: Drafter
    policy: LengthPolicy
    drafter_version: str
    draft_sampling: DraftSampling = "argmax"


@dataclass(frozen=True)
class DecodedRound:
    """One verification round.

    `start` is the anchor's absolute position, `draft_ids` all D drafts, also those beyond verify_len, and empty if the round did
    without drafting; `committed` counts tokens kept after cutting at EOS and the length limit; `prepared` says that the block was
    drafted ahead.
    """

    start: int
    drafter_version: str
    verify_len: int
    accepted: int
    draft_ids: list[int]
    committed: int
    prepared: bool = False


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
        outside = [token for token in prompt_ids if not 0 <= token < target.config.vocab_size]
        if outside:
            raise UserError(
                f"prompt_ids: {outside[0]} is no token of the target (vocabulary {target.config.vocab_size})"
            )
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
        # a D3D drafter's own cache of the first `_encoded` tokens
        self._draft_cache: DynamicCache | None = None
        # hidden states of the next block, if it was prepared; by `_context_owner`
        self._prepared: torch.Tensor | None = None
        self._context_owner: Drafter | None = None
        # the anchor that was last drafted at
        self._drafted_at = 0

    @property
    def output_ids(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def begun(self) -> bool:
        """Whether the prompt has been read."""
        return bool(self._features)

    def prefill(self) -> None:
        """Read the prompt and commit the target's first token."""
        prompt = torch.tensor(self.tokens, device=self.target.device)
        (output,) = self.target.forward_cached([prompt], [0], [self._target_cache])
        self._begin(output)

    def step(
        self, serving: ServingDrafter, load: Load | None = None, lookahead: Lookahead | None = None
    ) -> DecodedRound:
        """Draft a block, verify verify_len slots of it, commit."""
        for error in decode_round([self], serving, load, lookahead).values():
            raise error
        return self.rounds[-1]

    def run(self, serving: ServingDrafter, lookahead: Lookahead | None = None) -> list[int]:
        """Decode to the end with one drafter; returns the output ids."""
        self.prefill()
        while not self.finished:
            self.step(serving, lookahead=lookahead)
        return self.output_ids

    @property
    def _start(self) -> int:
        """Absolute position of the anchor, the last committed token."""
        return len(self.tokens) - 1

    def _begin(self, output: TargetOutput) -> None:
        # a copy: a view would hold the whole batch's features as long as this session lives
        self._features.append(output.features_TC.clone())
        logits_1V = self.target.logits(output.hidden_TH[-1:])
        empty = torch.zeros(0, dtype=torch.long, device=logits_1V.device)
        self._commit([self._verify(empty, logits_1V, None).next_token])

    def _unencoded(self, drafter: DFlashDrafter) -> torch.Tensor | None:
        """Raw features [T, C] that the drafter's context lacks; all of them after a swap."""
        if self._context_owner is not drafter:
            self._context, self._context_owner, self._encoded = ContextCache(), drafter, 0
        new = self._features[self._encoded :]
        return torch.cat(new) if new else None

    def _unread(self, drafter: D3DDrafter) -> tuple[torch.Tensor, int, DynamicCache]:
        """Tokens up to the anchor that the drafter's cache lacks, their position, and the cache; all after a swap."""
        if self._context_owner is not drafter or self._draft_cache is None:
            self._draft_cache = DynamicCache(config=drafter.config)
            self._context_owner, self._encoded = drafter, 0
        tokens = torch.tensor(self.tokens[self._encoded :], device=drafter.device)
        start, self._encoded = self._encoded, self._start
        return tokens, start, self._draft_cache

    def _follows(self, drafter: Drafter) -> bool:
        """Whether drafting now is as dear as it mostly is: this drafter has read all but about the last round."""
        return self._context_owner is drafter and self._start - self._drafted_at <= drafter.block_size

    def _take_prepared(self, drafter: Drafter) -> torch.Tensor | None:
        """Hidden states of this round's block if this drafter has prepared it; it is not kept."""
        block, self._prepared = self._prepared, None
        return block if self._context_owner is drafter else None

    def ahead_rows(self, block_ids: torch.Tensor, depths: list[int], anchors: list[int]) -> AheadRows:
        """What the drafter is to prepare, given the block that is being verified."""
        assert self._draft_cache is not None
        return AheadRows(block_ids, self._start, depths, anchors, self._draft_cache)

    def forget_draft_context(self) -> None:
        """Let the drafter read the text anew in the next round."""
        self._draft_cache, self._prepared = None, None

    def keep_prepared(self, prepared: Prepared) -> bool:
        """After a round: forget the draft keys of rejected slots, keep the block that follows; whether there is one."""
        assert self._draft_cache is not None
        surplus = self._draft_cache.get_seq_length() - self._start
        if surplus:
            self._draft_cache.crop(-surplus)
        self._encoded = self._start
        self._prepared = prepared.get(Branch(self.rounds[-1].accepted, self.tokens[-1]))
        return self._prepared is not None

    def _extend_context(self, layers: list[KeyValue]) -> None:
        """Append what `_unencoded` lacked, now that it is encoded."""
        self._context.append(layers)
        self._encoded = len(self._features)

    def _choose(
        self, draft_logits: torch.Tensor, serving: ServingDrafter
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts [D], and the distributions that they were drawn from unless they are the likeliest tokens."""
        if self.sampling.greedy or serving.draft_sampling == "argmax":
            return draft_logits.max(dim=-1).indices, None
        q_LV = warp(draft_logits, self.sampling)
        drafts = torch.multinomial(q_LV.cpu(), 1, generator=self._generator)[:, 0]
        return drafts.to(draft_logits.device), q_LV

    def _finish_round(
        self,
        serving: ServingDrafter,
        drafts: torch.Tensor,
        q_LV: torch.Tensor | None,
        output: TargetOutput,
        logits_LV: torch.Tensor,
        prepared: bool,
    ) -> None:
        """Verify, keep what was accepted, commit, and note the round."""
        start, verify_len = self._start, logits_LV.shape[0]
        verified = drafts[: verify_len - 1]
        outcome = self._verify(verified, logits_LV, q_LV)
        self._keep(output, start, outcome.accepted + 1)
        new_tokens = [*verified[: outcome.accepted].tolist(), outcome.next_token]
        self.rounds.append(
            DecodedRound(
                start=start,
                drafter_version=serving.drafter_version,
                verify_len=verify_len,
                accepted=outcome.accepted,
                draft_ids=drafts.tolist(),
                committed=self._commit(new_tokens),
                prepared=prepared,
            )
        )

    def _verify(
        self, drafts: torch.Tensor, logits_LV: torch.Tensor, q_LV: torch.Tensor | None
    ) -> Verification:
        if self.sampling.greedy:
            return verify_greedy(drafts, logits_LV)
        return verify_sampling(drafts, warp(logits_LV, self.sampling), q_LV, self._generator)

    def _keep(self, output: TargetOutput, start: int, count: int) -> None:
        self._features.append(output.features_TC[:count].clone())
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


@torch.no_grad()
def decode_round(
    sessions: Sequence[DecodingSession],
    serving: ServingDrafter,
    load: Load | None = None,
    lookahead: Lookahead | None = None,
) -> dict[DecodingSession, Exception]:
    """One round of every session: draft, verify and commit, or read the prompt.

    Args:
        sessions: unfinished ones of one target.
        serving: drafter and policy of this round.
        load: what the policy is told; by default that these sessions are running.
        lookahead: prepares next blocks while the target verifies; only D3D drafters can, others ignore it.

    Returns:
        What went wrong with single sessions (sampling from degenerate distributions, say); those must not go on. An error
        in a pass that they share is raised, and then none of them must.
    """
    target = sessions[0].target
    failed: dict[DecodingSession, Exception] = {}
    jobs: list[_Rows] = [
        _Rows(session, torch.tensor(session.tokens, device=target.device), 0)
        for session in sessions
        if not session.begun
    ]
    running = [session for session in sessions if session.begun]
    policy = serving.policy if isinstance(serving.policy, AdaptivePolicy) else None
    draft_s: float | None = None
    if running:
        load = load or Load(running=len(sessions))
        if policy is None or policy.wants_draft(load):
            usual = all(session._follows(serving.drafter) for session in running)
            started = time.perf_counter()
            jobs += _draft(running, serving, load, lookahead, failed)
            # lengths were read by the host, so the drafter's work is done
            draft_s = time.perf_counter() - started if usual else None
        else:
            jobs += [_plain(session, serving.drafter) for session in running]
    if not jobs:
        return failed
    ahead: Preparation[DecodingSession] | None = None
    if lookahead is not None and isinstance(serving.drafter, D3DDrafter):
        blocks = [
            BlockUnderVerification(job.session, job.ids, job.draft.ids.tolist(), job.draft.logits_DV)
            for job in jobs
            if job.draft is not None and len(job.draft.ids)
        ]
        ahead = Preparation.start(lookahead, serving.drafter, blocks)
    started = time.perf_counter()
    try:
        outputs = target.forward_cached(
            [job.ids for job in jobs],
            [job.start for job in jobs],
            [job.session._target_cache for job in jobs],
        )
        verified = [o.hidden_TH for job, o in zip(jobs, outputs, strict=True) if job.draft is not None]
        logits_of = iter(
            target.logits(torch.cat(verified)).split([len(h) for h in verified]) if verified else ()
        )
        for job, output in zip(jobs, outputs, strict=True):
            logits_LV = next(logits_of) if job.draft is not None else None
            with _noting(job.session, failed):
                if job.draft is None or logits_LV is None:
                    job.session._begin(output)
                else:
                    draft = job.draft
                    job.session._finish_round(
                        serving, draft.ids, draft.q_LV, output, logits_LV, draft.prepared
                    )
    except BaseException:
        if ahead is not None:
            ahead.abandon()
        raise
    verify_s = time.perf_counter() - started
    if policy is not None and len(running) == len(jobs) and not failed:
        rows, committed = sum(len(job.ids) for job in jobs), sum(s.rounds[-1].committed for s in running)
        policy.observe(RoundTiming(len(jobs), rows, verify_s, draft_s, committed))
    if ahead is not None:
        going_on = [s for s in running if s not in failed and not s.finished]
        ahead.finish(verify_s, {s: s.rounds[-1].accepted for s in going_on})
    return failed


@dataclass(frozen=True)
class _Draft:
    """One session's block: its D drafts, their logits, and what they were drawn from unless they are the likeliest.

    No drafts at all in a round that does without.
    """

    ids: torch.Tensor
    logits_DV: torch.Tensor
    q_LV: torch.Tensor | None
    prepared: bool


@dataclass(frozen=True)
class _Rows:
    """What one session has the target read in a round: a prompt, or anchor and drafts."""

    session: DecodingSession
    ids: torch.Tensor
    start: int
    draft: _Draft | None = None


def _plain(session: DecodingSession, drafter: Drafter) -> _Rows:
    """The row of a session that decodes one token without drafts."""
    session._take_prepared(drafter)
    ids = torch.tensor(session.tokens[-1:], device=session.target.device)
    nothing = _Draft(ids[:0], session.target.head_VH.new_zeros(0, 0), None, prepared=False)
    return _Rows(session, ids, session._start, nothing)


def _draft(
    sessions: Sequence[DecodingSession],
    serving: ServingDrafter,
    load: Load,
    lookahead: Lookahead | None,
    failed: dict[DecodingSession, Exception],
) -> list[_Rows]:
    """Blocks of all sessions, prepared or drafted now, and the rows of them that are to be verified."""
    drafter, target = serving.drafter, sessions[0].target
    blocks = [session._take_prepared(drafter) for session in sessions]
    missing = [session for session, block in zip(sessions, blocks, strict=True) if block is None]
    drafted: Iterator[torch.Tensor] = iter(())
    if missing:
        started = time.perf_counter()
        drafted = iter(draft_blocks(missing, drafter))
        # a request's first pass reads its prompt, too
        if lookahead is not None and all(session.rounds for session in missing):
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            lookahead.stats.draft_s += time.perf_counter() - started
            lookahead.stats.draft_passes += 1
    hidden = [next(drafted) if block is None else block for block in blocks]
    head_VH = draft_head(drafter, target)
    # two dimensions, or `linear` would copy the head once per block
    drafting = torch.cat([block[1:] for block in hidden]).to(head_VH.dtype)
    all_logits, counts = torch.nn.functional.linear(drafting, head_VH), [len(block) - 1 for block in hidden]
    logits = all_logits.split(counts)
    # a block prepared for full acceptance lacks its last slot; the policy is shown the one before it in its place
    hidden_NBH = torch.stack([_filled_up(block, drafter.block_size) for block in hidden])
    if reads_confidence(serving.policy):
        confidence = draft_confidence(all_logits).split(counts)
        load = replace(
            load, confidence_ND=torch.stack([_filled_up(c, drafter.block_size - 1) for c in confidence])
        )
    embeddings_NBH = embed_blocks(sessions, drafter)
    lengths_N = serving.policy.verify_len(hidden_NBH, embeddings_NBH, load)
    rows: list[_Rows] = []
    for session in sessions:
        session._drafted_at = session._start
    for session, logits_DV, length, block in zip(sessions, logits, lengths_N.tolist(), blocks, strict=True):
        with _noting(session, failed):
            drafts, q_LV = session._choose(logits_DV, serving)
            drafts = drafts.to(target.device)
            q_LV = None if q_LV is None else q_LV.to(target.device)
            anchor = drafts.new_tensor([session.tokens[-1]])
            ids = torch.cat([anchor, drafts[: length - 1]])
            draft = _Draft(drafts, logits_DV, q_LV, prepared=block is not None)
            rows.append(_Rows(session, ids, session._start, draft))
    return rows


def _filled_up(rows: torch.Tensor, length: int) -> torch.Tensor:
    """`rows` with the last one repeated up to `length`."""
    missing = length - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing else rows


@contextmanager
def _noting(session: DecodingSession, failed: dict[DecodingSession, Exception]) -> Iterator[None]:
    """Keep one session's error from the others of its batch."""
    try:
        yield
    except Exception as error:
        failed[session] = error


def acceptance_length(sessions: Sequence[DecodingSession]) -> float:
    """τ of real decoding, Σ committed / Σ rounds; nan without a round."""
    rounds = sum(len(s.rounds) for s in sessions)
    return sum(r.committed for s in sessions for r in s.rounds) / rounds if rounds else float("nan")

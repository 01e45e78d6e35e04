"""The embedded engine: serves requests on HF transformers with a drafter, and logs what verification saw.

One thread runs all requests, each round of all together in one batch. The drafter is read anew at every round, so a swap takes
effect at the next and no request is stopped. Output is the target's, whichever drafter ran which round.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path

import torch

from drafters.checkpoint import LoadedDrafter, load_drafter
from drafters.decoding import DecodingSession, ServingDrafter, decode_round
from drafters.errors import UserError
from drafters.fill import layer_conflict
from drafters.identity import require_same_target
from drafters.lookahead import Lookahead
from drafters.policies import AdaptivePolicy, LengthPolicy
from drafters.target import Target
from drafters.verify import SamplingParams
from serving_bridge.records import Round, Sampling, VerificationRecord
from serving_bridge.server import SwapError, SwapReport
from serving_bridge.transport import LogWriter

PolicyFactory = Callable[[LoadedDrafter], LengthPolicy]


@dataclass(frozen=True)
class Request:
    """One completion request in token ids."""

    request_id: str
    prompt_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    conversation_key: str = ""
    domain: str = "default"


@dataclass(frozen=True)
class Completion:
    """A finished request and the record that was logged for it."""

    request: Request
    record: VerificationRecord
    seconds: float

    @property
    def output_ids(self) -> list[int]:
        return self.record.output_ids


class LocalEngine:
    """Speculative serving on this machine.

    Args:
        target: the frozen target; may be shared with a trainer.
        directory: serving checkpoint to start with.
        policy: makes the length policy of a checkpoint.
        eos_ids: tokens that end a response.
        writer: where records go; None logs nothing. Never blocks serving.
        max_running: requests decoded at a time; further ones wait in order.
        threads: CPU threads of the serving thread alone; None leaves torch's default. A trainer in the same process should
            take the rest: thread pools that together exceed the cores slow each other down by far more than their share.
            The attribute may be changed at any time and counts from the next round on.
        lookahead: drafts ahead while the target verifies, if the drafter is one that can. Its owner closes it, after `stop`.
            Not with a policy that learns what rounds cost (`throughput`).

    Raises:
        UserError: when the drafter belongs to another target, or policy and look-ahead do not go together.
    """

    def __init__(
        self,
        target: Target,
        directory: Path,
        *,
        policy: PolicyFactory,
        eos_ids: Sequence[int],
        writer: LogWriter | None = None,
        max_running: int = 1,
        threads: int | None = None,
        lookahead: Lookahead | None = None,
    ) -> None:
        self.target = target
        self.eos_ids = list(eos_ids)
        self.writer = writer
        self.max_running = max_running
        self.threads = threads
        self.lookahead = lookahead
        self._policy = policy
        self._serving = self._load(directory)
        self._swapping = threading.Lock()
        self._target_checksum = parameters_checksum(target.model)
        self._waiting: deque[tuple[Request, Future[Completion]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="local-engine", daemon=True)
        self._thread.start()

    @property
    def drafter_version(self) -> str:
        return self._serving.drafter_version

    def submit(self, request: Request) -> Future[Completion]:
        """Queue a request; the future holds its completion, or the error that ended it."""
        future: Future[Completion] = Future()
        with self._wake:
            if self._stopping:
                raise RuntimeError("the engine is stopped")
            self._waiting.append((request, future))
            self._wake.notify()
        return future

    def resume(self) -> None:
        """See `DraftServer`; a swap here holds nothing up."""

    def swap(self, directory: Path) -> SwapReport:
        """Serve another checkpoint from the next round of each request on; see `DraftServer`.

        Its block size must be that of the drafter it replaces: records hold one block size for all rounds of a request.
        """
        with self._swapping:
            return self._swap(directory)

    def _swap(self, directory: Path) -> SwapReport:
        old = self._serving
        try:
            new = self._load(directory)
            if new.drafter.block_size != old.drafter.block_size:
                raise UserError(
                    f"{directory}: has block size {new.drafter.block_size}, this engine serves {old.drafter.block_size}"
                )
        except Exception as error:
            # whatever is wrong with a checkpoint, it must not end the service of the old one
            raise SwapError(f"swap refused, still serving {old.drafter_version}: {error}") from error
        started = time.perf_counter()
        self._serving = new
        pause_ms = (time.perf_counter() - started) * 1000
        target_checksum = parameters_checksum(self.target.model)
        if target_checksum != self._target_checksum:
            self._serving = old
            raise SwapError("the target's weights changed during the swap; the old drafter is back")
        return SwapReport(
            old.drafter_version,
            new.drafter_version,
            parameters_checksum(new.drafter),
            target_checksum,
            pause_ms,
        )

    def stop(self, timeout: float = 30.0) -> None:
        """Finish running requests, refuse waiting ones, end the thread."""
        with self._wake:
            self._stopping = True
            refused = list(self._waiting)
            self._waiting.clear()
            self._wake.notify()
        for _, future in refused:
            future.cancel()
        self._thread.join(timeout)

    def _load(self, directory: Path) -> ServingDrafter:
        loaded = load_drafter(directory, dtype=self.target.dtype)
        require_same_target(self.target.identity, loaded.identity, str(directory))
        conflict = layer_conflict(loaded.drafter, self.target)
        if conflict:
            raise UserError(f"{directory}: {conflict}")
        policy = self._policy(loaded)
        if self.lookahead is not None and isinstance(policy, AdaptivePolicy):
            raise UserError(
                f"policy {policy.name} learns what rounds cost, and does not know those of drafting ahead"
            )
        return ServingDrafter(loaded.drafter.to(self.target.device), policy, loaded.drafter_version)

    def _serve(self) -> None:
        running: list[_Running] = []
        while True:
            with self._wake:
                while not self._waiting and not running and not self._stopping:
                    self._wake.wait()
                if self._stopping and not running:
                    return
                while self._waiting and len(running) < self.max_running:
                    job = self._admit(*self._waiting.popleft())
                    if job is not None:
                        running.append(job)
            if self.threads is not None:
                # torch keeps the count per calling thread
                torch.set_num_threads(self.threads)
            self._advance(running)
            running = [job for job in running if not job.future.done()]

    def _admit(self, request: Request, future: Future[Completion]) -> _Running | None:
        """A job of this request, unless it is over before it began."""
        if future.cancelled():
            return None
        try:
            session = DecodingSession(
                self.target,
                request.prompt_ids,
                sampling=request.sampling,
                max_new_tokens=request.max_new_tokens,
                eos_ids=self.eos_ids,
            )
        except Exception as error:
            # one request's failure must not end the others; its caller gets the error
            _fail(future, error)
            return None
        return _Running(request, future, session)

    def _advance(self, running: Sequence[_Running]) -> None:
        """One round of all jobs, and the end of those that finished."""
        active = [job for job in running if not job.future.cancelled()]
        if not active:
            return
        try:
            failed = decode_round([job.session for job in active], self._serving, lookahead=self.lookahead)
        except Exception as error:
            # what breaks a pass of all requests leaves none of them in a known state
            failed = {job.session: error for job in active}
        for job in active:
            if job.session in failed:
                _fail(job.future, failed[job.session])
            elif job.session.finished:
                try:
                    self._finish(job, job.session)
                except Exception as error:
                    _fail(job.future, error)

    def _finish(self, job: _Running, session: DecodingSession) -> None:
        record = make_record(job.request, session, self.target, self._serving)
        if self.writer is not None:
            self.writer.write(record)
        job.future.set_result(Completion(job.request, record, time.perf_counter() - job.started))


@dataclass
class _Running:
    request: Request
    future: Future[Completion]
    session: DecodingSession
    started: float = field(default_factory=time.perf_counter)


def _fail(future: Future[Completion], error: Exception) -> None:
    """Hand the error to the caller, unless the caller has left."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def make_record(
    request: Request, session: DecodingSession, target: Target, serving: ServingDrafter
) -> VerificationRecord:
    """The verification record of a finished session."""
    assert session.finish_reason is not None
    sampling = request.sampling
    return VerificationRecord(
        request_id=request.request_id,
        conversation_key=request.conversation_key or request.request_id,
        time=time.time(),
        target_id=target.identity.target_id,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
        ),
        domain=request.domain,
        prompt_ids=request.prompt_ids,
        output_ids=session.output_ids,
        rounds=[
            Round(
                start=r.start,
                drafter_version=r.drafter_version,
                verify_len=r.verify_len,
                accepted=r.accepted,
                draft_ids=r.draft_ids,
                prepared=r.prepared,
            )
            for r in session.rounds
            # decoded plainly: there is no block to log
            if r.draft_ids
        ],
        finish_reason=session.finish_reason,
        block_size=serving.drafter.block_size,
        length_policy=serving.policy.name,
    )


def parameters_checksum(module: torch.nn.Module) -> str:
    """Sha256 over names and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()

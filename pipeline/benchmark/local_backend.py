"""The embedded engine as what benchmarks are run against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from drafters.checkpoint import LoadedDrafter
from drafters.lookahead import Lookahead
from drafters.policies import LengthPolicy, PlainPolicy
from drafters.verify import SamplingParams
from pipeline.benchmark.answers import Answer, Question, answer_from_record
from pipeline.benchmark.methods import ASYNC, DrafterChoice, Method
from pipeline.config import Config
from pipeline.lookahead import budget_for, lookahead_worker
from pipeline.models import TargetBundle, load_drafter_for
from pipeline.policies import policy_factory
from serving_bridge.local_engine import Completion, LocalEngine, Request


class LocalBackend:
    """Engines for drafters and methods, one at a time.

    Plain decoding is the same engine without drafting, so that a speedup is that of drafting and not of another loop.
    """

    def __init__(self, config: Config, bundle: TargetBundle) -> None:
        self.config = config
        self.bundle = bundle

    @contextlib.contextmanager
    def serving(self, drafter: DrafterChoice, method: Method) -> Iterator[LocalServer]:
        """An engine that decodes by this method, stopped at the end."""
        with contextlib.ExitStack() as stack:
            lookahead: Lookahead | None = None
            if method.name == ASYNC:
                loaded = load_drafter_for(drafter.directory, self.bundle, dtype=self.bundle.target.dtype)
                budget = budget_for(self.config.lookahead, loaded.drafter)
                lookahead = stack.enter_context(lookahead_worker(self.config.lookahead, budget))
            make = policy_factory(method.policy(self.config.policy))

            def policy(loaded: LoadedDrafter) -> LengthPolicy:
                return PlainPolicy() if method.plain else make(loaded)

            engine = LocalEngine(
                self.bundle.target,
                drafter.directory,
                policy=policy,
                eos_ids=self.bundle.eos_ids,
                threads=torch.get_num_threads(),
                lookahead=lookahead,
            )
            stack.callback(engine.stop)
            yield LocalServer(engine, self.config, method)


class LocalServer:
    """One engine."""

    def __init__(self, engine: LocalEngine, config: Config, method: Method) -> None:
        self.engine = engine
        self.config = config.benchmark
        self.method = method
        self._asked: list[Future[Completion]] = []

    def prepare(self, concurrency: int) -> None:
        """Decode so many requests together from now on."""
        self._asked.clear()
        self.engine.max_running = concurrency

    def complete(self, question: Question) -> Answer:
        """Answer one turn; called from as many threads as requests are under way.

        Raises:
            UserError: when the request does not fit the target.
        """
        settings = self.config
        sampling = SamplingParams(settings.temperature, settings.top_p, settings.top_k, question.seed)
        request = Request(
            question.request_id,
            question.prompt_ids,
            question.max_new_tokens,
            sampling,
            conversation_key=question.document_id,
            domain=question.domain,
        )
        future = self.engine.submit(request)
        self._asked.append(future)
        completion = future.result()
        return answer_from_record(question, completion.record, completion.seconds, plain=self.method.plain)

    def abort(self) -> None:
        """End what is under way."""
        for future in self._asked:
            future.cancel()

    def verified_share(self) -> float | None:
        """Rounds tell their verify_len themselves."""
        return None

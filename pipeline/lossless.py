"""The proof that matters to a user of the output: speculative decoding in float32 equals plain decoding, token for token.

Checked for every length policy, and while drafters are swapped under running requests.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from drafters.checkpoint import LoadedDrafter
from drafters.lookahead import Lookahead
from drafters.packing import Document
from drafters.policies import FixedPolicy, LengthPolicy
from pipeline.config import Config
from pipeline.lookahead import budget_for, lookahead_worker
from pipeline.models import TargetBundle, load_drafter_for
from pipeline.policies import policy_factory
from serving_bridge.local_engine import Completion, LocalEngine, Request

SWAP_EVERY_S = 0.5
"""A swap hashes the target's weights, for which the requests would otherwise mostly wait."""


@dataclass
class LosslessReport:
    """Per case (policy, look-ahead or swap): prompts compared, and ids of those that differed.

    `prepared_rounds` of the look-ahead's case verified a block that was drafted ahead.
    """

    compared: dict[str, int] = field(default_factory=dict)
    differing: dict[str, list[str]] = field(default_factory=dict)
    prepared_rounds: int = 0
    swaps: int = 0
    requests_across_a_swap: int = 0

    @property
    def lossless(self) -> bool:
        """True when something was compared, drafters were swapped meanwhile, and nothing differed.

        A look-ahead that never hit proves nothing.
        """
        idle = "lookahead" in self.compared and not self.prepared_rounds
        return bool(self.compared) and self.swaps > 0 and not idle and not any(self.differing.values())


def check_lossless(
    config: Config,
    bundle: TargetBundle,
    directories: Sequence[Path],
    references: Sequence[Document],
    report: LosslessReport,
) -> LosslessReport:
    """Decode `references` again with each policy and compare.

    Args:
        config: gives the policies: whole blocks, `evaluate.fixed_lengths`, and the configured one; and whether whole blocks are
            to be drafted ahead as well.
        bundle: the target in float32.
        directories: serving checkpoints; the last is checked with every policy, and all take turns in the swap case.
        references: held-out documents whose output the target produced by plain greedy decoding.
        report: filled in and returned.
    """
    references = [_shortened(document, config.evaluate.lossless_tokens) for document in references]
    policies: dict[str, Callable[[LoadedDrafter], LengthPolicy]] = {
        "fixed": lambda loaded: FixedPolicy(),
        **{f"fixed_{length}": _fixed(length) for length in config.evaluate.fixed_lengths},
        config.policy.name: policy_factory(config.policy),
    }

    def engine(directory: Path, policy: str, lookahead: Lookahead | None = None) -> LocalEngine:
        return LocalEngine(
            bundle.target,
            directory,
            policy=policies[policy],
            eos_ids=bundle.eos_ids,
            max_running=config.serve.max_running,
            threads=torch.get_num_threads(),
            lookahead=lookahead,
        )

    for name in policies:
        with contextlib.closing(_Closing(engine(directories[-1], name))) as serving:
            _compare(name, _decode_all(serving.engine, references), references, report)
    with contextlib.ExitStack() as stack:
        lookahead = None
        if config.lookahead.mode != "off":
            budget = budget_for(config.lookahead, load_drafter_for(directories[-1], bundle).drafter)
            lookahead = stack.enter_context(lookahead_worker(config.lookahead, budget))
            with contextlib.closing(_Closing(engine(directories[-1], "fixed", lookahead))) as serving:
                completions = _decode_all(serving.engine, references)
                report.prepared_rounds = sum(r.prepared for c in completions for r in c.record.rounds)
                _compare("lookahead", completions, references, report)
        with contextlib.closing(_Closing(engine(directories[0], config.policy.name, lookahead))) as serving:
            completions = _decode_while_swapping(serving.engine, directories, references, report)
            _compare("hot_swap", completions, references, report)
    return report


def _shortened(document: Document, max_tokens: int) -> Document:
    """The document with at most so many response tokens."""
    prompt, _ = document.prompt_and_output()
    return document.truncated(len(prompt) + max_tokens)


def _fixed(length: int) -> Callable[[LoadedDrafter], LengthPolicy]:
    return lambda loaded: FixedPolicy(length)


class _Closing:
    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.close = engine.stop


def _decode_all(engine: LocalEngine, references: Sequence[Document]) -> list[Completion]:
    futures = []
    for document in references:
        prompt, output = document.prompt_and_output()
        futures.append(engine.submit(Request(document.document_id, prompt, len(output))))
    return [future.result() for future in futures]


def _decode_while_swapping(
    engine: LocalEngine, directories: Sequence[Path], references: Sequence[Document], report: LosslessReport
) -> list[Completion]:
    done = threading.Event()

    def keep_swapping() -> None:
        # with one checkpoint it replaces itself: still a new drafter object, hence a rebuilt context
        for directory in itertools.cycle([*directories[1:], directories[0]]):
            engine.swap(directory)
            report.swaps += 1
            if done.wait(SWAP_EVERY_S):
                return

    with ThreadPoolExecutor(1, thread_name_prefix="swapper") as pool:
        swapping = pool.submit(keep_swapping)
        try:
            completions = _decode_all(engine, references)
        finally:
            done.set()
        swapping.result()  # a swap that failed is an error of the check, not a pass
    for completion in completions:
        versions = {r.drafter_version for r in completion.record.rounds}
        report.requests_across_a_swap += len(versions) > 1
    return completions


def _compare(
    name: str, completions: Sequence[Completion], references: Sequence[Document], report: LosslessReport
) -> None:
    differing = [
        document.document_id
        for completion, document in zip(completions, references, strict=True)
        if completion.output_ids != document.prompt_and_output()[1]
    ]
    report.compared[name] = len(references)
    report.differing[name] = differing

"""Figures of a drafter: τ by domain and position, and wall-clock speed beside plain decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from drafters.decoding import DecodingSession, ServingDrafter
from drafters.fill import Drafter
from drafters.lookahead import Lookahead
from drafters.packing import Document
from drafters.policies import FixedPolicy, LengthPolicy
from drafters.replay import ReplayResult, position_acceptance, total_acceptance_length
from drafters.verify import SamplingParams
from pipeline.bootstrap import bootstrap_ratio
from pipeline.models import TargetBundle


def acceptance_summary(results: Sequence[ReplayResult], block_size: int) -> dict[str, Any]:
    """τ with its bootstrap interval, acceptance rate, τ by domain, acceptance by position."""
    counted = [r for r in results if r.rounds]
    interval = bootstrap_ratio([r.committed for r in counted], [r.rounds for r in counted])
    domains = sorted({r.domain for r in counted})
    return {
        "acceptance_length": interval.point,
        "acceptance_length_low": interval.low,
        "acceptance_length_high": interval.high,
        "acceptance_rate": (interval.point - 1) / (block_size - 1),
        "prompts": len(counted),
        "by_domain": {
            domain: total_acceptance_length([r for r in counted if r.domain == domain]) for domain in domains
        },
        "by_position": position_acceptance(counted),
    }


def decoding_speed(
    bundle: TargetBundle,
    serving: ServingDrafter,
    documents: Sequence[Document],
    *,
    max_new_tokens: int,
    ahead: Callable[[], AbstractContextManager[Lookahead]] | None = None,
) -> dict[str, float]:
    """Median tokens/s over prompts, one request at a time, prefill included; AR is HF `generate`.

    AR and speculative runs alternate prompt by prompt, so that other load on the machine touches them alike. `ahead` opens a
    worker that drafts ahead; whole blocks with it are reported as `lookahead`.
    """
    policies: dict[str, LengthPolicy] = {"fixed": FixedPolicy(), serving.policy.name: serving.policy}
    workers: dict[str, Callable[[], AbstractContextManager[Lookahead | None]]] = {}
    if ahead is not None:
        policies["lookahead"], workers["lookahead"] = FixedPolicy(), ahead
    speeds: dict[str, list[float]] = {"ar": [], **{name: [] for name in policies}}
    verified: dict[str, list[int]] = {name: [] for name in policies}
    for document in documents:
        prompt, _ = document.prompt_and_output()
        started = time.perf_counter()
        output = bundle.target.model.generate(
            torch.tensor([prompt], device=bundle.target.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=bundle.target.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=bundle.eos_ids[0] if bundle.eos_ids else 0,
        )
        speeds["ar"].append((output.shape[1] - len(prompt)) / (time.perf_counter() - started))
        for name, policy in policies.items():
            session = DecodingSession(
                bundle.target,
                prompt,
                sampling=SamplingParams(),
                max_new_tokens=max_new_tokens,
                eos_ids=bundle.eos_ids,
            )
            with workers.get(name, nullcontext)() as lookahead:
                started = time.perf_counter()
                tokens = session.run(
                    ServingDrafter(serving.drafter, policy, serving.drafter_version), lookahead
                )
                speeds[name].append(len(tokens) / (time.perf_counter() - started))
            verified[name] += [r.verify_len for r in session.rounds]
    result = {f"tokens_per_s_{name}": statistics.median(values) for name, values in speeds.items()}
    result |= {
        f"speedup_{name}": result[f"tokens_per_s_{name}"] / result["tokens_per_s_ar"] for name in policies
    }
    result |= {f"verify_len_{name}": statistics.fmean(values) for name, values in verified.items() if values}
    return result


def round_ms(bundle: TargetBundle, drafter: Drafter, document: Document, *, rounds: int = 12) -> float:
    """Median milliseconds of a round that drafts and verifies a whole block, one request, its prompt already read."""
    prompt, _ = document.prompt_and_output()
    wanted = rounds * drafter.block_size
    room = bundle.target.config.max_position_embeddings - len(prompt)
    session = DecodingSession(
        bundle.target, prompt, sampling=SamplingParams(), max_new_tokens=min(wanted, room)
    )
    serving = ServingDrafter(drafter, FixedPolicy(), "measured")
    session.prefill()
    seconds: list[float] = []
    while not session.finished and len(seconds) < rounds:
        started = time.perf_counter()
        session.step(serving)
        seconds.append(time.perf_counter() - started)
    # the first also reads the prompt into the drafter's cache
    return 1000 * statistics.median(seconds[1:] or seconds)

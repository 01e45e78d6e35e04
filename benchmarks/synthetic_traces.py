"""Traces of texts that nobody wrote, whose whole blocks have a given acceptance length: for what-if tables and tests.

Every token has an ease, an autocorrelated series around the text's mean. Slot j of a block anchored at t is accepted, if all
before are, with probability sigmoid(ease of token t+j - decay·(j-1)). Heads answer what these probabilities say, up to `noise`:
they are about as good as heads can be, which real ones are not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeline.block_traces import BlockTrace

STEPS = 24


@dataclass(frozen=True)
class Process:
    """How texts are drawn; lengths in tokens, the rest in logits.

    `spread` and `text_spread` are standard deviations of the ease, from token to token and from text to text, `memory` the
    correlation of neighbouring tokens, `noise` that of the heads' error, one for each block.
    """

    block_size: int = 16
    texts: int = 64
    tokens: int = 320
    prompt: int = 256
    ease: float = 0.0
    spread: float = 1.5
    text_spread: float = 0.5
    memory: float = 0.8
    decay: float = 0.05
    noise: float = 0.3


def draw(process: Process, seed: int, domain: str = "default") -> list[BlockTrace]:
    """Texts with an anchor at every token but the last."""
    generator = np.random.default_rng(seed)
    drafts = process.block_size - 1
    traces = []
    for index in range(process.texts):
        ease = process.ease + process.text_spread * generator.standard_normal()
        series = np.empty(process.tokens + drafts)
        value = generator.standard_normal()
        for place in range(len(series)):
            value = process.memory * value + np.sqrt(1 - process.memory**2) * generator.standard_normal()
            series[place] = ease + process.spread * value
        anchors = np.arange(process.tokens)
        slots = np.arange(drafts)
        logits_AD = series[anchors[:, None] + slots] - process.decay * slots
        matched = generator.random(logits_AD.shape) < _sigmoid(logits_AD)
        accepted = matched.cumprod(axis=1).sum(axis=1)
        error = process.noise * generator.standard_normal((process.tokens, 1))
        survival_AD = _sigmoid(logits_AD + error).cumprod(axis=1)
        first = process.prompt
        traces.append(
            BlockTrace(
                f"{domain}-{index}",
                [(first, first + process.tokens)],
                {first + int(a): int(a) for a in anchors},
                np.minimum(accepted, process.tokens - anchors).astype(np.int64),
                ((1 + survival_AD.sum(axis=1)) / process.block_size).astype(np.float32).astype(np.float64),
                survival_AD.astype(np.float32).astype(np.float64),
                domain,
            )
        )
    return traces


def draw_with(tau: float, process: Process, seed: int, domain: str = "default") -> list[BlockTrace]:
    """Texts whose whole blocks have about this acceptance length: the ease is sought by bisection."""
    low, high = -8.0, 12.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if whole_block_tau(draw(replace(process, ease=middle), seed)) < tau:
            low = middle
        else:
            high = middle
    return draw(replace(process, ease=(low + high) / 2), seed, domain)


def whole_block_tau(traces: list[BlockTrace]) -> float:
    """τ of walking all texts with whole blocks."""
    committed = rounds = 0
    for trace in traces:
        for first, last in trace.spans:
            place = first
            while place < last:
                place += min(int(trace.accepted_A[trace.row_of[place]]) + 1, last - place)
                rounds += 1
            committed += last - first
    return committed / rounds


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))

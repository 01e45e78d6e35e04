"""What is compared: plain decoding, and length policies as the configuration writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafters.errors import UserError
from drafters.policies import FixedPolicy, LengthPolicy, Load, RoundTiming
from drafters.step_cost import StepCosts
from pipeline.config import PolicyConfig
from pipeline.policies import policy_with
from pipeline.simulation.requests import Requests

GAMMAS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
LENGTHS = (2, 3, 4, 6, 8, 12, 16)
"""Of `fixed` without a value, as far as a block goes; and the whole block."""

FAMILIES = ("plain", "fixed", "adaflash", "survival", "throughput")
CONFIGURED = "config"
_WORDS = {"fixed": "length", "adaflash": "gamma", "survival": "threshold"}


class PlainPolicy:
    """Never drafts: plain batched decoding."""

    name = "plain"

    def wants_draft(self, load: Load) -> bool:
        return False

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        return FixedPolicy(1).verify_len(hidden_NBH, embeddings_NBH, load)

    def observe(self, timing: RoundTiming) -> None:
        return None


@dataclass(frozen=True)
class Method:
    """A policy with its setting; `policy` None is plain decoding."""

    name: str
    setting: str
    policy: PolicyConfig | None

    def make(self, requests: Requests, costs: StepCosts | None = None) -> LengthPolicy:
        """The policy that serving would make, over the traced answers of the heads.

        Args:
            requests: what will be served.
            costs: a table that `throughput` begins with and goes on learning in; None: it learns all from the rounds.
        """
        if self.policy is None:
            return PlainPolicy()
        return policy_with(self.policy, requests.length_head, requests.acceptance_head, costs)


PLAIN = Method("plain", "", None)


def every_method(
    block_size: int,
    *,
    length_head: bool,
    acceptance_head: bool,
    lengths: Sequence[int] | None = None,
    probe_every: int = 64,
) -> list[Method]:
    """Plain decoding, and all families that the heads allow with all their settings; `lengths` are those of `fixed`."""
    found = [PLAIN]
    found += [_single("fixed", n) for n in lengths or range(2, block_size + 1)]
    if length_head:
        found += [_single("adaflash", gamma) for gamma in GAMMAS]
    if acceptance_head:
        found += [_single("survival", threshold) for threshold in THRESHOLDS]
        found.append(Method("throughput", "", PolicyConfig(name="throughput", probe_every=probe_every)))
    return found


def read_words(text: str) -> list[tuple[str, str]]:
    """(name, value or nothing) of each word of `--policies`.

    Raises:
        UserError: naming the word that is no policy.
    """
    words = []
    for word in text.split(","):
        name, _, value = word.strip().partition(":")
        if name not in FAMILIES and word.strip() != CONFIGURED:
            known = ", ".join([*FAMILIES, CONFIGURED])
            raise UserError(f"--policies: {word.strip()!r} is unknown; use {known}, or NAME:VALUE")
        words.append((name, value))
    return words


def read_methods(text: str, requests: Requests, configured: PolicyConfig) -> list[Method]:
    """Methods of `--policies`: `NAME`, with all settings, `NAME:VALUE`, or `config`, separated by commas; plain comes first.

    Raises:
        UserError: naming the word that is no policy, has a value it cannot take, or needs a head that the traces lack.
    """
    block_size = requests.block_size
    every = every_method(
        block_size,
        length_head=True,
        acceptance_head=True,
        lengths=sorted({length for length in LENGTHS if length < block_size} | {block_size}),
        probe_every=configured.probe_every,
    )
    found = [PLAIN]
    for name, value in read_words(text):
        if name == CONFIGURED:
            chosen = [Method(configured.name, "as configured", configured)]
        elif value:
            chosen = [_with_value(name, value, block_size)]
        else:
            chosen = [method for method in every if method.name == name]
        for method in chosen:
            _check_heads(method, requests)
        found += [method for method in chosen if method not in found]
    return found


def available(requests: Requests) -> str:
    """`--policies` with all that the traces allow."""
    found = ["fixed"]
    found += ["adaflash"] * (requests.length_head is not None)
    found += ["survival", "throughput"] * (requests.acceptance_head is not None)
    return ",".join(found)


def _single(name: str, value: float) -> Method:
    word = _WORDS[name]
    return Method(name, f"{word} {value:g}", PolicyConfig.model_validate({"name": name, word: value}))


def _with_value(name: str, text: str, block_size: int) -> Method:
    try:
        value = int(text) if name == "fixed" else float(text)
        if not math.isfinite(value):
            raise ValueError(value)
        method = _single(name, value)
    except (KeyError, ValueError):
        raise UserError(f"--policies: {name}:{text} is not a setting of {name}") from None
    if name == "fixed" and value > block_size:
        raise UserError(f"--policies: fixed:{text} is outside 1..{block_size}, the block size of the traces")
    return method


def _check_heads(method: Method, requests: Requests) -> None:
    if method.name == "adaflash" and requests.length_head is None:
        raise UserError("--policies: adaflash needs a length head, and the traces have no answers of one")
    if method.name in ("survival", "throughput") and requests.acceptance_head is None:
        raise UserError(
            f"--policies: {method.name} needs an acceptance head, and the traces have no answers of one"
        )

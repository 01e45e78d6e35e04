"""Losslessness of speculative sampling by exact enumeration.

The real functions run; only their randomness is replaced. A uniform draw becomes a branch whose probability is found by bisecting
the function's own decision, and a categorical draw becomes one branch per token, so the output distribution is exact.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from drafters import decoding
from drafters.decoding import DecodingSession, ServingDrafter
from drafters.dflash import DFlashDrafter
from drafters.policies import FixedPolicy
from drafters.target import Target
from drafters.verify import SamplingParams, Verification, verify_sampling, warp

Distribution = dict[tuple[int, ...], float]


class _Scripted:
    """Feeds uniforms from a script and records what was asked for."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        self.uniforms = list(uniforms)
        self.used = 0
        self.categorical: torch.Tensor | None = None

    def rand(self, *_: Any, **__: Any) -> torch.Tensor:
        self.used += 1
        value = self.uniforms[self.used - 1] if self.used <= len(self.uniforms) else 0.0
        return torch.tensor(value, dtype=torch.float64)

    def multinomial(self, probs: torch.Tensor, count: int, **_: Any) -> torch.Tensor:
        assert self.categorical is None
        assert count == 1
        assert torch.isfinite(probs).all()
        self.categorical = probs / probs.sum()
        return probs.argmax(dim=-1, keepdim=True)


def _attempt(
    monkeypatch: pytest.MonkeyPatch, uniforms: Sequence[float], args: tuple[Any, ...]
) -> tuple[Verification, _Scripted]:
    script = _Scripted(uniforms)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand", script.rand)
        patch.setattr(torch, "multinomial", script.multinomial)
        return verify_sampling(*args), script


def outcomes(
    monkeypatch: pytest.MonkeyPatch,
    drafts: Sequence[int],
    p_LV: torch.Tensor,
    q_LV: torch.Tensor | None,
) -> Iterator[tuple[int, int, float]]:
    """(accepted, next token, probability) of one verification, exactly."""
    args = (torch.tensor(drafts, dtype=torch.long), p_LV, q_LV)

    def accepts(j: int, uniform: float) -> bool:
        return _attempt(monkeypatch, [0.0] * j + [uniform], args)[0].accepted > j

    reach = 1.0
    for j in range(len(drafts)):
        low, high = 0.0, 1.0
        if not accepts(j, 0.0):
            high = 0.0
        elif accepts(j, 1.0 - 2**-53):
            low = 1.0
        while high - low > 1e-13:
            middle = (low + high) / 2
            low, high = (middle, high) if accepts(j, middle) else (low, middle)
        probability = (low + high) / 2
        if probability < 1:
            outcome, script = _attempt(monkeypatch, [0.0] * j + [1.0 - 2**-53], args)
            assert (outcome.accepted, script.used) == (j, j + 1)
            assert script.categorical is not None
            for token, chance in enumerate(script.categorical.tolist()):
                yield j, token, reach * (1 - probability) * chance
        reach *= probability
        if reach == 0:
            return
    outcome, script = _attempt(monkeypatch, [0.0] * len(drafts), args)
    assert outcome.accepted == len(drafts)
    assert script.categorical is not None
    for token, chance in enumerate(script.categorical.tolist()):
        yield len(drafts), token, reach * chance


Policy = Callable[[tuple[int, ...]], int]
V, B = 4, 3


class Model:
    """A target p(y | prefix) and independent drafter slots q_1, q_2, some entries zero."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def rows(count: int) -> torch.Tensor:
            weights = torch.rand(count, V, generator=generator, dtype=torch.float64) ** 3
            weights[torch.rand(count, V, generator=generator) < 0.2] = 0
            weights[:, 0] += 0.05
            return weights / weights.sum(dim=-1, keepdim=True)

        prefixes = [x for n in range(B + 1) for x in itertools.product(range(V), repeat=n)]
        self.p = dict(zip(prefixes, rows(len(prefixes)), strict=True))
        self.q = rows(B - 1)

    def text(self, length: int) -> Distribution:
        """The target's own distribution of its next tokens."""
        result: Distribution = {}
        for tokens in itertools.product(range(V), repeat=length):
            chance = 1.0
            for i, token in enumerate(tokens):
                chance *= float(self.p[tokens[:i]][token])
            result[tokens] = chance
        return result


def speculate(
    monkeypatch: pytest.MonkeyPatch, model: Model, policy: Policy, *, argmax: bool, length: int
) -> Distribution:
    """Distribution of the next `length` tokens when the first come from one round, the rest from the target."""
    result: Distribution = defaultdict(float)
    best = tuple(model.q.argmax(dim=-1).tolist())
    for drafts in itertools.product(range(V), repeat=B - 1):
        chance = float(drafts == best)
        if not argmax:
            chance = float(model.q[0, drafts[0]] * model.q[1, drafts[1]])
        if chance == 0:
            continue
        verified = drafts[: policy(drafts) - 1]
        p_LV = torch.stack([model.p[verified[:j]] for j in range(len(verified) + 1)])
        q_LV = None if argmax else model.q
        for accepted, token, probability in outcomes(monkeypatch, verified, p_LV, q_LV):
            committed = (*verified[:accepted], token)
            for rest in itertools.product(range(V), repeat=max(0, length - len(committed))):
                tail = 1.0
                for i, extra in enumerate(rest):
                    tail *= float(model.p[(*committed, *rest[:i])][extra])
                result[(*committed, *rest)[:length]] += chance * probability * tail
    return result


def distance(left: Distribution, right: Distribution) -> float:
    return max(abs(left.get(x, 0.0) - right.get(x, 0.0)) for x in {*left, *right})


POLICIES: dict[str, Policy] = {
    "anchor-only": lambda drafts: 1,
    "two": lambda drafts: 2,
    "whole": lambda drafts: 3,
    # stops before slot 2 because of d_1: {verify_len = 2} depends on d_1 only
    "by-earlier-draft": lambda drafts: 2 if drafts[0] % 2 else 3,
}


@pytest.mark.parametrize("argmax", [False, True], ids=["sampled", "argmax"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_verification_is_lossless(
    monkeypatch: pytest.MonkeyPatch, seed: int, policy: str, argmax: bool
) -> None:
    model = Model(seed)
    got = speculate(monkeypatch, model, POLICIES[policy], argmax=argmax, length=3)
    assert sum(got.values()) == pytest.approx(1)
    assert distance(got, model.text(3)) < 1e-10


def test_a_policy_that_looks_at_the_draft_it_cuts_is_not_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(0)

    def peeking(drafts: tuple[int, ...]) -> int:
        return 1 if drafts[0] == 0 else 3

    assert distance(speculate(monkeypatch, model, peeking, argmax=False, length=1), model.text(1)) > 0.01
    # with argmax drafts the drafts are a function of the context, so looking is harmless
    assert distance(speculate(monkeypatch, model, peeking, argmax=True, length=3), model.text(3)) < 1e-10


def test_certain_and_impossible_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    certain = [x for x in outcomes(monkeypatch, [0], p, None) if x[2] > 0]
    assert certain == [(1, 0, pytest.approx(0.2)), (1, 1, pytest.approx(0.3)), (1, 2, pytest.approx(0.5))]
    impossible = [x for x in outcomes(monkeypatch, [1], p, None) if x[2] > 0]
    assert impossible == [(0, 0, 1.0)]
    q = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert [x for x in outcomes(monkeypatch, [2], p, q) if x[2] > 0] == [(0, 0, 1.0)]
    # equal distributions: never rejected, although the residual is empty
    assert all(
        accepted == 1
        for accepted, _, chance in outcomes(monkeypatch, [2], p[1:].expand(2, 3), p[1:])
        if chance
    )


@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.7, seed=0),
        SamplingParams(temperature=1.5, top_p=0.8, top_k=3, seed=0),
    ],
    ids=["plain", "top-p-top-k"],
)
def test_a_session_samples_the_targets_distribution(
    sampling: SamplingParams,
    draft_sampling: Any,
    monkeypatch: pytest.MonkeyPatch,
    make_target: Callable[..., Target],
    make_drafter: Callable[..., DFlashDrafter],
) -> None:
    """Every draft of one real round: its probability, then all outcomes of verifying what the session passed on."""
    vocab, block = 5, 3
    target = make_target("qwen3", torch.float64, vocab=vocab)
    serving = ServingDrafter(
        make_drafter(target, block_size=block, mask_token_id=4), FixedPolicy(), "v1", draft_sampling
    )
    prompt = [1, 2, 0, 3]
    result: Distribution = defaultdict(float)
    total = 0.0
    first_token: int | None = None
    for drafts in itertools.product(range(vocab), repeat=block - 1):
        session = DecodingSession(target, prompt, sampling=sampling, max_new_tokens=9)
        session.prefill()
        first_token = session.tokens[-1]
        captured: list[Any] = []
        chance = 1.0

        def draw(probs: torch.Tensor, count: int, **_: Any) -> torch.Tensor:
            nonlocal chance
            chance = float(probs.gather(1, torch.tensor(drafts)[:, None]).prod())  # noqa: B023
            return torch.tensor(drafts)[:, None]  # noqa: B023

        def capture(*args: Any) -> Verification:
            captured.append(args)  # noqa: B023
            return Verification(0, 0)

        with monkeypatch.context() as patch:
            patch.setattr(decoding, "verify_sampling", capture)
            patch.setattr(torch, "multinomial", draw)
            record = session.step(serving)
        if draft_sampling == "argmax" and tuple(record.draft_ids) != drafts:
            continue
        ((verified, p_LV, q_LV, _),) = captured
        assert verified.tolist() == list(drafts)
        assert (q_LV is None) == (draft_sampling == "argmax")
        total += chance
        if chance == 0:
            continue
        for accepted, token, probability in outcomes(monkeypatch, drafts, p_LV, q_LV):
            result[(*drafts[:accepted], token)] += chance * probability
    assert total == pytest.approx(1)
    assert first_token is not None

    def truth(tail: tuple[int, ...]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, first_token, *tail]])
        with torch.no_grad():
            return warp(target.model(ids).logits[0, -1:], sampling)[0]

    def mass(prefix: tuple[int, ...]) -> float:
        """Probability that the text starts with `prefix`, the target going on where the round ended."""
        total = 0.0
        for committed, probability in result.items():
            shared = min(len(committed), len(prefix))
            if committed[:shared] == prefix[:shared]:
                for i in range(shared, len(prefix)):
                    probability *= float(truth(prefix[:i])[prefix[i]])
                total += probability
        return total

    for a in range(vocab):
        expected = float(truth(())[a])
        assert mass((a,)) == pytest.approx(expected, abs=1e-9)
        for b in range(vocab):
            assert mass((a, b)) == pytest.approx(expected * float(truth((a,))[b]), abs=1e-9)

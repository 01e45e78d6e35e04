"""What a verification round leaves behind: a copy, since the engine reuses its buffers.

Shapes: R requests, B block size, K best tokens, V vocabulary.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

from serving_bridge.sglang_plugin.rounds import RoundCapture, capture

REQUESTS, BLOCK, VOCAB = 2, 3, 5


def candidates() -> torch.Tensor:
    return torch.tensor([[10, 11, 12], [20, 21, 22]])


def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(REQUESTS * BLOCK, VOCAB, generator=generator)


def take(
    candidates_RB: torch.Tensor,
    verify_lens: list[int] | None = None,
    logits_NV: torch.Tensor | None = None,
    top_k: int = 0,
) -> RoundCapture:
    return capture(
        drafter_version="v1",
        candidates_RB=candidates_RB,
        verify_lens=verify_lens,
        logits=logits_NV,
        top_k=top_k,
    )


def test_a_capture_outlives_the_engines_buffers() -> None:
    candidates_RB, logits_NV = candidates(), logits()
    captured = take(candidates_RB, logits_NV=logits_NV, top_k=2)
    before = captured.target_top_k(1)
    candidates_RB.fill_(-1)
    logits_NV.fill_(0.0)
    assert [captured.draft_ids(request) for request in range(REQUESTS)] == [[11, 12], [21, 22]]
    assert captured.target_top_k(1) == before
    assert captured.drafter_version == "v1"


def test_without_lengths_whole_blocks_were_verified() -> None:
    captured = take(candidates(), None, logits(), top_k=1)
    assert [captured.verify_len(request) for request in range(REQUESTS)] == [BLOCK, BLOCK]
    best = captured.target_top_k(0)
    assert best is not None
    assert len(best) == BLOCK


def test_lengths_are_per_request_and_drafts_are_never_cut() -> None:
    captured = take(candidates(), [1, 3], logits(), top_k=1)
    assert [captured.verify_len(request) for request in range(REQUESTS)] == [1, 3]
    assert captured.draft_ids(0) == [11, 12]
    best = [captured.target_top_k(request) for request in range(REQUESTS)]
    assert [len(slots or []) for slots in best] == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_tokens_are_the_targets_own(dtype: torch.dtype) -> None:
    logits_NV = logits().to(dtype)
    captured = take(candidates(), None, logits_NV, top_k=2)
    for request in range(REQUESTS):
        slots = captured.target_top_k(request)
        assert slots is not None
        for slot, pairs in enumerate(slots):
            scores = logits_NV[request * BLOCK + slot].double().tolist()
            total = math.log(sum(math.exp(score) for score in scores))
            order = sorted(range(VOCAB), key=lambda token, scores=scores: -scores[token])[:2]  # type: ignore[misc]
            assert [token for token, _ in pairs] == order
            assert [p for _, p in pairs] == pytest.approx([scores[t] - total for t in order], abs=1e-5)


def test_impossible_tokens_are_left_out() -> None:
    """JSON has no -inf, and a grammar's mask gives just that."""
    logits_NV = torch.full((REQUESTS * BLOCK, VOCAB), -float("inf"))
    logits_NV[:, 3] = 1.0
    slots = take(candidates(), None, logits_NV, top_k=4).target_top_k(0)
    assert slots == [[(3, 0.0)]] * BLOCK
    json.dumps(slots, allow_nan=False)


def test_more_tokens_than_the_vocabulary_has_are_not_asked_for() -> None:
    slots = take(candidates(), None, logits(), top_k=VOCAB + 3).target_top_k(0)
    assert slots is not None
    assert [len(pairs) for pairs in slots] == [VOCAB] * BLOCK


@pytest.mark.parametrize(("with_logits", "top_k"), [(True, 0), (False, 2)])
def test_no_best_tokens_unless_asked_for_and_at_hand(with_logits: bool, top_k: int) -> None:
    captured = take(candidates(), None, logits() if with_logits else None, top_k)
    assert captured.target_top_k(0) is None
    assert captured.draft_ids(0) == [11, 12]

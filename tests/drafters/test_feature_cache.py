"""Kept target outputs equal fresh ones, bit for bit and within the memory they may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from drafters.feature_cache import FeatureCache
from drafters.packing import Document, PackedBatch, pack_documents
from drafters.target import Target
from drafters.teacher import TeacherMoments, teacher_moments

LENGTHS = (9, 5, 12)


@pytest.fixture
def target(make_target: Callable[..., Target]) -> Target:
    return make_target("qwen3")


@pytest.fixture
def runs(target: Target) -> Iterator[list[int]]:
    """Token counts of the target's forwards."""
    counts: list[int] = []
    handle = target.model.model.register_forward_hook(
        lambda module, args, output: counts.append(output.last_hidden_state.shape[1])
    )
    yield counts
    handle.remove()


def pack(*indices: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    documents = [
        Document(torch.randint(0, 60, (n,), generator=generator).tolist(), [True] * n, f"d{n}")
        for n in LENGTHS
    ]
    return pack_documents([documents[i] for i in indices], anchors_per_document=1)


def test_outputs_equal_one_packed_forward(target: Target) -> None:
    cache, batch = FeatureCache(target, 10**9), pack(0, 1, 2)
    expected = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    for _ in range(2):
        got = cache.forward(batch)
        torch.testing.assert_close(got.hidden_TH, expected.hidden_TH, rtol=0, atol=1e-4)
        torch.testing.assert_close(got.features_TC, expected.features_TC, rtol=0, atol=1e-4)


def test_a_document_runs_once_and_its_output_does_not_depend_on_its_neighbours(
    target: Target, runs: list[int]
) -> None:
    cache = FeatureCache(target, 10**9)
    together = cache.forward(pack(0, 1, 2))
    assert runs == list(LENGTHS)
    alone = FeatureCache(target, 0).forward(pack(1))
    runs.clear()
    again = cache.forward(pack(2, 1))
    assert runs == []
    assert torch.equal(again.features_TC[12:], together.features_TC[9:14])
    assert torch.equal(again.features_TC[12:], alone.features_TC)
    assert torch.equal(again.hidden_TH[:12], together.hidden_TH[14:])


def test_memory_is_limited_and_what_does_not_fit_is_computed_anew(target: Target, runs: list[int]) -> None:
    one = FeatureCache(target, 10**9)
    one.forward(pack(0))
    per_token = one.used_bytes // 9
    assert one.used_bytes == 9 * (32 + 3 * 32) * 4
    cache = FeatureCache(target, 15 * per_token)
    first = cache.forward(pack(0, 2, 1))
    assert cache.used_bytes == 14 * per_token
    runs.clear()
    second = cache.forward(pack(0, 2, 1))
    assert runs == [12], "the document that did not fit"
    assert torch.equal(first.features_TC, second.features_TC)


def test_moments_are_kept_beside_the_outputs_where_a_response_token_follows(target: Target) -> None:
    made: list[int] = []

    def moments(hidden_TH: torch.Tensor) -> TeacherMoments:
        made.append(hidden_TH.shape[0])
        return teacher_moments(hidden_TH, target.head_VH)

    prompt, response = [3, 4, 5, 6], [7, 8, 9]
    talk = Document(prompt + response, [False] * 4 + [True] * 3, "talk")
    batch = pack_documents([talk, Document([1, 2], [True] * 2, "short")], anchors_per_document=1)
    cache = FeatureCache(target, 10**9, moments=moments)
    first, again = cache.forward(batch).moments, cache.forward(batch).moments
    assert made == [3, 1]
    assert first is not None and again is not None and first.excess_TH is not None
    expected = teacher_moments(cache.forward(batch).hidden_TH, target.head_VH)
    assert expected.excess_TH is not None
    for place in (3, 4, 5, 7):
        torch.testing.assert_close(first.excess_TH[place], expected.excess_TH[place])
        assert first.greedy_T[place] == again.greedy_T[place] == expected.greedy_T[place]
    plain = FeatureCache(target, 10**9)
    assert plain.forward(batch).moments is None
    assert cache.used_bytes == plain.used_bytes + first.nbytes
    # a document that cannot be kept gets the same ones at every visit
    small = FeatureCache(target, cache.used_bytes - 10, moments=moments)
    small.forward(batch)
    made.clear()
    unkept = small.forward(batch).moments
    assert made == [1]
    assert unkept is not None and unkept.excess_TH is not None
    assert torch.equal(unkept.excess_TH, first.excess_TH)
    assert small.used_bytes <= small.max_bytes

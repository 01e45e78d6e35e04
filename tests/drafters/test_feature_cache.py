"""The feature cache gives what the target gives, whatever the packing, and stays inside its memory."""

from __future__ import annotations

from collections.abc import Callable

import torch

from drafters.feature_cache import FeatureCache
from drafters.packing import Document, pack_documents
from drafters.target import Target


def _documents() -> list[Document]:
    generator = torch.Generator().manual_seed(3)
    lengths = [9, 14, 6]
    return [
        Document(
            torch.randint(5, 60, (n,), generator=generator).tolist(), [False] * 2 + [True] * (n - 2), f"d{i}"
        )
        for i, n in enumerate(lengths)
    ]


def test_equals_the_packed_forward(make_target: Callable[..., Target]) -> None:
    llama_target = make_target()
    batch = pack_documents(_documents(), anchors_per_document=2)
    expected = llama_target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    output = FeatureCache(llama_target, 2**20).forward(batch)
    torch.testing.assert_close(output.hidden_TH, expected.hidden_TH, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(output.features_TC, expected.features_TC, atol=1e-3, rtol=1e-3)


def test_second_visit_is_bit_equal_and_does_not_run_the_target(make_target: Callable[..., Target]) -> None:
    llama_target = make_target()
    documents = _documents()
    cache = FeatureCache(llama_target, 2**20)
    first = cache.forward(pack_documents(documents, anchors_per_document=2))
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    hook = llama_target.model.model.register_forward_pre_hook(count)
    again = cache.forward(pack_documents(documents[::-1], anchors_per_document=2))
    hook.remove()
    assert calls == 0
    length = len(documents[0].token_ids)
    assert torch.equal(again.features_TC[-length:], first.features_TC[:length])
    # and the same as a cache that has never seen another packing
    fresh = FeatureCache(llama_target, 2**20).forward(pack_documents(documents[::-1], anchors_per_document=2))
    assert torch.equal(again.hidden_TH, fresh.hidden_TH)


def test_memory_is_bounded_and_results_are_not_affected(make_target: Callable[..., Target]) -> None:
    llama_target = make_target()
    documents = _documents()
    batch = pack_documents(documents, anchors_per_document=2)
    unlimited = FeatureCache(llama_target, 2**20)
    expected = unlimited.forward(batch)
    limit = unlimited.used_bytes // 2
    cache = FeatureCache(llama_target, limit)
    for _ in range(2):
        output = cache.forward(batch)
        assert torch.equal(output.features_TC, expected.features_TC)
    assert 0 < cache.used_bytes <= limit

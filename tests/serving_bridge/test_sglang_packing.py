"""Compact verification: packing only the verified slots changes nothing about what is accepted.

Shapes: R requests, B block size, V vocabulary, P packed rows, X any width.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving_bridge.sglang_plugin.packing import cap_candidates, packed_rows, scatter_rows

lengths_and_block = st.integers(1, 6).flatmap(
    lambda block: st.tuples(st.lists(st.integers(1, block), min_size=1, max_size=6), st.just(block))
)


def accept(candidates: Sequence[int], predicted: Sequence[int]) -> tuple[int, int]:
    """(drafts accepted, the target's token after them), as greedy verification does it."""
    accepted = 0
    while accepted + 1 < len(candidates) and candidates[accepted + 1] == predicted[accepted]:
        accepted += 1
    return accepted, predicted[accepted]


@given(lengths_and_block)
def test_packed_rows_are_the_first_slots_of_each_block(case: tuple[list[int], int]) -> None:
    lengths, block = case
    dense = [(request, slot) for request in range(len(lengths)) for slot in range(block)]
    expected = [row for row, (request, slot) in enumerate(dense) if slot < lengths[request]]
    assert packed_rows(lengths, block) == expected


@pytest.mark.parametrize("lengths", [[0], [2, 5], [-1, 2], [3, 0]])
def test_a_length_outside_the_block_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="verify_len"):
        packed_rows(lengths, 4)


@given(lengths_and_block, st.integers(0, 3))
def test_scattered_rows_lie_where_they_came_from(case: tuple[list[int], int], padding: int) -> None:
    lengths, block = case
    total = len(lengths) * block
    dense_NX = torch.arange(1, total * 2 + 1, dtype=torch.float32).view(total, 2)
    rows = torch.tensor(packed_rows(lengths, block))
    packed_PX = torch.cat([dense_NX[rows], torch.full((padding, 2), 99.0)])
    scattered = scatter_rows(packed_PX, rows, total)
    kept = set(rows.tolist())
    expected = [dense_NX[row].tolist() if row in kept else [0.0, 0.0] for row in range(total)]
    assert scattered.tolist() == expected


def test_scatter_keeps_the_type_and_the_packed_rows() -> None:
    packed_PX = torch.ones(2, 3, dtype=torch.bfloat16)
    scattered = scatter_rows(packed_PX, torch.tensor([1, 3]), 4)
    assert scattered.dtype == torch.bfloat16
    scattered.zero_()
    assert packed_PX.sum() == 6


@given(lengths_and_block)
def test_only_candidates_beyond_the_length_are_blocked(case: tuple[list[int], int]) -> None:
    lengths, block = case
    candidates_RB = torch.arange(len(lengths) * block).view(len(lengths), block)
    before = candidates_RB.clone()
    expected = [
        [token if slot < length else -1 for slot, token in enumerate(row)]
        for row, length in zip(before.tolist(), lengths, strict=True)
    ]
    assert cap_candidates(candidates_RB, lengths).tolist() == expected
    assert torch.equal(candidates_RB, before), "records log the drafts as they were"


@given(st.data())
def test_packed_verification_accepts_what_the_verified_slots_accept(data: st.DataObject) -> None:
    """Token 0 is what zero rows predict, so a draft of 0 beyond the length is the one that could slip through."""
    lengths, block = data.draw(lengths_and_block)
    vocab = 2
    requests, total = len(lengths), len(lengths) * block
    tokens = st.lists(st.integers(0, vocab - 1), min_size=total, max_size=total)
    candidates_RB = torch.tensor(data.draw(tokens)).view(requests, block)
    predicted = data.draw(tokens)
    logits_NV = torch.full((total, vocab), -2.0)
    logits_NV[torch.arange(total), torch.tensor(predicted)] = -1.0

    rows = torch.tensor(packed_rows(lengths, block))
    packed_PV = torch.cat([logits_NV[rows], torch.randn(2, vocab)])
    scattered = scatter_rows(packed_PV, rows, total).argmax(-1).view(requests, block)
    capped = cap_candidates(candidates_RB, lengths)

    for request, length in enumerate(lengths):
        dense = predicted[request * block : request * block + length]
        expected = accept(candidates_RB[request, :length].tolist(), dense)
        assert accept(capped[request].tolist(), scattered[request].tolist()) == expected

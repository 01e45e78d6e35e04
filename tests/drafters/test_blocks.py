"""Slots, validity and visibility of blocks, compared with hand-written expectations and a direct definition."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.blocks import attention_groups, build_blocks
from drafters.packing import Document, PackedBatch, pack_documents

MASK = 99
BLOCK = 4


def pack(*masks: str, anchors: list[int] | None = None) -> PackedBatch:
    """Documents written as masks (`#` response); tokens are 10, 11, … over the whole row."""
    documents, first = [], 10
    for i, mask in enumerate(masks):
        tokens = list(range(first, first + len(mask)))
        documents.append(Document(tokens, [c == "#" for c in mask], f"d{i}"))
        first += len(mask)
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    if anchors is None:
        return batch
    return PackedBatch(
        batch.input_ids_T,
        batch.document_ids_T,
        batch.position_ids_T,
        batch.response_mask_T,
        torch.tensor(anchors, dtype=torch.long),
        batch.domains,
        batch.document_names,
    )


def test_slots_of_a_block() -> None:
    layout = build_blocks(pack("..####", ".#####", anchors=[2, 7]), BLOCK, MASK)
    assert layout.block_ids_NB.tolist() == [[12, MASK, MASK, MASK], [17, MASK, MASK, MASK]]
    assert layout.positions_NB.tolist() == [[2, 3, 4, 5], [1, 2, 3, 4]]
    assert layout.targets_NB.tolist() == [[2, 3, 4, 5], [7, 8, 9, 10]]
    assert layout.valid_NB.int().tolist() == [[0, 1, 1, 1], [0, 1, 1, 1]]


def test_blocks_at_the_end_of_a_document_keep_all_slots() -> None:
    layout = build_blocks(pack("..###", ".##", anchors=[3, 6]), BLOCK, MASK)
    # slots 2 and 3 of the first block lie in the next document, which is response text, too
    assert layout.valid_NB.int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]
    assert layout.positions_NB.tolist() == [[3, 4, 5, 6], [1, 2, 3, 4]]
    assert layout.block_ids_NB[1].tolist() == [16, MASK, MASK, MASK]
    assert layout.targets_NB.max() < 8


def test_the_next_document_never_counts_even_without_a_prompt() -> None:
    layout = build_blocks(pack("###", "####", anchors=[1, 3]), BLOCK, MASK)
    assert layout.valid_NB.int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 1]]


def test_a_block_counts_up_to_the_end_of_its_turn() -> None:
    # the third token of the first turn is its end-of-turn token; the user's turn and the next answer follow
    layout = build_blocks(pack("..###..##", anchors=[2, 3, 7]), BLOCK, MASK)
    assert layout.valid_NB.int().tolist() == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    # one token of the other side in between: what follows it does not count
    assert build_blocks(pack("##.#", anchors=[0]), BLOCK, MASK).valid_NB.int().tolist() == [[0, 1, 0, 0]]


def test_a_mask_token_in_the_text_is_text() -> None:
    batch = pack("..####", anchors=[2, 3])
    batch.input_ids_T[2] = MASK
    layout = build_blocks(batch, BLOCK, MASK)
    assert layout.block_ids_NB[0].tolist() == [MASK] * 4
    assert layout.valid_NB.int().tolist() == [[0, 1, 1, 1], [0, 1, 1, 0]]


def test_groups_cover_each_document_up_to_its_last_anchor() -> None:
    batch = pack("..####", "...", ".###", anchors=[2, 4, 10])
    first, second = attention_groups(batch, 2)
    assert (first.blocks, first.context) == (slice(0, 2), slice(0, 4))
    assert (second.blocks, second.context) == (slice(2, 3), slice(9, 10))
    assert first.mask is not None
    assert second.mask is not None
    assert first.mask.int().tolist() == [
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 1, 1],
        [1, 1, 1, 1, 0, 0, 1, 1],
    ]
    assert second.mask.int().tolist() == [[1, 1, 1], [1, 1, 1]]


def test_an_anchor_at_the_very_start_sees_only_its_block() -> None:
    (group,) = attention_groups(pack("####", anchors=[0]), 3)
    assert (group.context, group.mask is not None and group.mask.all().item()) == (slice(0, 0), True)


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4),
    st.integers(2, 5),
    st.integers(1, 30),
)
def test_groups_equal_the_definition(masks: list[list[bool]], block_size: int, group_rows: int) -> None:
    batch = pack(*("".join(".#"[on] for on in mask) for mask in masks))
    seen: dict[int, set[tuple[str, int]]] = {}
    for group in attention_groups(batch, block_size, group_rows):
        assert group.mask is not None
        context = range(batch.num_tokens)[group.context]
        blocks = range(batch.num_blocks)[group.blocks]
        keys = [("token", t) for t in context] + [
            ("slot", n * block_size + j) for n in blocks for j in range(block_size)
        ]
        queries = [n * block_size + j for n in blocks for j in range(block_size)]
        assert group.mask.shape == (len(queries), len(keys))
        for query, row in zip(queries, group.mask.tolist(), strict=True):
            assert query not in seen
            seen[query] = {key for key, on in zip(keys, row, strict=True) if on}
    assert len(seen) == batch.num_blocks * block_size
    for query, visible in seen.items():
        n = query // block_size
        anchor = int(batch.anchors_N[n])
        first = int((batch.document_ids_T < batch.document_ids_T[anchor]).sum())
        expected = {("token", t) for t in range(first, anchor)}
        expected |= {("slot", n * block_size + j) for j in range(block_size)}
        assert visible == expected

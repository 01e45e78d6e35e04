"""Documents, anchors and packs."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.errors import UserError
from drafters.packing import AnchorSource, Document, choose_anchors, pack_documents


def document(mask: str, name: str = "d", round_starts: list[int] | None = None) -> Document:
    """One token per character; `#` marks the target's own tokens."""
    return Document(
        list(range(100, 100 + len(mask))), [c == "#" for c in mask], name, round_starts=round_starts
    )


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_anchors_are_response_tokens_followed_by_another() -> None:
    assert document("..###..##.#").anchor_positions() == [2, 3, 7]
    assert document("....").anchor_positions() == []
    assert document("...#").anchor_positions() == []


def test_all_takes_every_candidate_whatever_the_count() -> None:
    assert choose_anchors(document("..####"), 1, "all", None) == [2, 3, 4]


def test_rounds_takes_where_serving_began_a_round() -> None:
    served = document(".." + "#" * 10, round_starts=[5, 2, 5, 0, 11, 40])
    # 0 is in the prompt, 11 is the last token, 40 was cut off; 5 is listed twice
    assert choose_anchors(served, 9, "rounds", None) == [2, 5]
    assert choose_anchors(served, 1, "rounds", generator()) in ([2], [5])


def test_rounds_fall_back_to_random_only_where_they_are_unknown() -> None:
    assert choose_anchors(document("..####"), 9, "rounds", None) == [2, 3, 4]
    assert choose_anchors(document("..####", round_starts=[]), 9, "rounds", None) == []


@given(
    st.lists(st.booleans(), min_size=12, max_size=40),
    st.integers(0, 5),
    st.sampled_from(get_args(AnchorSource)),
    st.integers(0, 3),
)
def test_anchors_are_sorted_distinct_candidates(
    mask: list[bool], count: int, source: AnchorSource, seed: int
) -> None:
    doc = Document([0] * len(mask), mask, "d", round_starts=list(range(0, len(mask), 3)))
    chosen = choose_anchors(doc, count, source, generator(seed))
    candidates = doc.anchor_positions()
    if source == "rounds":
        candidates = [c for c in candidates if c % 3 == 0]
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(candidates)
    assert len(chosen) == (len(candidates) if source == "all" else min(count, len(candidates)))


def test_random_anchors_reach_every_candidate_and_follow_the_generator() -> None:
    doc = document("." + "#" * 12)
    seen = {a for seed in range(40) for a in choose_anchors(doc, 3, "random", generator(seed))}
    assert seen == set(doc.anchor_positions())
    assert choose_anchors(doc, 3, "random", generator(1)) == choose_anchors(doc, 3, "random", generator(1))


def test_packing_is_per_document() -> None:
    short, silent, long = (
        document(".###", "short"),
        document("...", "silent"),
        document("." + "#" * 30, "long"),
    )
    batch = pack_documents([short, silent, long], anchors_per_document=4, generator=generator())
    assert batch.input_ids_T.tolist() == [*short.token_ids, *silent.token_ids, *long.token_ids]
    assert batch.document_ids_T.tolist() == [0] * 4 + [1] * 3 + [2] * 31
    assert batch.position_ids_T.tolist() == [*range(4), *range(3), *range(31)]
    assert batch.response_mask_T.tolist() == [
        *short.response_mask,
        *silent.response_mask,
        *long.response_mask,
    ]
    assert batch.document_lengths() == [4, 3, 31]
    assert batch.document_names == ["short", "silent", "long"]
    anchors = batch.anchors_N.tolist()
    assert anchors[:2] == [1, 2], "a short document keeps all of its few anchors, none is repeated"
    assert len(anchors) == 2 + 4
    assert anchors == sorted(anchors)
    assert all(8 <= a < 37 for a in anchors[2:])


def test_truncation_cuts_tokens_mask_and_rounds_alike() -> None:
    cut = document("..####", round_starts=[2, 4]).truncated(4)
    assert (cut.token_ids, cut.response_mask, cut.round_starts) == (
        [100, 101, 102, 103],
        [False, False, True, True],
        [2],
    )
    whole = document("..##")
    assert whole.truncated(4) is whole


def test_bad_documents_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="broken"):
        Document([1, 2, 3], [True], "broken")
    with pytest.raises(UserError, match="empty"):
        pack_documents([], anchors_per_document=1)
    with pytest.raises(UserError, match="hollow"):
        pack_documents([document("#"), document("", "hollow")], anchors_per_document=1)

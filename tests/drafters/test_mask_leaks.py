"""What a block may know: everything strictly before its anchor and the anchor, nothing else.

Perturbations go through the real modules: the target's packed forward, then the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from drafters.block_loss import BlockTargets, block_loss
from drafters.blocks import attention_groups, build_blocks
from drafters.dflash import DFlashDrafter
from drafters.fill import fill_blocks
from drafters.objectives import LossSpec
from drafters.packing import Document, PackedBatch, pack_documents
from drafters.target import Target

LENGTHS = [17, 12, 14]
ANCHORS = [5, 8, 9, 17 + 7, 29 + 6, 29 + 11]
OWNER = [0, 0, 0, 1, 2, 2]
BLOCK = 4


class Setup:
    """Three documents in one pack, with close and overlapping blocks."""

    def __init__(self, target: Target, drafter: DFlashDrafter) -> None:
        self.target, self.drafter = target, drafter
        generator = torch.Generator().manual_seed(5)
        self.documents = [
            Document(
                torch.randint(0, 60, (length,), generator=generator).tolist(),
                [i >= 4 for i in range(length)],
                f"d{length}",
            )
            for length in LENGTHS
        ]
        packed = pack_documents(self.documents, anchors_per_document=0, anchor_source="all")
        self.batch = replace(packed, anchors_N=torch.tensor(ANCHORS))

    def hidden(self, batch: PackedBatch | None = None) -> torch.Tensor:
        batch = batch or self.batch
        output = self.target.forward_packed(batch.input_ids_T, batch.position_ids_T)
        with torch.no_grad():
            return fill_blocks(self.drafter, self.target, batch, output.features_TC).hidden_NBH

    def with_token(self, index: int) -> PackedBatch:
        ids = self.batch.input_ids_T.clone()
        ids[index] = (ids[index] + 17) % 60
        return replace(self.batch, input_ids_T=ids)


@pytest.fixture
def setup(kind: str, make_target: Callable[..., Target], make_drafter: Callable[..., DFlashDrafter]) -> Setup:
    target = make_target(kind, torch.float64)
    return Setup(target, make_drafter(target, block_size=BLOCK))


def test_each_token_reaches_exactly_the_blocks_anchored_at_or_after_it(setup: Setup) -> None:
    base = setup.hidden()
    starts = [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]]
    for token in range(setup.batch.num_tokens):
        moved = (setup.hidden(setup.with_token(token)) - base).abs().amax(dim=(1, 2))
        for n, anchor in enumerate(ANCHORS):
            first = starts[OWNER[n]]
            if first <= token <= anchor:
                assert moved[n] > 1e-4, f"token {token} should reach block {n}"
            else:
                assert moved[n] < 1e-9, f"token {token} leaked into block {n}"


def test_every_slot_of_a_block_hears_the_anchor_and_the_context(setup: Setup) -> None:
    base = setup.hidden()
    for token in (ANCHORS[1], ANCHORS[1] - 1):
        moved = (setup.hidden(setup.with_token(token)) - base).abs().amax(dim=2)[1]
        assert (moved > 1e-5).all()


def test_the_anchors_own_features_are_not_among_the_keys(setup: Setup) -> None:
    """Serving does not have them yet: the anchor has not been through the target."""
    output = setup.target.forward_packed(setup.batch.input_ids_T, setup.batch.position_ids_T)
    base = setup.hidden()
    features = output.features_TC.clone()
    features[ANCHORS[1]] += 1.0
    with torch.no_grad():
        hidden = fill_blocks(setup.drafter, setup.target, setup.batch, features).hidden_NBH
    moved = (hidden - base).abs().amax(dim=(1, 2))
    assert moved[1] < 1e-9
    assert moved[2] > 1e-4, "the next block, anchored later, does see them"


def test_blocks_do_not_see_each_other(setup: Setup) -> None:
    batch, drafter = setup.batch, setup.drafter
    output = setup.target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    layout = build_blocks(batch, BLOCK, drafter.spec.mask_token_id)
    embeddings = setup.target.embed(layout.block_ids_NB)
    context = drafter.context_key_values(output.features_TC, batch.position_ids_T)
    groups = attention_groups(batch, BLOCK)
    with torch.no_grad():
        base = drafter(embeddings, layout.positions_NB, context, groups)
        for n in range(len(ANCHORS)):
            for slot in (0, BLOCK - 1):
                changed = embeddings.clone()
                changed[n, slot] += 1.0
                moved = (drafter(changed, layout.positions_NB, context, groups) - base).abs().amax(dim=2)
                assert (moved[n] > 1e-5).all(), "attention inside a block goes both ways"
                moved[n] = 0
                assert moved.max() < 1e-9


def test_a_block_does_not_depend_on_which_others_are_drafted(setup: Setup) -> None:
    base = setup.hidden()
    for n, anchor in enumerate(ANCHORS):
        alone = setup.hidden(replace(setup.batch, anchors_N=torch.tensor([anchor])))
        torch.testing.assert_close(alone[0], base[n], rtol=0, atol=1e-9)


def test_a_pack_equals_one_document_at_a_time(setup: Setup) -> None:
    batch = setup.batch
    packed = setup.target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    base = setup.hidden()
    first = 0
    for i, document in enumerate(setup.documents):
        anchors = [a - first for a, owner in zip(ANCHORS, OWNER, strict=True) if owner == i]
        single = replace(
            pack_documents([document], anchors_per_document=0, anchor_source="all"),
            anchors_N=torch.tensor(anchors),
        )
        alone = setup.target.forward_packed(single.input_ids_T, single.position_ids_T)
        rows = slice(first, first + len(document.token_ids))
        torch.testing.assert_close(packed.hidden_TH[rows], alone.hidden_TH, rtol=0, atol=1e-9)
        torch.testing.assert_close(packed.features_TC[rows], alone.features_TC, rtol=0, atol=1e-9)
        owned = [n for n, owner in enumerate(OWNER) if owner == i]
        torch.testing.assert_close(base[owned], setup.hidden(single), rtol=0, atol=1e-9)
        first += len(document.token_ids)


def test_a_pack_without_anchors_drafts_and_teaches_nothing(setup: Setup) -> None:
    """A response of a single token has nothing to predict."""
    target = setup.target
    empty = replace(setup.batch, anchors_N=torch.zeros(0, dtype=torch.long))
    output = target.forward_packed(empty.input_ids_T, empty.position_ids_T)
    filled = fill_blocks(setup.drafter, target, empty, output.features_TC)
    assert filled.hidden_NBH.shape == (0, BLOCK, target.config.hidden_size)
    loss = block_loss(
        filled.hidden_NBH,
        target.head_VH,
        BlockTargets.from_layout(empty, filled.layout),
        LossSpec(objective="opd"),
        teacher_hidden_TH=output.hidden_TH,
    ).value
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in setup.drafter.parameters())

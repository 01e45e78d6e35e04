"""Training over part of the vocabulary is training with the other tokens' logits at minus infinity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafters.block_loss import BlockTargets, block_loss, served_matches
from drafters.dflash import DFlashDrafter
from drafters.fill import fill_blocks
from drafters.objectives import LossSpec, Objective
from drafters.packing import Document, pack_documents
from drafters.training_vocabulary import TrainingVocabulary
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.optim import OptimSpec


def test_documents_first_then_the_tokenizers_first_tokens() -> None:
    documents = [Document([9, 4, 9], [False, True, True], "a"), Document([7], [True], "b")]
    kept = TrainingVocabulary.of(documents, vocab_size=12, size=6)
    assert kept.ids_U.tolist() == [0, 1, 2, 4, 7, 9]
    assert kept.index(torch.tensor([[9, 0], [3, 4]])).tolist() == [[5, 0], [-1, 3]]
    assert TrainingVocabulary.of(documents, vocab_size=12, size=2).ids_U.tolist() == [4, 7, 9]
    assert TrainingVocabulary.of(documents, vocab_size=12, size=99).ids_U.tolist() == list(range(12))


@pytest.mark.parametrize("objective", ["ce", "osd", "opd"])
def test_the_loss_is_that_of_the_kept_tokens_alone(
    objective: Objective, trained: Any, make_drafter: Callable[..., DFlashDrafter]
) -> None:
    target, documents = trained.target, trained.documents[:3]
    drafter = make_drafter(target, seed=4).requires_grad_()
    spec = LossSpec(objective=objective)
    size = len({t for d in documents for t in d.token_ids}) + 5
    kept = TrainingVocabulary.of(documents, target.config.vocab_size, size)
    assert kept.ids_U.numel() == size < target.config.vocab_size
    module = BlockTrainingModule(
        drafter, target, spec, OptimSpec(), vocabulary=kept, feature_cache_bytes=10**8, teacher_labels=True
    )
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    loss, _, _ = module.block_step(batch)
    loss.value.backward()
    got = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}

    # the whole head, with one more input that drives the other tokens' logits to nothing
    drafter.zero_grad()
    output = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    filled = fill_blocks(drafter, target, batch, output.features_TC)
    penalty_V = torch.full((target.config.vocab_size, 1), -1e4)
    penalty_V[kept.ids_U] = 0

    def widened(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)

    expected = block_loss(
        widened(filled.hidden_NBH),
        torch.cat([target.head_VH, penalty_V.to(target.head_VH)], dim=1),
        BlockTargets.from_layout(batch, filled.layout),
        spec,
        teacher_hidden_TH=widened(output.hidden_TH),
    )
    expected.value.backward()
    torch.testing.assert_close(loss.value, expected.value, rtol=1e-4, atol=1e-5)
    assert torch.equal(loss.match_NB, expected.match_NB)
    assert loss.labels_agree == expected.labels_agree == 1
    for name, parameter in drafter.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(got[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [None, 3])
def test_served_matches_are_those_of_the_whole_head(
    chunk_rows: int | None, trained: Any, make_drafter: Callable[..., DFlashDrafter]
) -> None:
    """What the length head learns from must not depend on the loss's part of the vocabulary."""
    target, documents = trained.target, trained.documents[:3]
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    output = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    with torch.no_grad():
        filled = fill_blocks(make_drafter(target, seed=4), target, batch, output.features_TC)
    targets = BlockTargets.from_layout(batch, filled.layout)
    expected = block_loss(filled.hidden_NBH, target.head_VH, targets, LossSpec()).match_NB
    assert expected.any() and not expected[targets.valid_NB].all()
    assert torch.equal(served_matches(filled.hidden_NBH, target.head_VH, targets, chunk_rows), expected)


def test_another_vocabulary_forgets_what_was_made_for_the_old_one(
    trained: Any, make_drafter: Callable[..., DFlashDrafter]
) -> None:
    """Kept moments belong to the tokens they were summed over."""
    target, documents = trained.target, trained.documents[:2]
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    drafter = make_drafter(target, seed=4)
    tokens = {t for d in documents for t in d.token_ids}
    small, large = (
        TrainingVocabulary.of(documents, target.config.vocab_size, len(tokens) + extra) for extra in (1, 9)
    )

    def loss_of(*vocabularies: TrainingVocabulary) -> float:
        module = BlockTrainingModule(
            drafter, target, LossSpec(objective="osd"), OptimSpec(), feature_cache_bytes=10**8
        )
        for vocabulary in vocabularies:
            module.use_vocabulary(vocabulary)
            value = float(module.block_step(batch)[0].value.detach())
        return value

    assert loss_of(small, large) == loss_of(large) != loss_of(small)

"""The acceptance head learns beside the length head and beside the drafter, from whole blocks, and disturbs neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.acceptance_head import AcceptanceHead, acceptance_labels, confident_argmax
from drafters.block_loss import served_matches
from drafters.fill import draft_head
from drafters.length_head import LengthHead
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch, pack_documents
from drafters.target import Target
from drafters.training_vocabulary import TrainingVocabulary
from lightning_modules.length_head import LengthHeadModule
from lightning_modules.opd import OPDModule
from lightning_modules.optim import OptimSpec
from tests.lightning_modules.test_block_training import train
from tests.lightning_modules.training_samples import (
    BLOCK_SIZE,
    greedy_documents,
    make_documents,
    make_drafter,
    make_head,
    make_target,
)

FAST = OptimSpec(lr=1e-2, head_lr=2e-2, warmup_steps=1)


def acceptance_head(target: Target, confidence: bool = True) -> AcceptanceHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return AcceptanceHead(target.config.hidden_size, BLOCK_SIZE, 8, confidence=confidence)


def every_anchor(target: Target) -> PackedBatch:
    return pack_documents(greedy_documents(target, 3), anchors_per_document=0, anchor_source="all")


def fitted(target: Target, with_acceptance: bool, confidence: bool = True) -> LengthHeadModule:
    head = acceptance_head(target, confidence) if with_acceptance else None
    return LengthHeadModule(make_head(target), make_drafter(target), target, FAST, head)


@pytest.mark.parametrize("confidence", [True, False])
def test_blocks_carry_labels_and_confidence_of_the_drafts(confidence: bool) -> None:
    target = make_target()
    module, batch = fitted(target, True, confidence), every_anchor(target)
    blocks = module.blocks(batch)
    alone = fitted(target, False)
    without = alone.blocks(batch)
    assert torch.equal(blocks.accepted_N, without.accepted_N)
    assert torch.equal(blocks.complete_N, without.complete_N)
    assert torch.equal(module.length_features(blocks.filled), alone.length_features(without.filled))
    if not confidence:
        assert blocks.confidence_ND is None
        return
    assert blocks.confidence_ND is not None
    logits = blocks.filled.hidden_NBH[:, 1:].double() @ draft_head(make_drafter(target), target).double().T
    best = logits.log_softmax(dim=-1).amax(dim=-1)
    torch.testing.assert_close(blocks.confidence_ND.double(), best, atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_cross_entropy_over_reached_slots() -> None:
    target = make_target()
    module, batch = fitted(target, True), every_anchor(target)
    blocks = module.blocks(batch)
    assert module.acceptance_head is not None
    predicted = module.acceptance_head(blocks.filled.hidden_NBH, blocks.confidence_ND)
    terms = []
    for n in range(batch.num_blocks):
        for j in range(1, BLOCK_SIZE):
            if not blocks.valid_NB[n, j]:
                break
            hit = bool(blocks.match_NB[n, j])
            p = predicted[n, j - 1]
            terms.append(-(p if hit else 1 - p).log())
            if not hit:
                break
    both = module.training_step(batch, 0).item()
    alone = fitted(target, False).training_step(batch, 0).item()
    assert both - alone == pytest.approx(float(torch.stack(terms).detach().mean()), rel=1e-4)


def test_neither_the_drafter_nor_the_length_head_feels_it(tmp_path: Path) -> None:
    """Gradients are clipped to each part's own norm, or a head's would shrink the others'."""
    target = make_target()
    weights: dict[bool, dict[str, torch.Tensor]] = {}
    for present in (False, True):
        head = acceptance_head(target) if present else None
        module = OPDModule(
            make_drafter(target), target, LossSpec("opd"), FAST, make_head(target), acceptance_head=head
        )
        train(tmp_path / f"opd{present}", module, make_documents(6), steps=5, clip_norm=0.05)
        weights[present] = {
            name: p.detach().clone()
            for name, p in module.named_parameters()
            if not name.startswith("acceptance_head")
        }
        if head is not None:
            before = dict(acceptance_head(target).named_parameters())
            assert all(not torch.equal(p, before[name]) for name, p in head.named_parameters())
            assert head.calibration.tolist() == [1.0, 0.0]
    assert weights[False].keys() == weights[True].keys()
    for name, weight in weights[False].items():
        assert torch.equal(weight, weights[True][name]), name


def test_online_and_offline_fits_have_one_loss() -> None:
    target, batch = (
        make_target(),
        pack_documents(make_documents(3), anchors_per_document=0, anchor_source="all"),
    )
    alone = OPDModule(make_drafter(target), target, LossSpec("opd"), FAST)
    beside = OPDModule(
        make_drafter(target), target, LossSpec("opd"), FAST, acceptance_head=acceptance_head(target)
    )
    online = beside.training_step(batch, 0).item() - alone.training_step(batch, 0).item()
    offline = (
        fitted(target, True).training_step(batch, 0).item()
        - fitted(target, False).training_step(batch, 0).item()
    )
    assert online == pytest.approx(offline, rel=1e-3)


@pytest.mark.parametrize("part", [True, False])
def test_online_labels_take_one_pass_over_the_slots_inside_the_text(
    part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, documents = make_target(), make_documents(3)
    vocabulary = TrainingVocabulary.of(documents, target.config.vocab_size, 40) if part else None
    module = OPDModule(
        make_drafter(target),
        target,
        LossSpec("opd"),
        FAST,
        make_head(target),
        acceptance_head=acceptance_head(target),
        vocabulary=vocabulary,
    )
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    with torch.no_grad():
        loss, targets, filled = module.block_step(batch)
    passes = []

    def counted(hidden_RH: torch.Tensor, head_VH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        passes.append(len(hidden_RH))
        return confident_argmax(hidden_RH, head_VH)

    def again(*_: Any) -> torch.Tensor:
        raise AssertionError("the drafts are known")

    monkeypatch.setattr("lightning_modules.opd.confident_argmax", counted)
    monkeypatch.setattr("lightning_modules.opd.served_matches", again)
    match_NB, confidence_ND = module._labels(loss, targets, filled)
    assert passes == [int(targets.valid_NB.sum())] and passes[0] < batch.num_blocks * (BLOCK_SIZE - 1)
    assert torch.equal(match_NB, served_matches(filled.hidden_NBH, target.head_VH, targets))
    logits = filled.hidden_NBH[:, 1:].double() @ target.head_VH.double().T
    best = logits.log_softmax(dim=-1).amax(dim=-1)
    inside = targets.valid_NB[:, 1:]
    assert confidence_ND is not None
    torch.testing.assert_close(confidence_ND[inside].double(), best[inside], atol=1e-5, rtol=1e-5)
    module.training_step(batch, 0)
    assert len(passes) == 2


@pytest.mark.parametrize("confidence", [True, False])
def test_fitting_lowers_the_loss_on_a_learnt_drafter(tmp_path: Path, confidence: bool) -> None:
    target = make_target()
    documents = greedy_documents(target, 5)
    drafter = make_drafter(target)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-2)
    teacher = OPDModule(drafter, target, LossSpec("opd"), FAST)
    batch = pack_documents(documents[:3], anchors_per_document=0, anchor_source="all")
    for _ in range(40):
        optimizer.zero_grad()
        teacher.block_step(batch)[0].value.backward()
        optimizer.step()
    head = acceptance_head(target, confidence)
    module = LengthHeadModule(make_head(target), drafter, target, FAST, head)
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    blocks = module.blocks(batch)
    labels, counted = acceptance_labels(blocks.match_NB, blocks.valid_NB)
    share = labels[counted].float().mean()
    assert 0.2 < share < 0.9, "both outcomes must occur"

    def loss() -> float:
        with torch.no_grad():
            predicted = head(blocks.filled.hidden_NBH, blocks.confidence_ND)[counted]
            return float(torch.nn.functional.binary_cross_entropy(predicted, labels[counted].float()))

    constant = float(
        torch.nn.functional.binary_cross_entropy(share.expand(counted.sum()), labels[counted].float())
    )
    train(tmp_path, module, documents, steps=60)
    assert loss() < 0.8 * constant
    tokens, _ = confident_argmax(blocks.filled.hidden_NBH.flatten(0, 1), draft_head(drafter, target))
    assert torch.equal(
        (tokens.view(blocks.match_NB.shape) == batch.input_ids_T[blocks.filled.layout.targets_NB])
        & blocks.valid_NB,
        blocks.match_NB,
    )


def test_a_length_head_alone_is_fitted_as_before(tmp_path: Path) -> None:
    target: Any = make_target()
    heads: list[LengthHead] = []
    for present in (False, True):
        module = fitted(target, present)
        train(tmp_path / str(present), module, make_documents(6), steps=5, clip_norm=0.01)
        heads.append(module.length_head)
    for name, weight in heads[0].state_dict().items():
        assert torch.equal(weight, heads[1].state_dict()[name]), name

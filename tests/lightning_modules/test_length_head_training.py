"""Drafter and length head learn side by side without feeling each other; labels are those of whole blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.fill import fill_blocks
from drafters.length_head import LengthHead, length_loss
from drafters.objectives import LossSpec
from drafters.packing import Document, PackedBatch, pack_documents
from drafters.target import Target
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


def distillation(target: Target, head: LengthHead | None) -> OPDModule:
    return OPDModule(make_drafter(target), target, LossSpec("opd"), FAST, head)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def a_batch() -> PackedBatch:
    return pack_documents(make_documents(3), anchors_per_document=0, anchor_source="all")


@pytest.mark.parametrize("features", ["hidden", "embedding"])
def test_losses_reach_only_their_own_network(features: Any) -> None:
    target, batch = make_target(), a_batch()
    alone, beside = distillation(target, None), distillation(target, make_head(target, features=features))
    alone.training_step(batch, 0).backward()
    beside.training_step(batch, 0).backward()
    expected, found = gradients(alone.drafter), gradients(beside.drafter)
    assert expected.keys() == found.keys() == dict(alone.drafter.named_parameters()).keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    head = make_head(target, features=features)
    module = LengthHeadModule(head, make_drafter(target), target, FAST)
    module.training_step(batch, 0).backward()
    assert beside.length_head is not None
    for name, gradient in gradients(head).items():
        torch.testing.assert_close(gradients(beside.length_head)[name], gradient, msg=name)
        assert gradient.any(), name
    assert not gradients(module.frozen_drafter[0])


def test_the_drafter_trains_the_same_with_and_without_a_head(tmp_path: Path) -> None:
    """Also where gradients are clipped: a norm over both would let the head's gradient shrink the drafter's."""
    target = make_target()
    alone, beside = distillation(target, None), distillation(target, make_head(target))
    for name, module in (("alone", alone), ("beside", beside)):
        train(tmp_path / name, module, make_documents(6), steps=6, clip_norm=0.05)
    before = make_head(target)
    assert beside.length_head is not None
    for name, parameter in alone.drafter.named_parameters():
        assert torch.equal(beside.drafter.get_parameter(name), parameter), name
    for name, parameter in beside.length_head.named_parameters():
        assert not torch.equal(before.get_parameter(name), parameter), name


def test_gradients_are_clipped_to_the_norm() -> None:
    target = make_target()
    module = distillation(target, make_head(target))
    module.training_step(a_batch(), 0).backward()
    module.configure_gradient_clipping(torch.optim.SGD(module.parameters()), 0.01)
    for part in (module.drafter, module.length_head):
        assert part is not None
        norm = torch.stack([g.norm() for g in gradients(part).values()]).norm()
        assert float(norm) == pytest.approx(0.01, rel=1e-3)
    before = gradients(module)
    module.configure_gradient_clipping(torch.optim.SGD(module.parameters()), 1.0)
    assert all(torch.equal(g, before[name]) for name, g in gradients(module).items())


def test_optimizer_groups_of_drafter_and_head_have_their_own_rate() -> None:
    target = make_target()
    module = distillation(target, make_head(target))
    optimizer = module.configure_optimizers()["optimizer"]
    rate_of = {id(p): g["initial_lr"] for g in optimizer.param_groups for p in g["params"]}
    assert {rate_of[id(p)] for p in module.drafter.parameters()} == {1e-2}
    assert module.length_head is not None
    assert {rate_of[id(p)] for p in module.length_head.parameters()} == {2e-2}
    alone = LengthHeadModule(make_head(target), make_drafter(target), target, FAST)
    optimizer = alone.configure_optimizers()["optimizer"]
    assert {g["initial_lr"] for g in optimizer.param_groups} == {2e-2}
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(alone.length_head.parameters()))


def brute_force_labels(
    module: LengthHeadModule, documents: list[Document], batch: PackedBatch
) -> list[tuple[int, bool]]:
    """Accepted drafts of each block, and whether they are known in full: one block at a time, token by token."""
    target, drafter = module.target, module.frozen_drafter[0]
    labels, first = [], 0
    for document in documents:
        end = first + len(document.token_ids)
        for anchor in [a - first for a in batch.anchors_N.tolist() if first <= a < end]:
            single = pack_documents([document], anchors_per_document=0)
            single = PackedBatch(**{**vars(single), "anchors_N": torch.tensor([anchor])})
            output = target.forward_packed(single.input_ids_T, single.position_ids_T)
            hidden = fill_blocks(drafter, target, single, output.features_TC).hidden_NBH[0]
            drafts = target.logits(hidden).argmax(-1).tolist()
            accepted, complete = 0, True
            for slot in range(1, drafter.block_size):
                position = anchor + slot
                if position >= len(document.token_ids) or not document.response_mask[position]:
                    complete = False
                    break
                if drafts[slot] != document.token_ids[position]:
                    break
                accepted += 1
            labels.append((accepted, complete))
        first = end
    return labels


@pytest.fixture(scope="module")
def trained() -> tuple[Target, Any, list[Document]]:
    """A drafter that has learned some greedy texts, so that rounds of all lengths occur."""
    target = make_target()
    documents = greedy_documents(target, 5)
    module = distillation(target, None)
    optimizer = torch.optim.AdamW(module.drafter.parameters(), lr=2e-2)
    batch = pack_documents(documents[:3], anchors_per_document=0, anchor_source="all")
    for _ in range(40):
        optimizer.zero_grad()
        module.block_step(batch)[0].value.backward()
        optimizer.step()
    return target, module.drafter, documents


@pytest.mark.parametrize("features", ["hidden", "embedding"])
def test_labels_are_those_of_whole_blocks(features: Any, trained: Any) -> None:
    target, drafter, documents = trained
    two_turns = Document(
        documents[0].token_ids,
        [*documents[0].response_mask[:9], False, False, *documents[0].response_mask[11:]],
        "t",
    )
    documents = [*documents, two_turns]
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    module = LengthHeadModule(make_head(target, features=features), drafter, target, FAST)
    blocks = module.blocks(batch)
    inputs, accepted_N, complete_N = (
        module.length_features(blocks.filled),
        blocks.accepted_N,
        blocks.complete_N,
    )
    expected = brute_force_labels(module, documents, batch)
    assert list(zip(accepted_N.tolist(), complete_N.tolist(), strict=True)) == expected
    assert {accepted for accepted, complete in expected if complete} == set(range(BLOCK_SIZE))
    assert any(not complete for _, complete in expected)
    assert inputs.shape == (batch.num_blocks, BLOCK_SIZE, target.config.hidden_size)
    embedded = target.embed(batch.input_ids_T[batch.anchors_N])
    assert torch.equal(inputs[:, 0], embedded) == (features == "embedding")
    assert not inputs.requires_grad


def test_the_loss_is_the_error_over_complete_blocks(trained: Any) -> None:
    target, drafter, documents = trained
    batch = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    module = LengthHeadModule(make_head(target), drafter, target, FAST)
    predicted = module.length_head(module.length_features(module.blocks(batch).filled))
    errors = [
        (float(p) - (1 + accepted) / BLOCK_SIZE) ** 2
        for p, (accepted, complete) in zip(
            predicted, brute_force_labels(module, documents, batch), strict=True
        )
        if complete
    ]
    assert module.training_step(batch, 0).item() == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    alone = OPDModule(drafter, target, LossSpec("opd"), FAST)
    beside = OPDModule(drafter, target, LossSpec("opd"), FAST, module.length_head)
    difference = beside.training_step(batch, 0).item() - alone.training_step(batch, 0).item()
    assert difference == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_fitting_the_head_leaves_the_drafter_alone(tmp_path: Path, trained: Any) -> None:
    target, drafter, documents = trained
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    module = LengthHeadModule(make_head(target), drafter.train(), target, FAST)
    assert not drafter.training
    blocks = module.blocks(pack_documents(documents, anchors_per_document=0, anchor_source="all"))
    features = module.length_features(blocks.filled)

    def error() -> float:
        with torch.no_grad():
            return float(
                length_loss(module.length_head(features), blocks.accepted_N, blocks.complete_N, BLOCK_SIZE)
            )

    first = error()
    train(tmp_path, module, documents, steps=40)
    assert error() < 0.7 * first
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, before[name]), name
    assert all(name.startswith("length_head.") for name in module.state_dict())

"""Block training: every objective and clip mode trains, distillation lowers the loss, the target stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from datamodules.offline import OfflineDataModule
from datamodules.packed_loader import PackingSpec
from drafters.block_loss import BlockTargets, block_loss
from drafters.fill import fill_blocks
from drafters.objectives import LossSpec
from drafters.packing import Document, pack_documents
from drafters.replay import replay, total_acceptance_length
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.opd import OPDModule
from lightning_modules.optim import OptimSpec
from pipeline.config import FitConfig
from pipeline.fitting import fit, stage_trainer
from tests.lightning_modules.training_samples import (
    greedy_documents,
    make_document,
    make_documents,
    make_drafter,
    make_target,
)

FAST = OptimSpec(lr=1e-2, warmup_steps=1)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if "train/loss" in trainer.callback_metrics:
            self.values.append(float(trainer.callback_metrics["train/loss"]))
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}


def train(
    directory: Path,
    module: L.LightningModule,
    documents: list[Document],
    *,
    steps: int,
    validation: list[Document] | None = None,
    precision: str = "32-true",
    clip_norm: float = 1.0,
    packing: PackingSpec | None = None,
) -> Losses:
    settings = FitConfig(
        steps=steps, validate_every=steps, precision=precision, optim={"clip_norm": clip_norm}
    )
    losses = Losses()
    trainer = stage_trainer(
        directory, settings, logger=False, callbacks=[losses], validate=validation is not None
    )
    packing = packing or PackingSpec(64, 6, "random", 64)
    fit(trainer, module, OfflineDataModule(documents, validation or [], packing, seed=3), None)
    return losses


SPECS = [
    *(LossSpec("opd", clip=clip) for clip in ("entry", "position", "position_normalised", "bounded", "none")),
    LossSpec("opd", clip="bounded", weighting="survival", temperature=2.0),
    LossSpec("opd", clip="none", alpha=0.0, weighting="uniform"),
    LossSpec("osd"),
    LossSpec("ce", weighting="survival"),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.objective}-{s.clip}-{s.weighting}-{s.alpha}")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_every_objective_trains(spec: LossSpec, precision: str, tmp_path: Path) -> None:
    target = make_target()
    module = BlockTrainingModule(make_drafter(target), target, spec, FAST)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    train(tmp_path, module, make_documents(6), steps=4, precision=precision)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.isfinite(parameter).all(), name
        assert not torch.equal(parameter, before[name]), name


def test_distillation_lowers_the_loss_and_raises_acceptance(tmp_path: Path) -> None:
    target = make_target()
    documents = greedy_documents(target, 4)
    module = OPDModule(make_drafter(target), target, LossSpec("opd"), FAST)
    before = total_acceptance_length(replay(module.drafter, target, documents))
    losses = train(
        tmp_path,
        module,
        documents,
        steps=30,
        validation=documents,
        packing=PackingSpec(200, 99, "random", 64),
    )
    assert losses.values[-1] < 0.6 * losses.values[0]
    after = total_acceptance_length(replay(module.drafter, target, documents))
    assert after > before + 0.2


def test_validation_logs_the_replayed_acceptance_length(tmp_path: Path) -> None:
    target = make_target()
    documents = greedy_documents(target, 3)
    module = OPDModule(make_drafter(target), target, LossSpec("opd"), FAST)
    trainer_metrics: dict[str, float] = {}

    class Read(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trainer_metrics.update({k: float(v) for k, v in trainer.callback_metrics.items()})
            tau = total_acceptance_length(replay(module.drafter, target, documents))
            assert trainer_metrics["val/acceptance_length"] == pytest.approx(tau)
            rate = (tau - 1) / (module.drafter.block_size - 1)
            assert trainer_metrics["val/acceptance_rate"] == pytest.approx(rate, abs=1e-6)

    settings = FitConfig(steps=6, validate_every=2, precision="32-true")
    trainer = stage_trainer(tmp_path, settings, logger=False, callbacks=[Read()], validate=True)
    fit(trainer, module, OfflineDataModule(documents, documents, PackingSpec(1, 6), seed=3), None)
    assert trainer_metrics


def test_the_target_is_frozen_shared_and_not_in_checkpoints(tmp_path: Path) -> None:
    target = make_target()
    module = OPDModule(make_drafter(target), target, LossSpec("opd"), FAST)
    before = {name: p.clone() for name, p in target.model.state_dict().items()}
    train(tmp_path, module, make_documents(4), steps=3)
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(name.startswith("drafter.") for name in module.state_dict())
    assert all(p.grad is None for p in target.model.parameters())


@pytest.mark.parametrize("cached", [False, True])
def test_the_logged_metrics_describe_the_batch(cached: bool, tmp_path: Path) -> None:
    target = make_target()
    drafter = make_drafter(target)
    [document] = make_documents(1)
    batch = pack_documents([document], anchors_per_document=0, anchor_source="all")
    output = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    filled = fill_blocks(drafter, target, batch, output.features_TC)
    drafts_NB = target.logits(filled.hidden_NBH.flatten(0, 1)).argmax(-1).view(filled.hidden_NBH.shape[:2])
    right = counted = accepted = 0
    for row, anchor in enumerate(batch.anchors_N.tolist()):
        running = True
        for slot in range(1, drafter.block_size):
            if anchor + slot >= batch.num_tokens:
                break
            hit = int(drafts_NB[row, slot]) == document.token_ids[anchor + slot]
            counted += 1
            right += hit
            running = running and hit
            accepted += running
    targets = BlockTargets.from_layout(batch, filled.layout)
    loss = block_loss(filled.hidden_NBH, target.head_VH, targets, LossSpec()).value
    module = BlockTrainingModule(
        drafter, target, LossSpec(), FAST, feature_cache_bytes=10_000 if cached else 0
    )
    packing = PackingSpec(1, 99, "random", 64)
    metrics = train(tmp_path, module, [document], steps=1, packing=packing).metrics
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/accuracy"] == pytest.approx(right / counted)
    assert metrics["train/block_acceptance"] == pytest.approx(1 + accepted / batch.num_blocks)


def test_sampled_text_is_trained_on_the_targets_own_choice() -> None:
    """With teacher labels, a served token that is not the target's greedy one is no label."""
    target = make_target()
    batch = pack_documents([make_document(3, 12)], anchors_per_document=0, anchor_source="all")
    losses = {}
    for teacher in (False, True):
        module = BlockTrainingModule(make_drafter(target), target, LossSpec(), FAST, teacher_labels=teacher)
        losses[teacher] = module.block_step(batch)[0]
    assert losses[False].labels_agree == 1.0
    assert losses[True].labels_agree < 0.5
    assert losses[True].value.item() != pytest.approx(losses[False].value.item())


def test_a_batch_without_blocks_changes_nothing() -> None:
    target = make_target()
    module = OPDModule(make_drafter(target), target, LossSpec("opd"), FAST)
    batch = pack_documents([make_document(0, response_tokens=1)], anchors_per_document=4)
    loss, _, _ = module.block_step(batch)
    loss.value.backward()
    assert loss.value.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())

"""Training stops at the first loss or gradient that is not finite, with weights, checkpoint and export as they were."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from datamodules.offline import OfflineDataModule
from datamodules.packed_loader import PackingSpec
from drafters.checkpoint import drafter_digest
from drafters.errors import UserError
from drafters.length_head import LengthHead
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.callbacks.export import ExportBest
from lightning_modules.length_head import LengthHeadModule
from lightning_modules.opd import OPDModule
from lightning_modules.optim import OptimSpec
from pipeline.config import FitConfig
from pipeline.fitting import CHECKPOINT, fit, loss_spec, optim_spec, stage_trainer
from tests.lightning_modules.training_samples import make_documents, make_drafter, make_target


class Fragile(BlockTrainingModule):
    """Multiplies the loss of batch number `at` by `factor`."""

    at, factor = 5, float("nan")

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.factor if self.trainer.fit_loop.total_batch_idx == self.at else loss


class Watch(L.Callback):
    """Keeps the weights after every step, and damages a gradient at a step."""

    def __init__(self, tensor: str = "", value: float = 0.0, at_step: int = 5) -> None:
        self.tensor, self.value, self.at_step = tensor, value, at_step
        self.weights: dict[str, torch.Tensor] = {}
        self.export = ""

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.tensor and trainer.global_step == self.at_step:
            gradient = pl_module.get_parameter(self.tensor).grad
            assert gradient is not None
            gradient.view(-1)[-1] = self.value

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.weights = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        if (export := Path(trainer.default_root_dir) / "drafter").exists():
            self.export = drafter_digest(export)


def run(directory: Path, watch: Watch, *, precision: str = "32-true", accumulate: int = 1) -> Fragile:
    settings = FitConfig(
        steps=20,
        accumulate=accumulate,
        checkpoint_every=2,
        validate_every=2,
        precision=precision,
        optim={"lr": 1e-2, "warmup_steps": 1},
    )
    target = make_target()
    module = Fragile(
        make_drafter(target), target, loss_spec(settings.loss), optim_spec(settings.optim, settings.steps)
    )
    if watch.tensor:
        module.at = -1
    export = ExportBest(directory / "drafter", target.identity, "v1")
    trainer = stage_trainer(directory, settings, logger=False, callbacks=[export, watch], validate=True)
    data = OfflineDataModule(make_documents(6), make_documents(2), PackingSpec(1, 6, "random", 64), seed=3)
    fit(trainer, module, data, None)
    return module


def assert_untouched(directory: Path, watch: Watch, module: dict[str, torch.Tensor], step: int) -> None:
    for name, weight in watch.weights.items():
        assert torch.equal(module[name], weight), name
    checkpoint = torch.load(directory / CHECKPOINT, weights_only=True)
    assert checkpoint["global_step"] == step
    assert all(torch.isfinite(t).all() for t in checkpoint["state_dict"].values())
    assert watch.export and drafter_digest(directory / "drafter") == watch.export


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite(factor: float, accumulate: int, tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}

    class Keep(Watch):
        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: Any) -> None:
            kept.update({name: p.detach().clone() for name, p in pl_module.named_parameters()})

    watch = Keep()
    at = 5 * accumulate
    Fragile.at, Fragile.factor = at, factor
    try:
        with pytest.raises(UserError, match=r"stopped at step 5: the loss is (nan|-?inf)") as raised:
            run(tmp_path, watch, accumulate=accumulate)
    finally:
        Fragile.at, Fragile.factor = 5, float("nan")
    assert "optim.lr" in str(raised.value)
    assert_untouched(tmp_path, watch, kept, 4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_gradient_that_is_not_finite_is_named(value: float, precision: str, tmp_path: Path) -> None:
    kept: dict[str, torch.Tensor] = {}

    class Keep(Watch):
        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: Any) -> None:
            kept.update({name: p.detach().clone() for name, p in pl_module.named_parameters()})

    watch = Keep("drafter.layers.0.mlp.up_proj.weight", value)
    with pytest.raises(
        UserError, match=r"stopped at step 5: the gradient of drafter\.layers\.0\.mlp\.up_proj\.weight"
    ):
        run(tmp_path, watch, precision=precision)
    assert_untouched(tmp_path, watch, kept, 4)


def test_large_but_finite_gradients_pass(tmp_path: Path) -> None:
    watch = Watch("drafter.fc.weight", 1e18)
    module = run(tmp_path, watch)
    assert all(torch.isfinite(p).all() for p in module.parameters())


def length_head_module() -> L.LightningModule:
    target = make_target()
    drafter = make_drafter(target)
    return LengthHeadModule(LengthHead(drafter.config.hidden_size), drafter, target, OptimSpec())


def opd_module() -> L.LightningModule:
    target = make_target()
    drafter = make_drafter(target)
    head = LengthHead(drafter.config.hidden_size)
    return OPDModule(drafter, target, LossSpec(objective="opd"), OptimSpec(), head)


@pytest.mark.parametrize("make", [length_head_module, opd_module])
def test_every_module_checks_the_gradients_of_all_that_it_trains(
    make: Callable[[], L.LightningModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make()
    monkeypatch.setattr(module, "_trainer", SimpleNamespace(global_step=7))
    optimizer = module.configure_optimizers()["optimizer"]  # type: ignore[index, call-overload]
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in module.named_parameters() if id(p) in trained]
    assert names
    for broken in names:
        for name, parameter in module.named_parameters():
            if name in names:
                parameter.grad = torch.zeros_like(parameter)
        gradient = module.get_parameter(broken).grad
        assert gradient is not None
        gradient.view(-1)[0] = float("nan")
        with pytest.raises(UserError, match=rf"step 7: the gradient of {re.escape(broken)} is not finite"):
            module.configure_gradient_clipping(optimizer, None)

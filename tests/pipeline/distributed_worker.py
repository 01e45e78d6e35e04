"""Training of tiny drafters in several processes, through the launcher that commands use."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
from transformers import AutoModelForCausalLM

import datamodules.offline
import drafters.replay
from datamodules.offline import OfflineDataModule
from datamodules.packed_loader import PackedLoader, PackingSpec
from drafters.acceptance_head import AcceptanceHead
from drafters.d3d import D3DDrafter
from drafters.packing import PackedBatch
from drafters.precondition import feature_rms, precondition
from drafters.sharding import whole
from drafters.target import Target
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.callbacks.export import ExportBest
from lightning_modules.length_head import LengthHeadModule
from lightning_modules.recovery import RecoveryModule
from pipeline import ranks
from pipeline.config import Config, FitConfig
from pipeline.fitting import CHECKPOINT, fit, loss_spec, optim_spec, stage_trainer
from pipeline.launch import across_ranks
from tests.lightning_modules.test_recovery import d3d_of
from tests.lightning_modules.training_samples import (
    BLOCK_SIZE,
    VOCAB,
    make_documents,
    make_drafter,
    make_head,
    make_target,
)

RANKS = 2
PACKING = PackingSpec(row_tokens=30, anchors_per_document=6, anchor_source="random", max_length=64)
FIT = FitConfig(
    steps=6,
    validate_every=2,
    checkpoint_every=2,
    precision="32-true",
    optim={"lr": 1e-2, "warmup_steps": 2, "clip_norm": 0.05},
)


def config_of(**trainer: Any) -> Config:
    data = {"train": [{"path": "prompts.jsonl"}]}
    return Config(target={"model": "tiny:llama"}, data=data, threads=1, trainer=trainer)


class Observed(L.Callback):
    """What an optimizer step is made of: losses, and gradients after clipping, in one piece; and the batches' documents."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.documents: list[list[str]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, *_: Any
    ) -> None:
        self.documents.append(batch.document_names)

    def on_before_backward(self, trainer: L.Trainer, module: L.LightningModule, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        # Lightning clips inside of the optimizer step, and clears gradients before the next one
        if trainer.global_step == len(self.gradients):
            return
        self.gradients.append(
            {name: whole(p.grad).clone() for name, p in module.named_parameters() if p.grad is not None}
        )


class DiesAt(L.Callback):
    """One process meets its end at the beginning of a batch."""

    def __init__(self, rank: int, step: int, how: str) -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if (ranks.rank(), trainer.global_step) == (self.rank, self.step):
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raise":
                raise ValueError("a defect")


class PoisonedLoss(BlockTrainingModule):
    """The batch of one process has no finite loss."""

    def _target_output(self, batch: PackedBatch) -> Any:
        output = super()._target_output(batch)
        if (ranks.rank(), self.trainer.global_step) == (1, 3):
            output.features_TC.fill_(float("nan"))
        return output


class MergedLoader(PackedLoader):
    """For one process what several would get: their batches laid end to end."""

    def __iter__(self) -> Iterator[PackedBatch]:
        shares = [
            PackedLoader(
                self.documents,
                self.spec,
                seed=self.seed,
                num_batches=self.num_batches,
                rank=rank,
                world_size=RANKS,
            )
            for rank in range(RANKS)
        ]
        for batches in zip(*shares, strict=False):
            yield merged(list(batches))


def merged(batches: list[PackedBatch]) -> PackedBatch:
    first, *others = batches
    for other in others:
        first = replace(
            first,
            input_ids_T=torch.cat([first.input_ids_T, other.input_ids_T]),
            document_ids_T=torch.cat(
                [first.document_ids_T, other.document_ids_T + len(first.document_names)]
            ),
            position_ids_T=torch.cat([first.position_ids_T, other.position_ids_T]),
            response_mask_T=torch.cat([first.response_mask_T, other.response_mask_T]),
            anchors_N=torch.cat([first.anchors_N, other.anchors_N + first.num_tokens]),
            domains=first.domains + other.domains,
            document_names=first.document_names + other.document_names,
        )
    return first


class MergedData(OfflineDataModule):
    def train_dataloader(self) -> PackedLoader:
        assert self.trainer is not None
        batches = self.trainer.max_steps * self.trainer.accumulate_grad_batches
        return MergedLoader(self.train_documents, self.packing, seed=self.seed, num_batches=batches)


def make_module(kind: str, settings: FitConfig, poisoned: bool = False) -> L.LightningModule:
    target = make_target()
    optim = optim_spec(settings.optim, settings.steps)
    if kind == "heads":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            acceptance_head = AcceptanceHead(target.config.hidden_size, BLOCK_SIZE, width=8)
        drafter = make_drafter(target)
        return LengthHeadModule(make_head(target), drafter, target, optim, acceptance_head)
    if kind == "recovery":
        teacher, pruned = d3d_of(target), d3d_of(target)
        del pruned.lm.model.layers[1]
        return RecoveryModule(
            pruned, teacher, target, loss_spec(settings.loss), optim, label_share=0.1, ar_weight=0.5
        )
    drafter = tied_d3d(target) if kind == "d3d" else make_drafter(target)
    if kind == "dflash":
        precondition(drafter, feature_rms(target, make_documents(4)))  # type: ignore[arg-type]
    make = PoisonedLoss if poisoned else BlockTrainingModule
    # what one process knows of weights must not matter: the first one's count
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.01 * ranks.rank())
    return make(drafter, target, loss_spec(settings.loss), optim)


def tied_d3d(target: Target) -> D3DDrafter:
    config = copy.deepcopy(target.config)
    config.tie_word_embeddings = True
    config.d3d_config = {"block_size": BLOCK_SIZE, "mask_token_id": VOCAB - 1, "shift": True}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return D3DDrafter(AutoModelForCausalLM.from_config(config).float())


@across_ranks
def train(config: Config, directory: Path, case: dict[str, Any]) -> Path:
    """Train, from `last.ckpt` if it is there; each process writes `seen-<rank>.pt`, the first `final.ckpt`."""
    # several packs, and several passes through the drafter for some of them
    with (
        patch.object(datamodules.offline, "REPLAY_TOKENS", 30),
        patch.object(drafters.replay, "REPLAY_TOKENS", 30),
        patch.object(drafters.replay, "REPLAY_BLOCKS", 16),
    ):
        return run(config, directory, case)


def run(config: Config, directory: Path, case: dict[str, Any]) -> Path:
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    kind = case.get("kind", "dflash")
    settings = FIT.model_copy(update={"loss": FIT.loss.model_copy(update=case.get("loss", {}))})
    settings = settings.model_copy(
        update={key: case[key] for key in ("accumulate", "precision") if key in case}
    )
    module = make_module(kind, settings, case.get("poisoned", False))
    observed = Observed()
    export = ExportBest(directory / "drafter", make_target().identity, "v1", measure_start=True)
    exports = [export] if isinstance(module, BlockTrainingModule) else []
    dies = [DiesAt(*case["dies"])] if "dies" in case else []
    trainer = stage_trainer(
        directory,
        settings,
        logger=False,
        callbacks=[*exports, observed, *dies],
        validate=bool(exports),
        processes=config.trainer,
        divisible=bool(exports),
    )
    data = MergedData if case.get("merged") else OfflineDataModule
    checkpoint = directory / CHECKPOINT
    documents = make_documents(14)
    fit(
        trainer,
        module,
        data(documents, make_documents(5, first=50), PACKING, seed=3),
        str(checkpoint) if checkpoint.is_file() else None,
    )
    trainer.save_checkpoint(directory / "final.ckpt", weights_only=False)
    torch.save(
        {
            "losses": observed.losses,
            "gradients": observed.gradients,
            "documents": observed.documents,
            "history": export.history,
            "random": torch.get_rng_state(),
        },
        directory / f"seen-{ranks.rank()}.pt",
    )
    if ranks.is_first():
        (directory / "history.json").write_text(json.dumps(export.history))
    return directory

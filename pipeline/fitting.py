"""Lightning trainers as every stage uses them."""

from __future__ import annotations

import logging
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger

from datamodules.offline import OfflineDataModule, OtherTrainingData
from datamodules.packed_loader import PackingSpec, derived_generator
from drafters.checkpoint import replace_directory
from drafters.d3d import D3DDrafter
from drafters.errors import UserError
from drafters.fill import Drafter
from drafters.objectives import LossSpec
from drafters.packing import Document
from drafters.training_vocabulary import TrainingVocabulary
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.callbacks.finite_guard import FiniteGuard
from lightning_modules.callbacks.progress import PlainProgress
from lightning_modules.callbacks.resume import AtomicCheckpointIO, RandomState, StepCheckpoint
from lightning_modules.optim import OptimSpec
from pipeline import ranks
from pipeline.config import Config, FitConfig, LossConfig, OnlineConfig, OptimConfig, TrainerConfig
from pipeline.console import say
from pipeline.hardware import resolve_precision
from pipeline.models import TargetBundle
from pipeline.strategy import is_divided, trainer_settings

CHECKPOINT = "last.ckpt"
ONE_PROCESS = TrainerConfig()


def loss_spec(config: LossConfig) -> LossSpec:
    """The core's loss specification."""
    return LossSpec(**config.model_dump(exclude={"ar_weight"}))


def optim_spec(config: OptimConfig, total_steps: int | None) -> OptimSpec:
    """The module room's optimizer specification."""
    return OptimSpec(
        lr=config.lr,
        head_lr=config.head_lr,
        weight_decay=config.weight_decay,
        warmup_steps=config.warmup_steps,
        schedule=config.schedule,
        total_steps=total_steps,
    )


def packing_spec(config: Config, fit: FitConfig) -> PackingSpec:
    """How a stage packs its documents."""
    return PackingSpec(
        row_tokens=config.data.row_tokens,
        anchors_per_document=fit.anchors_per_document,
        anchor_source=fit.anchor_source,
        max_length=config.data.max_length,
    )


def stage_documents(fit: FitConfig, documents: Sequence[Document], seed: int) -> list[Document]:
    """The documents of a stage: all, or `max_documents` of them in their order."""
    if fit.max_documents is None or fit.max_documents >= len(documents):
        return list(documents)
    drawn = torch.randperm(len(documents), generator=derived_generator(seed, len(documents)))
    return [documents[i] for i in sorted(drawn[: fit.max_documents].tolist())]


def training_vocabulary(
    fit: FitConfig, bundle: TargetBundle, documents: Sequence[Document]
) -> TrainingVocabulary | None:
    """What the loss of a stage sees of the vocabulary; None for all of it."""
    vocab_size = bundle.target.config.vocab_size
    if fit.vocabulary is None or fit.vocabulary >= vocab_size:
        return None
    return TrainingVocabulary.of(documents, vocab_size, fit.vocabulary)


def make_trainer(
    directory: Path,
    *,
    precision: str,
    clip_norm: float,
    accumulate: int,
    checkpoint_every: int,
    logger: Logger | bool,
    callbacks: Sequence[L.Callback],
    processes: TrainerConfig = ONE_PROCESS,
    divisible: bool = True,
    **settings: Any,
) -> L.Trainer:
    """A trainer with the guards, a resumable checkpoint `<directory>/last.ckpt` and progress output."""
    directory.mkdir(parents=True, exist_ok=True)
    quiet_lightning()
    interactive = sys.stdout.isatty()
    progress: L.Callback = RichProgressBar() if interactive else PlainProgress(say)
    settings |= trainer_settings(processes, divisible=divisible)
    plugins, joining = settings.pop("plugins"), settings.pop("callbacks")
    return L.Trainer(
        accelerator="auto",
        precision=cast(Any, resolve_precision(precision)),
        gradient_clip_val=clip_norm,
        accumulate_grad_batches=accumulate,
        logger=logger,
        log_every_n_steps=10,
        callbacks=[
            FiniteGuard(),
            RandomState(),
            progress,
            *joining,
            *callbacks,
            StepCheckpoint(directory / CHECKPOINT, checkpoint_every),
        ],
        plugins=[AtomicCheckpointIO(), *plugins],
        enable_progress_bar=interactive,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=directory,
        **settings,
    )


def quiet_lightning() -> None:
    """Keep Lightning's advertisements and known-harmless warnings out of what a person reads."""
    # its import sets the level, so a process-wide setting made earlier would be lost
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*transfer_batch_to_device.*")
    # a metric that adds up over processes itself has the same value in all of them
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
    # nothing is changed in place
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")


def stage_trainer(
    directory: Path,
    fit: FitConfig,
    *,
    logger: Logger | bool,
    callbacks: Sequence[L.Callback],
    validate: bool,
    processes: TrainerConfig = ONE_PROCESS,
    divisible: bool = True,
) -> L.Trainer:
    """Trainer of an offline stage: a number of steps, validation every so many batches."""
    return make_trainer(
        directory,
        precision=fit.precision,
        clip_norm=fit.optim.clip_norm,
        accumulate=fit.accumulate,
        checkpoint_every=fit.checkpoint_every,
        logger=logger,
        callbacks=callbacks,
        processes=processes,
        divisible=divisible,
        max_steps=fit.steps,
        max_epochs=-1,
        max_time=timedelta(minutes=fit.max_minutes) if fit.max_minutes else None,
        val_check_interval=fit.validate_every * fit.accumulate if validate else None,
        check_val_every_n_epoch=None if validate else 1,
        limit_val_batches=1.0 if validate else 0,
    )


def online_trainer(
    directory: Path, settings: OnlineConfig, *, logger: Logger | bool, callbacks: Sequence[L.Callback]
) -> L.Trainer:
    """Trainer of online rounds: one epoch a round, its documents asked for anew."""
    return make_trainer(
        directory,
        precision=settings.precision,
        clip_norm=settings.optim.clip_norm,
        accumulate=settings.accumulate,
        checkpoint_every=settings.checkpoint_every,
        logger=logger,
        callbacks=callbacks,
        max_epochs=settings.max_rounds or -1,
        reload_dataloaders_every_n_epochs=1,
        limit_val_batches=0,
    )


def resume_path(directory: Path, resume: bool) -> str | None:
    """The checkpoint to resume from.

    Raises:
        UserError: when there is none.
    """
    if not resume:
        return None
    path = directory / CHECKPOINT
    if not path.is_file():
        raise UserError(f"{path}: nothing to resume; run without --resume")
    return str(path)


def fit(trainer: L.Trainer, module: L.LightningModule, datamodule: Any, checkpoint: str | None) -> None:
    """`trainer.fit` with a readable refusal of a damaged or foreign checkpoint."""
    if checkpoint is not None:
        require_same_processes(checkpoint, require_readable(checkpoint), trainer)
    try:
        trainer.fit(module, datamodule=datamodule, ckpt_path=checkpoint, weights_only=True)
    except OtherTrainingData as error:
        raise UserError(f"{checkpoint}: {error}; remove it, or run without --resume") from None
    except (RuntimeError, KeyError, EOFError) as error:
        if checkpoint is not None and "state_dict" in str(error):
            first_line = str(error).strip().splitlines()[0]
            cure = ""
            if 'Missing key(s) in state_dict: "acceptance_head.' in str(error):
                cure = (
                    "; its run had no acceptance head: start anew, or go on without one "
                    "(fit-length-head: --set length_head.acceptance=false)"
                )
            raise UserError(f"{checkpoint}: does not fit this config ({first_line}){cure}") from error
        raise


def require_readable(checkpoint: str) -> dict[str, Any]:
    """The content of a checkpoint, unless it was cut off or is none.

    Raises:
        UserError: naming the file.
    """
    try:
        written: dict[str, Any] = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{checkpoint}: not a readable checkpoint ({first_line}); remove it and run without --resume"
        ) from None
    return written


def require_same_processes(checkpoint: str, written: dict[str, Any], trainer: L.Trainer) -> None:
    """Refuse what would go on with other batches; and what Lightning would read wrongly, as under FSDP2 it numbers the
    optimizer's moments in another order.

    Raises:
        UserError: naming the key.
    """
    anew = "set it alike, or run without --resume"
    wrote, here = written.get(OfflineDataModule.__qualname__, {}).get("world_size", 1), trainer.world_size
    if wrote != here:
        raise UserError(
            f"trainer.devices: {checkpoint} was written by {wrote} processes, not by {here}; {anew}"
        )
    before, now = ("fsdp2" if divided else "ddp" for divided in (written.get("divided"), is_divided(trainer)))
    if before != now:
        raise UserError(f"trainer.strategy: {checkpoint} was written under {before}, not {now}; {anew}")


@contextmanager
def export_on_success(directory: Path, checkpoint: str | None) -> Iterator[Path]:
    """Where a stage exports while it trains; what lies there takes the place of `directory` once the stage has succeeded.

    So a run that ends in a loss that is not finite leaves the drafter of an earlier run alone. A fresh run discards what an
    earlier one kept to be resumed. Of several processes the first does so.
    """
    pending = directory.with_name(f".{directory.name}.best")
    with ranks.first_alone() as first:
        if first and checkpoint is None:
            shutil.rmtree(pending, ignore_errors=True)
            (directory.parent / CHECKPOINT).unlink(missing_ok=True)
    yield pending
    with ranks.first_alone() as first:
        if first and pending.is_dir():
            replace_directory(pending, directory)


def training_module(
    config: Config,
    stage: Literal["train", "distill"],
    bundle: TargetBundle,
    drafter: Drafter,
    documents: Sequence[Document],
) -> BlockTrainingModule:
    """The module that trains a drafter on blocks by this stage's settings.

    Raises:
        UserError: when they cannot train a drafter of its family.
    """
    settings: FitConfig = getattr(config, stage)
    require_trainable(drafter, settings, stage)
    return BlockTrainingModule(
        drafter,
        bundle.target,
        loss_spec(settings.loss),
        optim_spec(settings.optim, settings.steps),
        # greedy responses are the target's own labels, but for float ties
        teacher_labels=stage == "distill" or config.regenerate.temperature > 0,
        feature_cache_bytes=settings.feature_cache_mib * 2**20,
        vocabulary=training_vocabulary(settings, bundle, documents),
        ar_weight=settings.loss.ar_weight,
    )


def require_trainable(drafter: Drafter, settings: FitConfig | OnlineConfig, stage: str) -> None:
    """Refuse what a drafter with a head of its own cannot be trained by.

    Raises:
        UserError: naming the key.
    """
    if not isinstance(drafter, D3DDrafter):
        return
    if settings.vocabulary is not None:
        raise UserError(f"{stage}.vocabulary: a d3d drafter trains its whole head; set it to null")

"""`draftsmith distill`: on-policy distillation on the target's responses, offline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lightning as L
import torch

from datamodules.offline import OfflineDataModule
from drafters.checkpoint import CONTENT
from drafters.packing import Document
from drafters.replay import replay
from lightning_modules.callbacks.export import ExportBest
from pipeline import ranks
from pipeline.config import Config
from pipeline.console import say
from pipeline.corpus import responses_directory, train_and_validation
from pipeline.fitting import (
    export_on_success,
    fit,
    packing_spec,
    resume_path,
    stage_documents,
    stage_trainer,
    training_module,
)
from pipeline.launch import across_ranks
from pipeline.models import TargetBundle, load_drafter_for, prepare_training
from pipeline.stages.context import open_stage


@across_ranks
def distill_offline(config: Config, *, drafter: Path, resume: bool = False) -> Path:
    """Distil on served text by `distill.loss`, AdaFlash's by default; the best by τ goes to `<output>/distill/drafter`.

    The drafter that came in is the first candidate, so this stage never hands on a worse one.

    With `anchor_source: rounds` the drafter is first replayed over all documents, and blocks start where it would have
    started them in serving.
    """
    with open_stage(config, "distill") as stage:
        checkpoint = resume_path(stage.output, resume)
        bundle, settings = stage.bundle, config.distill
        train, validation = train_and_validation(config, bundle.target.identity)
        train = stage_documents(settings, train, config.seed)
        stage.result.add_input(responses_directory(config, "train"))
        stage.result.add_input(drafter)
        L.seed_everything(config.seed, verbose=False)
        loaded = load_drafter_for(drafter, bundle)
        if settings.anchor_source == "rounds":
            with stage.result.section("replay_rounds"):
                train = with_round_starts(drafter, bundle, train)
        say(f"distilling on {len(train)} documents")
        module = training_module(
            config,
            "distill",
            bundle,
            prepare_training(loaded.drafter, bundle, train, freeze_mlp=config.drafter.freeze_mlp),
            train,
        )
        directory = stage.output / "drafter"
        with stage.result.section("fit"), export_on_success(directory, checkpoint) as pending:
            export = ExportBest(
                pending,
                bundle.target.identity,
                f"{config.name}-distill-{CONTENT}",
                measure_start=True,
                length_head=loaded.length_head,
                acceptance_head=loaded.acceptance_head,
            )
            trainer = stage_trainer(
                stage.output,
                settings,
                logger=stage.logger(),
                callbacks=[export],
                validate=bool(validation),
                processes=config.trainer,
            )
            datamodule = OfflineDataModule(
                train, validation, packing_spec(config, settings), seed=config.seed
            )
            fit(trainer, module, datamodule, checkpoint)
        stage.result.metrics |= {
            "steps": trainer.global_step,
            "acceptance_length": export.best if export.history else float("nan"),
            "history": [list(item) for item in export.history],
        }
        stage.result.add_output(directory)
        return directory


@torch.no_grad()
def with_round_starts(drafter: Path, bundle: TargetBundle, documents: list[Document]) -> list[Document]:
    """The documents with the positions where this drafter's rounds would begin, found by replay."""
    loaded = load_drafter_for(drafter, bundle, dtype=bundle.target.dtype)
    results = ranks.spread(documents, lambda some: replay(loaded.drafter, bundle.target, some))
    return [replace(d, round_starts=r.round_starts) for d, r in zip(documents, results, strict=True)]

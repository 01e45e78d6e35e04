"""`draftsmith train`: a drafter from scratch."""

from __future__ import annotations

from pathlib import Path

import lightning as L

from datamodules.offline import OfflineDataModule
from drafters.checkpoint import CONTENT
from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.errors import UserError
from drafters.fill import Drafter
from lightning_modules.callbacks.export import ExportBest
from pipeline.config import Config, DrafterConfig
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
from pipeline.models import load_drafter_for, new_drafter, prepare_training
from pipeline.stages.context import open_stage


@across_ranks
def train_drafter(config: Config, *, resume: bool = False, warm_start: Path | None = None) -> Path:
    """Train on the regenerated responses; the best validation τ is exported to `<output>/train/drafter`.

    Args:
        config: the run.
        resume: continue `<output>/train/last.ckpt` exactly where it stopped.
        warm_start: start from this drafter's weights with a fresh optimizer.
    """
    with open_stage(config, "train") as stage:
        checkpoint = resume_path(stage.output, resume)
        bundle = stage.bundle
        train, validation = train_and_validation(config, bundle.target.identity)
        train = stage_documents(config.train, train, config.seed)
        stage.result.add_input(responses_directory(config, "train"))
        L.seed_everything(config.seed, verbose=False)
        if warm_start is None:
            drafter = new_drafter(config, bundle)
        else:
            drafter = load_drafter_for(warm_start, bundle).drafter.float().train()
            require_same_shape(config.drafter, drafter, warm_start)
            stage.result.add_input(warm_start)
        settings = config.train
        say(
            f"{len(train)} documents, {len(validation)} for validation; drafter of "
            f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters"
            f"{', MLPs frozen' if config.drafter.freeze_mlp else ''}"
        )
        drafter = prepare_training(drafter, bundle, train, freeze_mlp=config.drafter.freeze_mlp)
        module = training_module(config, "train", bundle, drafter, train)
        directory = stage.output / "drafter"
        with stage.result.section("fit"), export_on_success(directory, checkpoint) as pending:
            export = ExportBest(pending, bundle.target.identity, f"{config.name}-train-{CONTENT}")
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


def require_same_shape(wanted: DrafterConfig, drafter: Drafter, directory: Path) -> None:
    """Refuse a warm start whose shape is not the configured one.

    Raises:
        UserError: naming the key.
    """
    found = {
        "family": "d3d" if isinstance(drafter, D3DDrafter) else "dflash",
        "block_size": drafter.block_size,
    }
    if isinstance(drafter, DFlashDrafter):
        found["num_layers"] = drafter.config.num_hidden_layers
    else:
        found["shift"] = drafter.spec.shift
    for key, value in found.items():
        if value != getattr(wanted, key):
            raise UserError(
                f"drafter.{key}: the config says {getattr(wanted, key)}, but --warm-start {directory} has {value}"
            )

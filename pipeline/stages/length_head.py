"""`draftsmith fit-length-head`: how much of each block to verify."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch

from datamodules.offline import OfflineDataModule
from datamodules.packed_loader import derived_generator
from drafters.checkpoint import CONTENT, save_drafter
from drafters.length_head import LengthHead, length_targets, verify_len_from
from drafters.packing import Document, pack_documents
from drafters.replay import iterate_packs
from lightning_modules.length_head import LengthHeadModule
from pipeline.config import Config
from pipeline.console import say
from pipeline.corpus import responses_directory, train_and_validation
from pipeline.fitting import fit, optim_spec, packing_spec, resume_path, stage_documents, stage_trainer
from pipeline.models import load_drafter_for
from pipeline.stages.context import open_stage, tracking_for
from pipeline.stages.distill import with_round_starts


def fit_length_head(config: Config, *, drafter: Path, resume: bool = False) -> Path:
    """Fit the head on the drafter's own round starts; exports drafter and head to `<output>/length_head/drafter`.

    The result holds its calibration on validation documents: mean prediction, mean label, and the mean verify_len
    that γ would give.
    """
    with open_stage(config, "length_head") as stage:
        checkpoint = resume_path(stage.output, resume)
        bundle, settings = stage.bundle, config.length_head
        train, validation = train_and_validation(config, bundle.target.identity)
        train = stage_documents(settings, train, config.seed)
        stage.result.add_input(responses_directory(config, "train"))
        stage.result.add_input(drafter)
        L.seed_everything(config.seed, verbose=False)
        loaded = load_drafter_for(drafter, bundle, dtype=bundle.target.dtype)
        with stage.result.section("replay_rounds"):
            train = with_round_starts(drafter, bundle, train)
            validation = with_round_starts(drafter, bundle, validation)
        head = LengthHead(loaded.drafter.config.hidden_size, settings.width, settings.features)
        module = LengthHeadModule(
            head, loaded.drafter, bundle.target, optim_spec(settings.optim, settings.steps)
        )
        trainer = stage_trainer(
            stage.output,
            settings,
            logger=tracking_for(config).lightning_logger(stage.tracked.run_id),
            callbacks=[],
            validate=False,
        )
        with stage.result.section("fit"):
            datamodule = OfflineDataModule(train, [], packing_spec(config, settings), seed=config.seed)
            fit(trainer, module, datamodule, checkpoint)
        calibration = calibrate(module, validation or train, config)
        say(
            f"label mean {calibration['label_mean']:.3f}, predicted {calibration['predicted_mean']:.3f}, "
            f"mean verify_len {calibration['verify_len_mean']:.2f} at gamma {config.policy.gamma}"
        )
        stage.result.metrics |= {"steps": trainer.global_step, **calibration}
        directory = stage.output / "drafter"
        save_drafter(
            directory,
            loaded.drafter,
            identity=bundle.target.identity,
            drafter_version=f"{config.name}-length-head-{CONTENT}",
            length_head=head,
        )
        stage.result.add_output(directory)
        return directory


@torch.no_grad()
def calibrate(module: LengthHeadModule, documents: list[Document], config: Config) -> dict[str, float]:
    """Prediction against label over all complete blocks at round starts."""
    predicted, labels = [], []
    module.length_head.to(module.target.device)  # Lightning leaves what it has trained on the CPU
    block_size = module.frozen_drafter[0].block_size
    for number, pack in enumerate(iterate_packs(documents, config.data.row_tokens)):
        batch = pack_documents(
            pack,
            anchors_per_document=config.length_head.anchors_per_document,
            anchor_source="rounds",
            generator=derived_generator(config.seed, number),
        ).to(module.target.device)
        if batch.num_blocks == 0:
            continue
        features, accepted_N, complete_N = module.labels(batch)
        predicted.append(module.length_head(features)[complete_N])
        labels.append(length_targets(accepted_N, block_size)[complete_N])
    predicted_N, labels_N = torch.cat(predicted), torch.cat(labels)
    return {
        "blocks": int(labels_N.numel()),
        "label_mean": float(labels_N.mean()),
        "predicted_mean": float(predicted_N.mean()),
        "mse": float((predicted_N - labels_N).square().mean()),
        "label_variance": float(labels_N.var(unbiased=False)),
        "verify_len_mean": float(
            verify_len_from(predicted_N, config.policy.gamma, block_size).double().mean()
        ),
    }

"""`draftsmith fit-length-head`: what length policies know of a drafter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lightning as L
import torch

from datamodules.offline import OfflineDataModule
from datamodules.packed_loader import derived_generator
from drafters.acceptance_head import AcceptanceHead, acceptance_labels
from drafters.calibration import calibration_error, platt_scaling
from drafters.checkpoint import CONTENT, save_drafter
from drafters.length_head import LengthHead, length_targets, verify_len_from
from drafters.packing import Document, pack_documents
from drafters.replay import iterate_packs
from lightning_modules.length_head import LabelledBlocks, LengthHeadModule
from pipeline import ranks
from pipeline.config import Config
from pipeline.console import say
from pipeline.corpus import responses_directory, train_and_validation
from pipeline.fitting import fit, optim_spec, packing_spec, resume_path, stage_documents, stage_trainer
from pipeline.launch import across_ranks
from pipeline.models import load_drafter_for
from pipeline.stages.context import open_stage
from pipeline.stages.distill import with_round_starts


@across_ranks
def fit_length_head(config: Config, *, drafter: Path, resume: bool = False) -> Path:
    """Fit the heads on the drafter's own round starts; exports drafter and heads to `<output>/length_head/drafter`.

    The result holds their calibration on validation documents: of the length head the mean prediction, mean label, and the mean
    verify_len that γ would give; of the acceptance head the expected calibration error before and after its calibration there.
    Without validation documents the length head is described on those of training, and the acceptance head is not calibrated.
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
        acceptance_head = None
        if settings.acceptance:
            acceptance_head = AcceptanceHead(
                loaded.drafter.config.hidden_size,
                loaded.drafter.block_size,
                settings.width,
                confidence=settings.confidence,
            )
        module = LengthHeadModule(
            head, loaded.drafter, bundle.target, optim_spec(settings.optim, settings.steps), acceptance_head
        )
        trainer = stage_trainer(
            stage.output,
            settings,
            logger=stage.logger(),
            callbacks=[],
            validate=False,
            processes=config.trainer,
            divisible=False,
        )
        with stage.result.section("fit"):
            datamodule = OfflineDataModule(train, [], packing_spec(config, settings), seed=config.seed)
            fit(trainer, module, datamodule, checkpoint)
        directory = stage.output / "drafter"
        if not ranks.is_first():
            return directory
        calibration = calibrate(module, validation or train, config)
        say(
            f"label mean {calibration['label_mean']:.3f}, predicted {calibration['predicted_mean']:.3f}, "
            f"mean verify_len {calibration['verify_len_mean']:.2f} at gamma {config.policy.gamma}"
        )
        stage.result.metrics |= {"steps": trainer.global_step, **calibration}
        if acceptance_head is not None and not validation:
            # blocks that it was fitted to would make it too sure of itself
            say("acceptance head: not calibrated, for want of validation documents (data.val_fraction)")
        elif acceptance_head is not None:
            acceptance = calibrate_acceptance(acceptance_head, module, validation, config)
            stage.result.metrics["acceptance"] = acceptance
            say(
                f"acceptance head: calibration error {acceptance['ece']:.3f} (uncalibrated {acceptance['ece_raw']:.3f}), "
                f"{acceptance['tokens_predicted']:.2f} tokens per whole block foretold, {acceptance['tokens']:.2f} seen"
            )
        save_drafter(
            directory,
            loaded.drafter,
            identity=bundle.target.identity,
            drafter_version=f"{config.name}-length-head-{CONTENT}",
            length_head=head,
            acceptance_head=acceptance_head,
        )
        stage.result.add_output(directory)
        return directory


@torch.no_grad()
def labelled_blocks(
    module: LengthHeadModule, documents: list[Document], config: Config
) -> Iterator[LabelledBlocks]:
    """The blocks at the round starts of the documents, batch by batch."""
    # Lightning leaves what it has trained on the CPU
    module.to(module.target.device)
    for number, pack in enumerate(iterate_packs(documents, config.data.row_tokens)):
        batch = pack_documents(
            pack,
            anchors_per_document=config.length_head.anchors_per_document,
            anchor_source="rounds",
            generator=derived_generator(config.seed, number),
        ).to(module.target.device)
        if batch.num_blocks:
            yield module.blocks(batch)


@torch.no_grad()
def calibrate(module: LengthHeadModule, documents: list[Document], config: Config) -> dict[str, float]:
    """Prediction against label of the length head over all complete blocks at round starts."""
    predicted, labels = [], []
    block_size = module.frozen_drafter[0].block_size
    for blocks in labelled_blocks(module, documents, config):
        complete_N = blocks.complete_N
        predicted.append(module.length_head(module.length_features(blocks.filled))[complete_N])
        labels.append(length_targets(blocks.accepted_N, block_size)[complete_N])
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


@torch.no_grad()
def calibrate_acceptance(
    head: AcceptanceHead, module: LengthHeadModule, documents: list[Document], config: Config
) -> dict[str, float]:
    """Platt-scale the head on blocks at round starts, and say how well it is calibrated.

    The errors are those of every second block with the numbers fitted to the others, so that none is judged by itself; the head
    keeps the numbers fitted to all. Tokens per whole block, 1 + Σ_j S_j, are foretold and seen over complete blocks.
    """
    raw, accepted, counted, complete = [], [], [], []
    for blocks in labelled_blocks(module, documents, config):
        raw.append(head.raw_logits(blocks.filled.hidden_NBH, blocks.confidence_ND))
        labels_ND, counted_ND = acceptance_labels(blocks.match_NB, blocks.valid_NB)
        accepted.append(labels_ND)
        counted.append(counted_ND)
        complete.append(blocks.complete_N)
    raw_ND, accepted_ND, counted_ND = torch.cat(raw), torch.cat(accepted), torch.cat(counted)
    fitting_ND, judging_ND = counted_ND.clone(), counted_ND.clone()
    fitting_ND[1::2] = False
    judging_ND[::2] = False
    scale, shift = platt_scaling(raw_ND[fitting_ND], accepted_ND[fitting_ND])
    judged, outcomes = raw_ND[judging_ND], accepted_ND[judging_ND]
    result = {
        "slots": int(counted_ND.sum()),
        "ece_raw": calibration_error(torch.sigmoid(judged), outcomes),
        "ece": calibration_error(torch.sigmoid(judged * scale + shift), outcomes),
    }
    scale, shift = platt_scaling(raw_ND[counted_ND], accepted_ND[counted_ND])
    head.calibration.copy_(torch.tensor([scale, shift]))
    complete_N = torch.cat(complete)
    survival_ND = torch.sigmoid(raw_ND * scale + shift).cumprod(dim=1)[complete_N]
    seen_ND = accepted_ND.long().cumprod(dim=1)[complete_N]
    return result | {
        "scale": scale,
        "shift": shift,
        "tokens_predicted": float(1 + survival_ND.sum(dim=1).mean()),
        "tokens": float(1 + seen_ND.sum(dim=1).double().mean()),
    }

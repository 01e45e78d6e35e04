"""Fitting the heads of length policies beside a frozen drafter: the length head (AdaFlash §3.2) and the acceptance head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import nn

from drafters.acceptance_head import AcceptanceHead, acceptance_labels, acceptance_loss, confident_argmax
from drafters.block_loss import accepted_prefix, prefix_complete
from drafters.fill import Drafter, FilledBlocks, draft_head, features_of, fill_blocks
from drafters.length_head import LengthHead, length_loss, length_targets
from drafters.packing import PackedBatch
from drafters.replay import chunked_argmax
from drafters.target import Target
from lightning_modules.all_ranks import over_all_ranks
from lightning_modules.optim import OptimSpec, clip_each, configure_adamw


@dataclass(frozen=True)
class LabelledBlocks:
    """Full blocks of the drafter as it is now, against the served text.

    `match_NB` where the draft is the served token (False at slots outside the text), `valid_NB` slots inside the text,
    `confidence_ND` log-probabilities of the drafts, if a head reads them.
    """

    filled: FilledBlocks
    match_NB: torch.Tensor
    valid_NB: torch.Tensor
    confidence_ND: torch.Tensor | None

    @property
    def accepted_N(self) -> torch.Tensor:
        return accepted_prefix(self.match_NB)

    @property
    def complete_N(self) -> torch.Tensor:
        return prefix_complete(self.match_NB, self.valid_NB)


class LengthHeadModule(L.LightningModule):
    """Labels come from the *current* drafter's full blocks against the served text, never from truncated verification.

    Fit it on round starts (anchor source `rounds`): random anchors oversample easy stretches.
    """

    def __init__(
        self,
        length_head: LengthHead,
        drafter: Drafter,
        target: Target,
        optim: OptimSpec,
        acceptance_head: AcceptanceHead | None = None,
    ) -> None:
        super().__init__()
        self.length_head = length_head
        self.acceptance_head = acceptance_head
        self.frozen_drafter = [drafter.eval()]  # in a list: not part of the module tree
        self.target = target
        self.optim_spec = optim

    def on_fit_start(self) -> None:
        self.target.model.to(self.device)
        self.frozen_drafter[0].to(self.device)

    @torch.no_grad()
    def blocks(self, batch: PackedBatch) -> LabelledBlocks:
        """Every block of the batch with its labels."""
        drafter, target = self.frozen_drafter[0], self.target
        filled = fill_blocks(drafter, target, batch, features_of(drafter, target, batch))
        layout, head_VH = filled.layout, draft_head(drafter, target)
        rows_RH, shape = filled.hidden_NBH.flatten(0, 1), layout.targets_NB.shape
        confidence_ND = None
        if self.acceptance_head is not None and self.acceptance_head.reads_confidence:
            drafts_R, confidence_R = confident_argmax(rows_RH, head_VH)
            confidence_ND = confidence_R.view(shape)[:, 1:]
        else:
            drafts_R = chunked_argmax(rows_RH, head_VH)
        match_NB = (drafts_R.view(shape) == batch.input_ids_T[layout.targets_NB]) & layout.valid_NB
        return LabelledBlocks(filled, match_NB, layout.valid_NB, confidence_ND)

    def length_features(self, filled: FilledBlocks) -> torch.Tensor:
        """What the length head reads of the blocks."""
        return filled.hidden_NBH if self.length_head.features == "hidden" else filled.embeddings_NBH

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        blocks, block_size = self.blocks(batch), self.frozen_drafter[0].block_size
        predicted_N = self.length_head(self.length_features(blocks.filled))
        losses = [
            (
                length_loss(predicted_N, blocks.accepted_N, blocks.complete_N, block_size),
                blocks.complete_N.sum(),
            )
        ]
        if self.acceptance_head is not None:
            logits_ND = self.acceptance_head.logits(blocks.filled.hidden_NBH, blocks.confidence_ND)
            accepted_ND, counted_ND = acceptance_labels(blocks.match_NB, blocks.valid_NB)
            losses.append((acceptance_loss(logits_ND, accepted_ND, counted_ND), counted_ND.sum()))
        loss, *head_losses = over_all_ranks(*losses)
        logged = {
            "train/length_loss": loss.detach(),
            "train/length_predicted": predicted_N.detach().mean(),
            "train/length_label": length_targets(blocks.accepted_N, block_size).mean(),
        }
        for head_loss in head_losses:
            logged["train/acceptance_loss"] = head_loss.detach()
            loss = loss + head_loss
        self.log_dict(logged, prog_bar=True)
        return loss

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.to(device) if isinstance(batch, PackedBatch) else batch

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        clip_each(self, [self.length_head, self.acceptance_head], gradient_clip_val)

    def configure_optimizers(self) -> Any:
        heads = [head for head in (self.length_head, self.acceptance_head) if head is not None]
        return configure_adamw(None, nn.ModuleList(heads), self.optim_spec)

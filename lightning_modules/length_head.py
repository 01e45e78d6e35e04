"""Fitting the length head beside a frozen drafter (AdaFlash §3.2)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from drafters.block_loss import accepted_prefix, prefix_complete
from drafters.fill import Drafter, draft_head, features_of, fill_blocks
from drafters.length_head import LengthHead, length_loss, length_targets
from drafters.packing import PackedBatch
from drafters.replay import chunked_argmax
from drafters.target import Target
from lightning_modules.optim import OptimSpec, clip_each, configure_adamw


class LengthHeadModule(L.LightningModule):
    """Labels come from the *current* drafter's full blocks against the served text, never from truncated verification.

    Fit it on round starts (anchor source `rounds`): random anchors oversample easy stretches.
    """

    def __init__(self, length_head: LengthHead, drafter: Drafter, target: Target, optim: OptimSpec) -> None:
        super().__init__()
        self.length_head = length_head
        self.frozen_drafter = [drafter.eval()]  # in a list: not part of the module tree
        self.target = target
        self.optim_spec = optim

    def on_fit_start(self) -> None:
        self.target.model.to(self.device)
        self.frozen_drafter[0].to(self.device)

    @torch.no_grad()
    def labels(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(features_NBH, accepted_N, complete_N) of every block."""
        drafter, target = self.frozen_drafter[0], self.target
        filled = fill_blocks(drafter, target, batch, features_of(drafter, target, batch))
        hidden_NBH, layout = filled.hidden_NBH, filled.layout
        drafts_R = chunked_argmax(hidden_NBH.flatten(0, 1), draft_head(drafter, target))
        served_NB = batch.input_ids_T[layout.targets_NB]
        match_NB = (drafts_R.view_as(served_NB) == served_NB) & layout.valid_NB
        features = hidden_NBH if self.length_head.features == "hidden" else filled.embeddings_NBH
        return features, accepted_prefix(match_NB), prefix_complete(match_NB, layout.valid_NB)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        features, accepted_N, complete_N = self.labels(batch)
        block_size = self.frozen_drafter[0].block_size
        predicted_N = self.length_head(features)
        loss = length_loss(predicted_N, accepted_N, complete_N, block_size)
        self.log_dict(
            {
                "train/length_loss": loss.detach(),
                "train/length_predicted": predicted_N.detach().mean(),
                "train/length_label": length_targets(accepted_N, block_size).mean(),
            },
            prog_bar=True,
        )
        return loss

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.to(device) if isinstance(batch, PackedBatch) else batch

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        clip_each(self, [self.length_head], gradient_clip_val)

    def configure_optimizers(self) -> Any:
        return configure_adamw(None, self.length_head, self.optim_spec)

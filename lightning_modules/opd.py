"""On-policy distillation (AdaFlash §3.1), offline and online alike, with the length head learning beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drafters.block_loss import accepted_prefix, prefix_complete, served_matches
from drafters.fill import Drafter
from drafters.length_head import LengthHead, length_loss
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch
from drafters.target import Target
from drafters.training_vocabulary import TrainingVocabulary
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.optim import OptimSpec, configure_adamw


class OPDModule(BlockTrainingModule):
    """Distils the target into the drafter on the text that serving committed.

    With a length head, its MSE is added on detached features: the head follows the drafter as it changes, and the drafter
    feels nothing of it.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        loss: LossSpec,
        optim: OptimSpec,
        length_head: LengthHead | None = None,
        *,
        feature_cache_bytes: int = 0,
        vocabulary: TrainingVocabulary | None = None,
        ar_weight: float = 1.0,
    ) -> None:
        super().__init__(
            drafter,
            target,
            loss,
            optim,
            teacher_labels=True,
            feature_cache_bytes=feature_cache_bytes,
            vocabulary=vocabulary,
            ar_weight=ar_weight,
        )
        self.length_head = length_head

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        loss, targets, filled = self.block_step(batch)
        self.log_step(loss, targets)
        if self.length_head is None:
            return loss.value
        head = self.length_head
        features = filled.hidden_NBH if head.features == "hidden" else filled.embeddings_NBH
        match_NB = loss.match_NB
        if self.vocabulary is not None:
            # over part of the vocabulary more drafts match, and the head would learn to verify too many
            match_NB = served_matches(filled.hidden_NBH, self.target.head_VH, targets)
        head_loss = length_loss(
            head(features),
            accepted_prefix(match_NB),
            prefix_complete(match_NB, targets.valid_NB),
            self.drafter.block_size,
        )
        self.log("train/length_loss", head_loss.detach())
        return loss.value + head_loss

    def clipped_modules(self) -> list[nn.Module | None]:
        return [self.drafter, self.length_head]

    def configure_optimizers(self) -> Any:
        return configure_adamw(self.drafter, self.length_head, self.optim_spec)

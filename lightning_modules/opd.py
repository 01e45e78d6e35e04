"""On-policy distillation (AdaFlash §3.1), offline and online alike, with the heads of length policies learning beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drafters.acceptance_head import (
    AcceptanceHead,
    acceptance_labels,
    acceptance_loss,
    confident_argmax,
)
from drafters.block_loss import accepted_prefix, prefix_complete, served_matches
from drafters.fill import Drafter, FilledBlocks, draft_head
from drafters.length_head import LengthHead, length_loss
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch
from drafters.target import Target
from drafters.training_vocabulary import TrainingVocabulary
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.optim import OptimSpec, configure_adamw


class OPDModule(BlockTrainingModule):
    """Distils the target into the drafter on the text that serving committed.

    With a length head, its MSE is added on detached features, and so is the cross-entropy of an acceptance head: heads follow
    the drafter as it changes, and the drafter feels nothing of them.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        loss: LossSpec,
        optim: OptimSpec,
        length_head: LengthHead | None = None,
        *,
        acceptance_head: AcceptanceHead | None = None,
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
        self.acceptance_head = acceptance_head

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        loss, targets, filled = self.block_step(batch)
        self.log_step(loss, targets)
        if self.length_head is None and self.acceptance_head is None:
            return loss.value
        match_NB = loss.match_NB
        if self.vocabulary is not None:
            # over part of the vocabulary more drafts match, and the heads would learn to verify too many
            match_NB = served_matches(filled.hidden_NBH, self.target.head_VH, targets)
        total = loss.value
        if self.length_head is not None:
            head = self.length_head
            head_loss = length_loss(
                head(filled.hidden_NBH if head.features == "hidden" else filled.embeddings_NBH),
                accepted_prefix(match_NB),
                prefix_complete(match_NB, targets.valid_NB),
                self.drafter.block_size,
            )
            self.log("train/length_loss", head_loss.detach())
            total = total + head_loss
        if self.acceptance_head is not None:
            logits_ND = self.acceptance_head.logits(filled.hidden_NBH, self._confidence(filled))
            head_loss = acceptance_loss(logits_ND, *acceptance_labels(match_NB, targets.valid_NB))
            self.log("train/acceptance_loss", head_loss.detach())
            total = total + head_loss
        return total

    @torch.no_grad()
    def _confidence(self, filled: FilledBlocks) -> torch.Tensor | None:
        """confidence_ND of the blocks, if the acceptance head reads it: one more pass of the draft head."""
        if self.acceptance_head is None or not self.acceptance_head.reads_confidence:
            return None
        drafting_NDH = filled.hidden_NBH[:, 1:]
        _, confidence_R = confident_argmax(drafting_NDH.flatten(0, 1), draft_head(self.drafter, self.target))
        return confidence_R.view(drafting_NDH.shape[:2])

    def clipped_modules(self) -> list[nn.Module | None]:
        return [self.drafter, self.length_head, self.acceptance_head]

    def configure_optimizers(self) -> Any:
        heads = [head for head in (self.length_head, self.acceptance_head) if head is not None]
        return configure_adamw(self.drafter, nn.ModuleList(heads), self.optim_spec)

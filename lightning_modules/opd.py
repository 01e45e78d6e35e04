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
from drafters.block_loss import (
    BlockLoss,
    BlockTargets,
    accepted_prefix,
    prefix_complete,
    served_matches,
)
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
        match_NB, confidence_ND = self._labels(loss, targets, filled)
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
            logits_ND = self.acceptance_head.logits(filled.hidden_NBH, confidence_ND)
            head_loss = acceptance_loss(logits_ND, *acceptance_labels(match_NB, targets.valid_NB))
            self.log("train/acceptance_loss", head_loss.detach())
            total = total + head_loss
        return total

    @torch.no_grad()
    def _labels(
        self, loss: BlockLoss, targets: BlockTargets, filled: FilledBlocks
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """match_NB over the whole head, and confidence_ND if the acceptance head reads it (0 at slots outside the text)."""
        head_VH, valid_NB = draft_head(self.drafter, self.target), targets.valid_NB
        match_NB, confidence_ND = loss.match_NB, None
        if self.acceptance_head is not None and self.acceptance_head.reads_confidence:
            drafts_R, confidence_R = confident_argmax(filled.hidden_NBH[valid_NB], head_VH)
            confidence_NB = confidence_R.new_zeros(valid_NB.shape)
            confidence_NB[valid_NB] = confidence_R
            confidence_ND = confidence_NB[:, 1:]
            if self.vocabulary is not None:
                match_NB = torch.zeros_like(valid_NB)
                match_NB[valid_NB] = drafts_R == targets.served_NB[valid_NB]
        elif self.vocabulary is not None:
            # over part of the vocabulary more drafts match, and the heads would learn to verify too many
            match_NB = served_matches(filled.hidden_NBH, head_VH, targets)
        return match_NB, confidence_ND

    def clipped_modules(self) -> list[nn.Module | None]:
        return [self.drafter, self.length_head, self.acceptance_head]

    def configure_optimizers(self) -> Any:
        heads = [head for head in (self.length_head, self.acceptance_head) if head is not None]
        return configure_adamw(self.drafter, nn.ModuleList(heads), self.optim_spec)

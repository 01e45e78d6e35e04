"""Training a D3D drafter: blocks and next tokens together (D3D eq. 7)."""

from __future__ import annotations

import torch

from drafters.block_loss import BlockTargets
from drafters.d3d import D3DDrafter
from drafters.d3d_loss import D3DLoss, d3d_loss
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch
from drafters.target import Target
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.optim import OptimSpec


class D3DTrainingModule(BlockTrainingModule):
    """One step: documents and blocks through the drafter's own model → block loss + λ · next-token loss.

    The target runs only where its distribution or its greedy tokens are asked for.

    Args:
        drafter: trained in place, embedding and head included, fp32 master weights.
        target: whose responses the documents are.
        loss: objective of the blocks, `ce` or `opd`.
        optim: optimizer and schedule.
        ar_weight: λ of the next-token loss.
        teacher_labels: see `BlockTrainingModule`.
    """

    def __init__(
        self,
        drafter: D3DDrafter,
        target: Target,
        loss: LossSpec,
        optim: OptimSpec,
        *,
        ar_weight: float = 1.0,
        teacher_labels: bool = False,
    ) -> None:
        super().__init__(drafter, target, loss, optim, teacher_labels=teacher_labels)
        self.ar_weight = ar_weight

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        loss, targets = self.packed_step(batch)
        self.log_step(loss.diff, targets)
        self.log("train/ar_loss", loss.ar)
        return loss.value

    def packed_step(self, batch: PackedBatch) -> tuple[D3DLoss, BlockTargets]:
        """Loss and targets of one batch."""
        assert isinstance(self.drafter, D3DDrafter)
        output = self.drafter(batch)
        teacher = None
        if self.teacher_labels:
            teacher = self.target.forward_packed(batch.input_ids_T, batch.position_ids_T)
        loss = d3d_loss(
            output,
            self.working_head(),
            batch,
            self.loss_spec,
            ar_weight=self.ar_weight,
            teacher_hidden_TH=None if teacher is None else teacher.hidden_TH,
            teacher_head_VH=self.target.head_VH,
        )
        return loss, BlockTargets.from_layout(batch, output.layout)

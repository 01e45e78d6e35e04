"""Recovery of a pruned drafter from the unpruned one."""

from __future__ import annotations

import torch

from drafters.block_loss import BlockTargets
from drafters.blocks import build_blocks
from drafters.fill import Drafter, block_filler, draft_head, features_of
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch
from drafters.recovery import recovery_loss
from drafters.target import Target
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.optim import OptimSpec


class RecoveryModule(BlockTrainingModule):
    """One step: the same blocks through both drafters → weighted forward KL from the unpruned to the pruned one.

    Args:
        drafter: pruned, trained in place.
        teacher: unpruned, frozen here and held outside the module tree.
        target: gives a DFlash drafter its features and head.
        loss: its slot weights.
        optim: optimizer and schedule.
        label_share: ε of the adjusted teacher.
    """

    def __init__(
        self,
        drafter: Drafter,
        teacher: Drafter,
        target: Target,
        loss: LossSpec,
        optim: OptimSpec,
        *,
        label_share: float,
    ) -> None:
        super().__init__(drafter, target, loss, optim)
        self.frozen_teacher = [teacher.eval().requires_grad_(False)]
        self.label_share = label_share

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.frozen_teacher[0].to(self.device)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        (teacher,) = self.frozen_teacher
        features_TC = features_of(teacher, self.target, batch)
        with torch.no_grad():
            teacher_NBH = block_filler(teacher, self.target, batch, features_TC)(batch)
        layout = build_blocks(batch, teacher.block_size, teacher.spec.mask_token_id)
        targets = BlockTargets.from_layout(batch, layout)
        loss = recovery_loss(
            block_filler(self.drafter, self.target, batch, features_TC)(batch),
            self.working_head(),
            teacher_NBH,
            draft_head(teacher, self.target),
            targets,
            self.loss_spec,
            label_share=self.label_share,
        )
        self.log_step(loss, targets)
        return loss.value

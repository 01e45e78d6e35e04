"""Recovery of a pruned drafter from the unpruned one."""

from __future__ import annotations

from dataclasses import replace

import torch

from drafters.block_loss import BlockTargets, next_token_loss
from drafters.blocks import build_blocks
from drafters.d3d import D3DDrafter
from drafters.fill import Drafter, block_filler, draft_head, features_of
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch
from drafters.recovery import recovery_loss
from drafters.target import Target
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.optim import OptimSpec


class RecoveryModule(BlockTrainingModule):
    """One step: the same blocks through both drafters → weighted forward KL from the unpruned to the pruned one.

    A D3D drafter also recovers its next tokens, every one of the response, from the unpruned drafter as well (beyond the
    paper): blocks alone teach few anchors, while each removed layer costs the language model that all its blocks rest on.

    Args:
        drafter: pruned, trained in place.
        teacher: unpruned, frozen here and held outside the module tree.
        target: gives a DFlash drafter its features and head.
        loss: its slot weights.
        optim: optimizer and schedule.
        label_share: ε of the adjusted teacher.
        ar_weight: λ of the next tokens, for a D3D drafter.
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
        ar_weight: float = 1.0,
    ) -> None:
        super().__init__(drafter, target, loss, optim, ar_weight=ar_weight)
        self.frozen_teacher = [teacher.eval().requires_grad_(False)]
        self.label_share = label_share

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.frozen_teacher[0].to(self.device)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        (teacher,) = self.frozen_teacher
        teacher_head_VH = draft_head(teacher, self.target)
        next_tokens = None
        if isinstance(self.drafter, D3DDrafter) and isinstance(teacher, D3DDrafter):
            with torch.no_grad():
                taught = teacher(batch)
            learning = self.drafter(batch)
            head_VH, hidden_NBH, teacher_NBH = self.working_head(), learning.hidden_NBH, taught.hidden_NBH
            if self.ar_weight:
                next_tokens = next_token_loss(
                    learning.hidden_TH,
                    head_VH,
                    batch,
                    teacher_hidden_TH=taught.hidden_TH,
                    teacher_head_VH=teacher_head_VH,
                )
        else:
            head_VH = self.working_head()
            features_TC = features_of(teacher, self.target, batch)
            with torch.no_grad():
                teacher_NBH = block_filler(teacher, self.target, batch, features_TC)(batch)
            hidden_NBH = block_filler(self.drafter, self.target, batch, features_TC)(batch)
        layout = build_blocks(batch, teacher.block_size, teacher.spec.mask_token_id)
        targets = BlockTargets.from_layout(batch, layout)
        loss = recovery_loss(
            hidden_NBH,
            head_VH,
            teacher_NBH,
            teacher_head_VH,
            targets,
            self.loss_spec,
            label_share=self.label_share,
        )
        value = self.with_next_tokens(loss, next_tokens)
        self.log_step(replace(loss, value=value), targets)
        return value

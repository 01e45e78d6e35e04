"""Training a drafter on blocks: from scratch, and the base of on-policy distillation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import nn

from datamodules.offline import ReplayLoader
from drafters.block_loss import BlockLoss, BlockTargets, accepted_prefix, block_loss
from drafters.d3d import D3DDrafter
from drafters.d3d_loss import d3d_loss
from drafters.errors import UserError
from drafters.feature_cache import FeatureCache
from drafters.fill import Drafter, FilledBlocks, draft_head, fill_blocks
from drafters.objectives import LossSpec
from drafters.packing import Document, PackedBatch
from drafters.replay import replay
from drafters.sharding import shard, whole_weights
from drafters.target import Target, TargetOutput
from drafters.teacher import TeacherMoments, teacher_moments
from drafters.training_vocabulary import TrainingVocabulary
from lightning_modules.all_ranks import over_all_ranks
from lightning_modules.metrics import AcceptanceLength
from lightning_modules.optim import OptimSpec, clip_each, configure_adamw


class BlockTrainingModule(L.LightningModule):
    """One step: target features → drafter fills blocks at the anchors → weighted block loss over the batches of all processes.

    A D3D drafter reads no features; it learns next tokens beside the blocks (D3D eq. 7), and the target runs only where its
    distribution or its greedy tokens are asked for.

    The target is held outside the module tree: it is frozen, shared, and not part of checkpoints.

    Args:
        drafter: trained in place, fp32 master weights.
        target: gives features, embeddings, head and (for distillation) its distributions.
        loss: the objective.
        optim: optimizer and schedule.
        feature_cache_bytes: memory for the target's outputs; 0 computes them anew at every step.
        vocabulary: tokens that the loss sees, of documents among those it was made of; None takes all. See
            `use_vocabulary` for training whose documents change.
        teacher_labels: take hard labels from the target's argmax instead of the served tokens. Needed
            when responses were sampled; for greedy responses the two are the same up to float ties.
        ar_weight: D3D's λ of the next-token loss.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        loss: LossSpec,
        optim: OptimSpec,
        *,
        teacher_labels: bool = False,
        feature_cache_bytes: int = 0,
        vocabulary: TrainingVocabulary | None = None,
        ar_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.ar_weight = ar_weight
        self.target = target
        self.loss_spec = loss
        self.optim_spec = optim
        self.teacher_labels = teacher_labels or loss.needs_teacher
        self.vocabulary = vocabulary
        self._kept_head: torch.Tensor | None = None
        # distillation needs the whole distribution, not its moments
        keep_moments = self.teacher_labels and loss.objective != "opd" and not isinstance(drafter, D3DDrafter)
        self.features = (
            FeatureCache(target, feature_cache_bytes, moments=self.moments if keep_moments else None)
            if feature_cache_bytes
            else None
        )
        self.acceptance = AcceptanceLength(drafter.block_size)

    def use_vocabulary(self, vocabulary: TrainingVocabulary | None) -> None:
        """Let the loss see other tokens from now on. What was kept of the target's outputs was made for the old ones."""
        self.vocabulary = vocabulary
        self._kept_head = None
        if self.features is not None:
            self.features.clear()

    def loss_head(self) -> torch.Tensor:
        """The head as the loss sees it, [V, H] or [U, H]."""
        if self.vocabulary is None:
            return self.target.head_VH
        if self._kept_head is None or self._kept_head.device != self.target.device:
            self._kept_head = self.vocabulary.head(self.target.head_VH)
        return self._kept_head

    def working_head(self) -> torch.Tensor:
        """The head that drafts are made with, in the precision of this step's products.

        A trained head is cast once, with a gradient in full precision, and not for every chunk of logits.
        """
        head_VH = draft_head(self.drafter, self.target)
        kind = self.device.type
        if head_VH.requires_grad and torch.is_autocast_enabled(kind):
            head_VH = head_VH.to(torch.get_autocast_dtype(kind))
        return head_VH

    def moments(self, hidden_TH: torch.Tensor) -> TeacherMoments:
        """What the loss needs of the target's predictions at these positions."""
        return teacher_moments(hidden_TH, self.loss_head(), soft=self.loss_spec.needs_teacher)

    def on_fit_start(self) -> None:
        self.target.model.to(self.device)

    def configure_model(self) -> None:
        """Divide the drafter where the strategy brings a mesh (FSDP2). The target stays whole in every process."""
        if self.device_mesh is not None:
            shard(self.drafter, self.device_mesh["data_parallel"])

    def block_step(self, batch: PackedBatch) -> tuple[BlockLoss, BlockTargets, FilledBlocks]:
        """Loss, targets and drafted blocks of one batch; the loss is that of all processes' batches together."""
        if isinstance(self.drafter, D3DDrafter):
            return self._d3d_step(self.drafter, batch)
        output = self._target_output(batch)
        filled = fill_blocks(self.drafter, self.target, batch, output.features_TC)
        targets = BlockTargets.from_layout(batch, filled.layout)
        seen = targets
        if self.vocabulary is not None:
            seen = replace(targets, served_NB=self.vocabulary.index(targets.served_NB))
        loss = block_loss(
            filled.hidden_NBH,
            self.loss_head(),
            seen,
            self.loss_spec,
            teacher_hidden_TH=output.hidden_TH if self.teacher_labels else None,
            moments=output.moments,
        )
        (value,) = over_all_ranks((loss.value, loss.weight))
        return replace(loss, value=value), targets, filled

    def _d3d_step(
        self, drafter: D3DDrafter, batch: PackedBatch
    ) -> tuple[BlockLoss, BlockTargets, FilledBlocks]:
        output = drafter(batch)
        loss = d3d_loss(
            output,
            self.working_head(),
            batch,
            self.loss_spec,
            ar_weight=self.ar_weight,
            teacher_hidden_TH=self._target_output(batch).hidden_TH if self.teacher_labels else None,
            teacher_head_VH=self.target.head_VH,
        )
        value = self.with_next_tokens(loss.diff, loss.ar)
        with torch.no_grad():
            embeddings_NBH = drafter.embed(output.layout.block_ids_NB)
        filled = FilledBlocks(output.hidden_NBH, embeddings_NBH, output.layout)
        targets = BlockTargets.from_layout(batch, output.layout)
        return replace(loss.diff, value=value), targets, filled

    def with_next_tokens(self, blocks: BlockLoss, next_tokens: BlockLoss | None) -> torch.Tensor:
        """L_diff + λ·L_AR of all processes' batches (D3D eq. 7)."""
        if next_tokens is None:
            return over_all_ranks((blocks.value, blocks.weight))[0]
        diff, ar = over_all_ranks((blocks.value, blocks.weight), (next_tokens.value, next_tokens.weight))
        self.log("train/ar_loss", ar.detach())
        return diff + self.ar_weight * ar

    def _target_output(self, batch: PackedBatch) -> TargetOutput:
        if self.features is not None:
            return self.features.forward(batch)
        return self.target.forward_packed(batch.input_ids_T, batch.position_ids_T)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        loss, targets, _ = self.block_step(batch)
        self.log_step(loss, targets)
        return loss.value

    def log_step(self, loss: BlockLoss, targets: BlockTargets) -> None:
        """Training metrics: loss, slot accuracy, and mean accepted prefix + 1 over the trained blocks."""
        counted = targets.valid_NB.sum().clamp_min(1)
        self.log_dict(
            {
                "train/loss": loss.value.detach(),
                "train/accuracy": loss.match_NB.sum() / counted,
                "train/block_acceptance": accepted_prefix(loss.match_NB).float().mean() + 1,
            },
            prog_bar=True,
        )

    def on_validation_epoch_start(self) -> None:
        # processes replay packs of different sizes, so passes through the drafter must not wait for each other
        self._whole = ExitStack()
        self._whole.enter_context(whole_weights(self.drafter))

    def validation_step(self, documents: list[Document], batch_idx: int) -> None:
        self.acceptance.update(replay(self.drafter, self.target, documents))

    def on_validation_epoch_end(self) -> None:
        self._whole.close()
        self.log("val/acceptance_length", self.acceptance.compute(), prog_bar=True)
        self.log("val/acceptance_rate", self.acceptance.acceptance_rate())
        self.acceptance.reset()

    @torch.no_grad()
    def measure(self, documents: Sequence[Document]) -> float:
        """Replay τ of the drafter as it is now, over documents that all processes know and share among them."""
        training = self.drafter.training
        self.drafter.to(self.target.device).eval()  # Lightning leaves what it has trained on the CPU
        acceptance = AcceptanceLength(self.drafter.block_size).to(self.target.device)
        with whole_weights(self.drafter):
            for pack in ReplayLoader(documents, self.trainer.global_rank, self.trainer.world_size):
                acceptance.update(replay(self.drafter, self.target, pack))
        self.drafter.train(training)
        return float(acceptance.compute())

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.to(device) if isinstance(batch, PackedBatch) else batch

    def clipped_modules(self) -> list[nn.Module | None]:
        """Modules whose gradients are clipped, each by its own norm."""
        return [self.drafter]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        clip_each(self, self.clipped_modules(), gradient_clip_val)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["divided"] = self.device_mesh is not None
        if isinstance(self.drafter, D3DDrafter):
            checkpoint["d3d_shift"] = self.drafter.spec.shift

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises:
        UserError: for a checkpoint whose rows predict otherwise; the weights would fit and mean something else.
        """
        if not isinstance(self.drafter, D3DDrafter):
            return
        trained, wanted = bool(checkpoint.get("d3d_shift", False)), self.drafter.spec.shift
        if trained != wanted:
            raise UserError(
                f"drafter.shift: the checkpoint was trained with {trained}, the config says {wanted}; set it alike, or run "
                "without --resume"
            )

    def configure_optimizers(self) -> Any:
        return configure_adamw(self.drafter, None, self.optim_spec)

"""What a D3D drafter learns: L = L_diff + λ·L_AR (D3D eq. 7).

L_diff is the block loss of `drafters.block_loss`, L_AR the mean next-token cross-entropy of the response. Both see the drafter's
own head, which is trained, so both return its gradient; with tied weights it adds to the embedding's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafters.block_loss import BlockLoss, BlockTargets, block_loss, next_token_loss
from drafters.d3d import D3DOutput
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch


@dataclass(frozen=True)
class D3DLoss:
    """`diff` the block loss, `ar` the next-token loss if λ = `ar_weight` is not 0."""

    diff: BlockLoss
    ar: BlockLoss | None
    ar_weight: float

    @property
    def value(self) -> torch.Tensor:
        """L_diff + λ·L_AR, scalar with a graph."""
        return self.diff.value if self.ar is None else self.diff.value + self.ar_weight * self.ar.value


def d3d_loss(
    output: D3DOutput,
    head_VH: torch.Tensor,
    batch: PackedBatch,
    spec: LossSpec,
    *,
    ar_weight: float = 1.0,
    teacher_hidden_TH: torch.Tensor | None = None,
    teacher_head_VH: torch.Tensor | None = None,
    chunk_rows: int | None = None,
) -> D3DLoss:
    """The training loss of a packed batch.

    Args:
        output: the drafter's.
        head_VH: the drafter's head, in the dtype that its matmuls shall have.
        batch: what went in.
        spec: objective of the blocks: `ce`, or `opd` and `osd` with the teacher.
        ar_weight: λ; 0 leaves the next-token loss out. With `osd` next tokens have soft labels as well, beyond the paper.
        teacher_hidden_TH, teacher_head_VH: the target's final hidden states and head; see `block_loss`.
        chunk_rows: rows per chunk of logits.
    """
    targets = BlockTargets.from_layout(batch, output.layout)
    diff = block_loss(
        output.hidden_NBH,
        head_VH,
        targets,
        spec,
        teacher_hidden_TH=teacher_hidden_TH,
        teacher_head_VH=teacher_head_VH,
        chunk_rows=chunk_rows,
    )
    if not ar_weight:
        return D3DLoss(diff, None, ar_weight)
    soft = spec.objective == "osd"
    ar = next_token_loss(
        output.hidden_TH,
        head_VH,
        batch,
        teacher_hidden_TH=teacher_hidden_TH if soft else None,
        teacher_head_VH=teacher_head_VH,
        chunk_rows=chunk_rows,
    )
    return D3DLoss(diff, ar, ar_weight)

"""Our contenders: the training modules as they are, over a target whose outputs were recorded.

Real runs keep the target's outputs between epochs (`train.feature_cache_mib`) or pay for its forward; no side pays for it here.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch

from contest.problem import DECAY, Problem, drafter_config
from contest.side import Side
from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.length_head import LengthHead
from drafters.objectives import LossSpec
from drafters.packing import PackedBatch
from drafters.target import Target, TargetOutput
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.length_head import LengthHeadModule
from lightning_modules.opd import OPDModule
from lightning_modules.optim import OptimSpec

VARIANTS = ("ce", "opd", "osd", "opd+length", "length", "d3d")


class RecordedTarget:
    """Answers what the training modules ask of a `Target` from the problem file."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.head_VH = problem.head_VH
        self.device = problem.head_VH.device
        self.dtype = problem.head_VH.dtype

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_ids, self.head_VH)

    def forward_packed(self, input_ids_T: torch.Tensor, position_ids_T: torch.Tensor) -> TargetOutput:
        return TargetOutput(self.problem.hidden_TH, self.problem.features_TC)


def packed_batch(problem: Problem) -> PackedBatch:
    """The problem's one document with its anchors."""
    length = problem.shape.length
    return PackedBatch(
        input_ids_T=problem.ids_T,
        document_ids_T=torch.zeros(length, dtype=torch.long),
        position_ids_T=torch.arange(length),
        response_mask_T=problem.response_mask_T(),
        anchors_N=problem.anchors_N,
        domains=["default"],
        document_names=["document"],
    )


def ours(problem: Problem, variant: str) -> Side:
    """One of `VARIANTS`."""
    # metrics are computed and then have no trainer to go to
    warnings.filterwarnings("ignore", message=r".*self\.log.*")
    batch, target = packed_batch(problem), cast(Target, RecordedTarget(problem))
    module = _module(problem, target, variant)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return Side(
        loss=lambda: module.training_step(batch, 0),
        weights={name.removeprefix("drafter."): p for name, p in trained.items()},
    )


def _module(problem: Problem, target: Target, variant: str) -> Any:
    loss = LossSpec("ce" if variant in ("ce", "d3d") else cast(Any, variant.split("+")[0]), decay=DECAY)
    if variant == "d3d":
        return BlockTrainingModule(_d3d_drafter(problem), target, loss, OptimSpec()).train()
    drafter = DFlashDrafter(drafter_config(problem.shape))
    drafter.load_state_dict(problem.drafter)
    if variant == "ce":
        return BlockTrainingModule(drafter, target, loss, OptimSpec()).train()
    head = LengthHead(problem.shape.hidden)
    if variant == "length":
        return LengthHeadModule(head, drafter, target, OptimSpec())
    return OPDModule(
        drafter, target, loss, OptimSpec(), length_head=head if variant.endswith("length") else None
    ).train()


def _d3d_drafter(problem: Problem) -> D3DDrafter:
    """A causal LM of the DFlash drafter's depth with a tied head of its own."""
    from transformers import Qwen3ForCausalLM

    config = drafter_config(problem.shape)
    config.tie_word_embeddings = True
    config.d3d_config = {
        "block_size": problem.shape.block,
        "mask_token_id": problem.shape.mask_token_id,
        "shift": True,
    }
    return D3DDrafter(Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa"))

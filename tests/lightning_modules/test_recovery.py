"""Recovery of a pruned D3D drafter: its blocks, and its next tokens beside them."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.block_loss import BlockTargets
from drafters.d3d import D3DDrafter
from drafters.layers import remove_layer
from drafters.objectives import LossSpec
from drafters.packing import pack_documents
from drafters.recovery import recovery_loss
from drafters.target import Target
from lightning_modules.optim import OptimSpec
from lightning_modules.recovery import RecoveryModule
from tests.lightning_modules.training_samples import BLOCK_SIZE, VOCAB, make_documents, make_target


def d3d_of(target: Target) -> D3DDrafter:
    config = copy.deepcopy(target.config)
    config.d3d_config = {"block_size": BLOCK_SIZE, "mask_token_id": VOCAB - 1, "shift": True}
    lm = AutoModelForCausalLM.from_config(config).float()
    lm.load_state_dict(target.model.state_dict())
    return D3DDrafter(lm)


@pytest.mark.parametrize("ar_weight", [0.0, 0.7])
@pytest.mark.filterwarnings("ignore:.*self.log.*")
def test_a_pruned_d3d_drafter_recovers_blocks_and_next_tokens(ar_weight: float) -> None:
    target = make_target()
    teacher, pruned = d3d_of(target), d3d_of(target)
    remove_layer(pruned, 1)
    spec = LossSpec(weighting="exponential")
    module = RecoveryModule(
        pruned, teacher, target, spec, OptimSpec(lr=1e-3), label_share=0.1, ar_weight=ar_weight
    )
    documents = make_documents(3)
    batch = pack_documents(documents, anchors_per_document=4, generator=torch.Generator().manual_seed(0))
    value = module.training_step(batch, 0)
    value.backward()
    got = {name: p.grad.clone() for name, p in pruned.named_parameters() if p.grad is not None}
    pruned.zero_grad()

    with torch.no_grad():
        taught = teacher(batch)
    learning = pruned(batch)
    targets = BlockTargets.from_layout(batch, learning.layout)
    blocks = recovery_loss(
        learning.hidden_NBH,
        pruned.head_VH,
        taught.hidden_NBH,
        teacher.head_VH,
        targets,
        spec,
        label_share=0.1,
    ).value
    predicting = []
    first = 0
    for document in documents:
        predicting += [first + i - 1 for i, produced in enumerate(document.response_mask) if produced]
        first += len(document.token_ids)
    p = (taught.hidden_TH @ teacher.head_VH.T).log_softmax(-1)[predicting]
    q = (learning.hidden_TH @ pruned.head_VH.T).log_softmax(-1)[predicting]
    next_tokens = (p.exp() * (p - q)).sum(-1).mean()
    assert next_tokens > 0.01
    reference = blocks + ar_weight * next_tokens
    reference.backward()
    torch.testing.assert_close(value, reference, atol=1e-5, rtol=1e-5)
    for name, parameter in pruned.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-5, rtol=1e-4)

"""Pruning: each removal measured in one sweep equals a real removal; recovery's loss equals autograd over the formula."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from drafters.block_loss import BlockTargets
from drafters.checkpoint import load_drafter, save_drafter
from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.errors import UserError
from drafters.identity import TargetIdentity
from drafters.layers import layers_of, remove_layer
from drafters.objectives import LossSpec, fixed_weights
from drafters.packing import Document
from drafters.prune import replay_without_each_layer
from drafters.recovery import recovery_loss
from drafters.replay import replay
from drafters.target import Target


def d3d_of(target: Target) -> D3DDrafter:
    """A drafter of the target's own weights, in all its layers."""
    config = copy.deepcopy(target.config)
    config.d3d_config = {"block_size": 4, "mask_token_id": config.vocab_size - 1}
    lm = AutoModelForCausalLM.from_config(config)
    lm.load_state_dict(target.model.state_dict())
    return D3DDrafter(lm.to(target.dtype).eval())


def copied(drafter: Any) -> Any:
    """A second drafter with the same weights (a HF model with hooks is not copied by `deepcopy` alone)."""
    if isinstance(drafter, D3DDrafter):
        lm = AutoModelForCausalLM.from_config(copy.deepcopy(drafter.config))
        lm.load_state_dict(drafter.lm.state_dict())
        return D3DDrafter(lm.to(drafter.dtype).eval())
    return copy.deepcopy(drafter)


@pytest.mark.parametrize("family", ["d3d", "dflash"])
def test_one_sweep_measures_what_real_removals_would(
    family: str,
    make_target: Callable[..., Target],
    make_drafter: Callable[..., DFlashDrafter],
    make_trained: Callable[[str], Any],
) -> None:
    target = make_target("llama")
    drafter = d3d_of(target) if family == "d3d" else make_drafter(target, num_layers=3)
    documents: Sequence[Document] = make_trained("llama").documents[:3]
    whole = replay(drafter, target, documents)
    depth = len(layers_of(drafter))
    swept = replay_without_each_layer(drafter, target, documents, range(depth))
    assert len(swept) == depth
    assert replay_without_each_layer(drafter, target, documents, [2, 0]) == [swept[2], swept[0]]
    assert replay(drafter, target, documents) == whole, "the drafter is as it was"
    for index, results in enumerate(swept):
        pruned = copied(drafter)
        remove_layer(pruned, index)
        assert replay(pruned, target, documents) == results
    assert len({tuple(r.committed for r in results) for results in swept} | {()}) > 1


def test_a_pruned_drafter_is_an_ordinary_smaller_model(
    make_target: Callable[..., Target], tmp_path: Any
) -> None:
    target = make_target("qwen3")
    drafter = d3d_of(target)
    depth = len(layers_of(drafter))
    remove_layer(drafter, 1)
    directory = save_drafter(
        tmp_path / "d",
        drafter,
        identity=TargetIdentity("t", "r", "a" * 64),
        drafter_version="v",
        dtype=torch.float32,
    )
    plain = AutoModelForCausalLM.from_pretrained(directory)
    assert plain.config.num_hidden_layers == len(plain.model.layers) == depth - 1
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        generated = plain.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        torch.testing.assert_close(plain(ids).logits, drafter.lm(ids).logits, atol=1e-5, rtol=0)
        assert torch.equal(
            generated, drafter.lm.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        )
    assert isinstance(load_drafter(directory).drafter, D3DDrafter)


def test_the_last_layer_stays(make_target: Callable[..., Target], make_drafter: Callable[..., Any]) -> None:
    drafter = make_drafter(make_target("llama"), num_layers=2)
    remove_layer(drafter, 0)
    with pytest.raises(UserError, match="one layer left"):
        remove_layer(drafter, 0)
    assert len(drafter.layers) == drafter.config.num_hidden_layers == 1


@pytest.mark.parametrize("trained_head", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_recovery_is_the_weighted_forward_kl(share: float, trained_head: bool) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    blocks, size, hidden, vocab = 5, 4, 6, 11
    student, teacher, head, teacher_head = (
        drawn(blocks, size, hidden),
        drawn(blocks, size, hidden),
        drawn(vocab, hidden),
        drawn(vocab, hidden),
    )
    valid = torch.ones(blocks, size, dtype=torch.bool)
    valid[:, 0] = False
    valid[2, 2:] = False
    valid[3] = False
    served = torch.randint(0, vocab, (blocks, size), generator=generator)
    targets = BlockTargets(served, valid, torch.zeros_like(served))
    spec = LossSpec(weighting="exponential", decay=1.5)

    student.requires_grad_(True)
    head.requires_grad_(trained_head)
    got = recovery_loss(student, head, teacher, teacher_head, targets, spec, label_share=share, chunk_rows=4)
    got.value.backward()
    gradients = [student.grad, head.grad]

    again, head_again = (
        student.detach().clone().requires_grad_(True),
        head.detach().clone().requires_grad_(True),
    )
    weights = fixed_weights(spec, size).double()
    total, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for n in range(blocks):
        for j in range(size):
            if not valid[n, j]:
                continue
            p = (teacher_head @ teacher[n, j]).softmax(-1) * (1 - share)
            p = p + share * F.one_hot(served[n, j], vocab)
            logq = (head_again @ again[n, j]).log_softmax(-1)
            total = total + weights[j] * (p * (p.log() - logq)).sum()
            weight_sum += float(weights[j])
    reference = total / weight_sum
    reference.backward()
    torch.testing.assert_close(got.value, reference)
    torch.testing.assert_close(gradients[0], again.grad)
    if trained_head:
        torch.testing.assert_close(gradients[1], head_again.grad)
    else:
        assert gradients[1] is None


def test_a_perfect_student_has_nothing_to_recover() -> None:
    hidden, head = torch.randn(3, 4, 8), torch.randn(10, 8)
    valid = torch.ones(3, 4, dtype=torch.bool)
    valid[:, 0] = False
    served = torch.zeros(3, 4, dtype=torch.long)
    student = hidden.clone().requires_grad_(True)
    loss = recovery_loss(student, head, hidden, head, BlockTargets(served, valid, served), LossSpec())
    loss.value.backward()
    assert abs(float(loss.value)) < 1e-6
    assert student.grad is not None and float(student.grad.abs().max()) < 1e-6
    with pytest.raises(UserError, match="fixed weights"):
        recovery_loss(
            hidden, head, hidden, head, BlockTargets(served, valid, served), LossSpec(weighting="survival")
        )

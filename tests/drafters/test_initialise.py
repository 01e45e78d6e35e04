"""Starting weights: deterministic by seed, and copies of target layers where asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafters.dflash import DFlashDrafter
from drafters.errors import UserError
from drafters.initialise import initialise
from drafters.target import Target

MakeTarget = Callable[..., Target]
MakeDrafter = Callable[..., DFlashDrafter]


def weights(drafter: DFlashDrafter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


@pytest.mark.parametrize("how", ["random", "target"])
def test_the_seed_decides_whatever_was_there_before(
    kind: str, how: str, make_target: MakeTarget, make_drafter: MakeDrafter
) -> None:
    target = make_target(kind)
    first, second, third = (make_drafter(target, seed=seed) for seed in (1, 2, 3))
    initialise(first, target, how, seed=7)  # type: ignore[arg-type]
    torch.manual_seed(123)
    initialise(second, target, how, seed=7)  # type: ignore[arg-type]
    initialise(third, target, how, seed=8)  # type: ignore[arg-type]
    torch.testing.assert_close(weights(second), weights(first), rtol=0, atol=0)
    assert (how == "target") == torch.equal(
        first.layers[0].mlp.up_proj.weight, third.layers[0].mlp.up_proj.weight
    )
    assert all(torch.isfinite(t).all() for t in weights(first).values())


def test_random_weights_start_calm(make_target: MakeTarget, make_drafter: MakeDrafter) -> None:
    target = make_target()
    drafter = make_drafter(target, num_layers=2)
    initialise(drafter, target, "random", seed=0)
    layer = drafter.layers[0]
    assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.self_attn.o_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert layer.mlp.down_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert (layer.input_layernorm.weight == 1).all()
    # fc starts by reading the deepest of the chosen layers
    features = torch.randn(4, 3 * 32)
    torch.testing.assert_close(drafter.fc(features), features[:, 64:])


def test_target_layers_are_copied(kind: str, make_target: MakeTarget, make_drafter: MakeDrafter) -> None:
    target = make_target(kind)
    source = target.model.model.layers
    drafter = make_drafter(target, num_layers=2)
    initialise(drafter, target, "target", seed=0, layer_ids=[3, 1])
    for layer, layer_id in zip(drafter.layers, (3, 1), strict=True):
        given = source[layer_id].state_dict()
        gain = given["input_layernorm.weight"]
        for name, tensor in layer.state_dict().items():
            if name == "input_layernorm.weight":
                assert (tensor == 1).all()
            elif name.split(".")[1] in {"q_proj", "k_proj", "v_proj"}:
                # the gain is folded in: context features reach these without the input norm
                assert torch.equal(tensor, given[name] * gain), name
            elif name in given:
                assert torch.equal(tensor, given[name]), name
            else:
                assert (kind, name.split(".")[1] in {"q_norm", "k_norm"}) == ("llama", True)
    assert torch.equal(drafter.norm.weight, target.model.model.norm.weight)
    # nothing is shared: training the drafter must not touch the target
    with torch.no_grad():
        drafter.layers[0].mlp.up_proj.weight.add_(1)
    assert not torch.equal(drafter.layers[0].mlp.up_proj.weight, source[3].mlp.up_proj.weight)


def test_the_default_layers_are_the_last(make_target: MakeTarget, make_drafter: MakeDrafter) -> None:
    target = make_target("qwen3")
    source = target.model.model.layers
    drafter = make_drafter(target, num_layers=2)
    initialise(drafter, target, "target", seed=0)
    for layer, layer_id in zip(drafter.layers, (3, 4), strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, source[layer_id].mlp.up_proj.weight)


def test_norms_for_a_llama_target_keep_the_size_of_queries_and_keys(
    make_target: MakeTarget, make_drafter: MakeDrafter
) -> None:
    target = make_target("llama")
    drafter = make_drafter(target, num_layers=1)
    initialise(drafter, target, "target", seed=0, layer_ids=[2])
    attention = drafter.layers[0].self_attn
    x = drafter.layers[0].input_layernorm(torch.randn(4000, 32, generator=torch.Generator().manual_seed(0)))
    for norm, projection in ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)):
        raw = projection(x)
        with torch.no_grad():
            normed = norm(raw.view(4000, -1, 8))
        assert normed.square().mean().item() == pytest.approx(raw.square().mean().item(), rel=0.05)


@pytest.mark.parametrize("layer_ids", [[0], [0, 5], [-1, 2]])
def test_impossible_source_layers_are_refused(
    layer_ids: list[int], make_target: MakeTarget, make_drafter: MakeDrafter
) -> None:
    target = make_target()
    with pytest.raises(UserError, match="init_layer_ids"):
        initialise(make_drafter(target), target, "target", seed=0, layer_ids=layer_ids)


def test_a_drafter_deeper_than_its_target_cannot_be_copied(
    make_target: MakeTarget, make_drafter: MakeDrafter
) -> None:
    target = make_target()
    with pytest.raises(UserError, match="init_layer_ids"):
        initialise(make_drafter(target, num_layers=6), target, "target", seed=0)

"""A removed layer is made up for by the weighted least squares that the formula says, for both families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drafters.d3d import D3DDrafter
from drafters.dflash import DFlashDrafter
from drafters.fill import features_of, fill_blocks
from drafters.layers import layers_of, mlp_output, remove_layer
from drafters.packing import PackedBatch, pack_documents
from drafters.prune import replay_without_each_layer
from drafters.repair import FIRST_TOKEN_WEIGHT, RIDGE, fit_repairs
from drafters.replay import replay
from drafters.target import Target
from tests.drafters.test_prune import copied, d3d_of

Scene = tuple[Any, Target, list[PackedBatch], Any]


@pytest.fixture(params=["d3d", "dflash"])
def scene(
    request: pytest.FixtureRequest,
    make_target: Callable[..., Target],
    make_drafter: Callable[..., DFlashDrafter],
    make_trained: Callable[[str], Any],
) -> Scene:
    target = make_target("llama")
    drafter = d3d_of(target) if request.param == "d3d" else make_drafter(target, num_layers=3)
    documents = make_trained("llama").documents[:6]
    generator = torch.Generator().manual_seed(3)
    batches = [
        pack_documents(documents[i : i + 2], anchors_per_document=4, generator=generator) for i in (0, 2, 4)
    ]
    return drafter, target, batches, documents


def seen_by(drafter: Any, target: Target, batch: PackedBatch, layer: nn.Module, what: str) -> torch.Tensor:
    """Rows of one layer in a pass of its own: its output, or what its MLP multiplies by the projection."""
    seen: list[torch.Tensor] = []
    if what == "output":
        hook = layer.register_forward_hook(lambda _m, _i, out: seen.append(out))
    else:
        hook = mlp_output(layer).register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[0]))
    with hook, torch.no_grad():
        fill_blocks(drafter, target, batch, features_of(drafter, target, batch))
    return seen[0].reshape(-1, seen[0].shape[-1]).double()


def test_a_repair_is_the_weighted_ridge_regression_of_what_the_layer_added(scene: Scene) -> None:
    drafter, target, batches, _ = scene
    layers = layers_of(drafter)
    repairs = fit_repairs(drafter, target, batches, range(len(layers)), stored=torch.float32)
    assert sorted(repairs) == list(range(1, len(layers)))
    for index, repair in repairs.items():
        rows, missing, weights = [], [], []
        for batch in batches:
            after = seen_by(drafter, target, batch, layers[index], "output")
            importance = torch.ones(len(after), dtype=torch.float64)
            if isinstance(drafter, D3DDrafter):
                for row, position in enumerate(batch.position_ids_T.tolist()):
                    if position == 0:
                        importance[row] = FIRST_TOKEN_WEIGHT
            rows.append(seen_by(drafter, target, batch, layers[index - 1], "activations"))
            missing.append(after - seen_by(drafter, target, batch, layers[index - 1], "output"))
            weights.append(torch.stack([importance, importance / after.square().mean(-1)]))
        a, y, (importance, w) = torch.cat(rows), torch.cat(missing), torch.cat(weights, dim=1)
        penalty = RIDGE * (a.square() * w[:, None]).sum(0).mean()
        # ridge regression as a plain least-squares problem with one more row per weight
        root = w.sqrt()[:, None]
        stacked = torch.cat([a * root, penalty.sqrt() * torch.eye(a.shape[1], dtype=torch.float64)])
        wanted = torch.cat([y * root, torch.zeros(a.shape[1], y.shape[1], dtype=torch.float64)])
        change = torch.linalg.lstsq(stacked, wanted).solution
        weight = mlp_output(layers[index - 1]).weight
        torch.testing.assert_close((repair.weight_HI - weight).double(), change.T, atol=2e-5, rtol=2e-3)
        left = ((y - a @ change).square().mean(-1) * w).sum() / importance.sum()
        assert repair.residual == pytest.approx(float(left), rel=1e-3)
        assert repair.rows == len(a)


def test_the_sweep_measures_repaired_removals_and_leaves_the_drafter_as_it_was(scene: Scene) -> None:
    drafter, target, batches, documents = scene
    depth = len(layers_of(drafter))
    repairs = fit_repairs(drafter, target, batches, range(depth))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    swept = replay_without_each_layer(drafter, target, documents, range(depth), repairs)
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())
    for index, results in enumerate(swept):
        pruned = copied(drafter)
        remove_layer(pruned, index, repairs[index].weight_HI if index else None)
        assert replay(pruned, target, documents) == results
    bare = replay_without_each_layer(drafter, target, documents, range(depth))
    assert swept[0] == bare[0] and swept != bare


def stream_error(pruned: Any, drafter: Any, target: Target, index: int, batches: list[PackedBatch]) -> float:
    """How far the pruned drafter's stream is from the whole one's where the removed layer used to end."""
    total, weight = 0.0, 0.0
    for batch in batches:
        wanted = seen_by(drafter, target, batch, layers_of(drafter)[index], "output")
        got = seen_by(pruned, target, batch, layers_of(pruned)[index - 1], "output")
        error = (got - wanted).square().mean(-1) / wanted.square().mean(-1)
        emphasis = torch.ones_like(error)
        if isinstance(drafter, D3DDrafter):
            emphasis[: batch.num_tokens][batch.position_ids_T == 0] = FIRST_TOKEN_WEIGHT
        total += float((error * emphasis).sum())
        weight += float(emphasis.sum())
    return total / weight


def test_a_repaired_drafter_is_nearer_to_the_whole_one(scene: Scene) -> None:
    drafter, target, batches, _ = scene
    repairs = fit_repairs(drafter, target, batches, range(len(layers_of(drafter))), stored=torch.float32)
    for index, repair in repairs.items():
        bare, repaired = copied(drafter), copied(drafter)
        remove_layer(bare, index)
        remove_layer(repaired, index, repair.weight_HI)
        left = stream_error(repaired, drafter, target, index, batches)
        assert left == pytest.approx(repair.residual, rel=1e-3)
        assert left < stream_error(bare, drafter, target, index, batches)


def test_a_repair_is_rounded_as_checkpoints_are(scene: Scene) -> None:
    drafter, target, batches, _ = scene
    exact = fit_repairs(drafter, target, batches, [1], stored=torch.float32)[1].weight_HI
    rounded = fit_repairs(drafter, target, batches, [1])[1].weight_HI
    assert torch.equal(rounded, exact.bfloat16().float()) and not torch.equal(rounded, exact)

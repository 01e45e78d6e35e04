"""The target as the drafter sees it: features, caches, and isolation of concurrent callers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache

from drafters.errors import UserError
from drafters.target import Target

MakeTarget = Callable[..., Target]


def test_features_are_the_outputs_of_the_chosen_layers(kind: str, make_target: MakeTarget) -> None:
    """Layer id k is HF's hidden_states[k+1], and the last layer is taken before the final norm."""
    target = make_target(kind, torch.float64, layer_ids=(0, 2, 4))
    ids = torch.arange(11)
    output = target.forward_packed(ids, torch.arange(11))
    with torch.no_grad():
        states = target.model(ids[None], output_hidden_states=True).hidden_states
        first, third, last = output.features_TC.split(32, dim=-1)
        torch.testing.assert_close(first, states[1][0])
        torch.testing.assert_close(third, states[3][0])
        assert not torch.allclose(last, states[5][0])
        torch.testing.assert_close(target.model.model.norm(last), states[5][0])
        torch.testing.assert_close(output.hidden_TH, states[5][0])
        torch.testing.assert_close(target.logits(output.hidden_TH), target.model(ids[None]).logits[0])


def test_a_cached_forward_continues_a_packed_one(kind: str, make_target: MakeTarget) -> None:
    target = make_target(kind, torch.float64)
    ids = torch.arange(20, 33)
    whole = target.forward_packed(ids, torch.arange(13))
    cache = DynamicCache(config=target.config)
    parts = [target.forward_cached([ids[a:b]], [a], [cache])[0] for a, b in ((0, 6), (6, 7), (7, 13))]
    torch.testing.assert_close(torch.cat([p.hidden_TH for p in parts]), whole.hidden_TH, rtol=0, atol=1e-9)
    torch.testing.assert_close(
        torch.cat([p.features_TC for p in parts]), whole.features_TC, rtol=0, atol=1e-9
    )


def test_the_target_is_frozen(make_target: MakeTarget) -> None:
    target = make_target()
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.forward_packed(torch.arange(5), torch.arange(5)).features_TC.requires_grad


def test_a_thread_does_not_get_the_features_of_another(make_target: MakeTarget) -> None:
    target = make_target()
    ids = torch.arange(7)
    expected = target.forward_packed(ids, ids).features_TC
    with target._capture() as mine:
        got: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: got.append(target.forward_packed(ids, ids).features_TC))
        thread.start()
        thread.join()
        assert mine == {}
    torch.testing.assert_close(got[0], expected)


def test_impossible_targets_are_refused(make_target: MakeTarget) -> None:
    target = make_target()

    class Other:
        config = type("Config", (), {"model_type": "gpt2"})

    with pytest.raises(UserError, match="gpt2"):
        Target(Other(), target.identity, [0])
    for ids in ([0, 9], [2, 1], []):
        with pytest.raises(UserError, match="target_layer_ids"):
            Target(target.model, target.identity, ids)

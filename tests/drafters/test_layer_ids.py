"""Which target layers feed the drafter."""

from __future__ import annotations

import pytest

from drafters.errors import UserError
from drafters.layer_ids import check_layer_ids, default_layer_ids


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (30, 4, [1, 10, 18, 27]),
        (36, 5, [1, 9, 17, 25, 33]),
        (28, 5, [1, 7, 13, 19, 25]),
        (12, 1, [6]),
        (5, 2, [1, 2]),
    ],
)
def test_deep_targets_follow_the_rule(layers: int, count: int, ids: list[int]) -> None:
    assert default_layer_ids(layers, count) == ids


def test_any_depth_and_count_gives_valid_ids_and_leaves_the_last_layer_out_if_it_can() -> None:
    for layers in range(1, 40):
        for count in range(1, layers + 1):
            ids = default_layer_ids(layers, count)
            assert len(ids) == count
            assert check_layer_ids(ids, layers) == ids
            if 1 < count < layers:
                assert ids[-1] < layers - 1


@pytest.mark.parametrize("count", [0, 5])
def test_a_target_cannot_give_more_layers_than_it_has(count: int) -> None:
    with pytest.raises(UserError, match="num_context_layers"):
        default_layer_ids(4, count)


@pytest.mark.parametrize("ids", [[], [1, 1], [2, 1], [-1, 2], [1, 4]])
def test_impossible_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(UserError, match="target_layer_ids"):
        check_layer_ids(ids, 4)

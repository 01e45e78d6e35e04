"""Which target layers feed the drafter.

Layer id k means the output of target decoder layer k, which HF calls `hidden_states[k+1]`. The z-lab/SGLang layout stores
k; the speculators/vLLM layout stores k+1. Mixing them is off by one layer and silently costs acceptance.
"""

from __future__ import annotations

from drafters.errors import UserError


def default_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """`count` distinct layer ids spread over a target of `num_target_layers` layers L.

    For a deep enough target these are round(1 + i·(L-4)/(n-1)); one layer means L//2. The last layer is left out where
    possible: its output is followed by the final norm, and it carries the least that the drafter
    cannot get from the embedding of the anchor. A shallow target, where the rule repeats ids or leaves the range,
    gets `count` distinct ids spread evenly over 0..L-1 instead.

    Raises:
        UserError: when the target has fewer than `count` layers.
    """
    if not 1 <= count <= num_target_layers:
        raise UserError(
            f"drafter.num_context_layers: {count} distinct layers asked of a target with {num_target_layers}"
        )
    if count == 1:
        return [num_target_layers // 2]
    ids = [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
    if sorted(set(ids)) == ids and ids[-1] < num_target_layers - 1:
        return ids
    last = num_target_layers - 1 if count == num_target_layers else num_target_layers - 2
    return [i * last // (count - 1) for i in range(count)]


def check_layer_ids(ids: list[int], num_target_layers: int) -> list[int]:
    """The ids themselves, if distinct, increasing and inside the target.

    Raises:
        UserError: naming the key and the allowed range.
    """
    if not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] >= num_target_layers:
        raise UserError(
            f"drafter.target_layer_ids: {ids} must be distinct, increasing and within "
            f"0..{num_target_layers - 1}"
        )
    return ids

"""How a step is spread over GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """One way of using GPUs; each takes its own batches.

    Attributes:
        name: as reports show it.
        gpus: that train; machines of a feature server are not counted.
        shards: weights, gradients and moments are divided among the GPUs, layers gathered when needed (FSDP2).
        serves_features: the target runs elsewhere; its states of every batch arrive over the network.
    """

    name: str
    gpus: int
    shards: bool = False
    serves_features: bool = False


def strategies(gpus: int) -> list[Strategy]:
    """The strategies to compare on so many GPUs."""
    if gpus == 1:
        return [Strategy("single", 1), Strategy("feature server", 1, serves_features=True)]
    return [
        Strategy("DDP", gpus),
        Strategy("FSDP2", gpus, shards=True),
        Strategy("DDP, feature server", gpus, serves_features=True),
        Strategy("FSDP2, feature server", gpus, shards=True, serves_features=True),
    ]

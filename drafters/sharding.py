"""A drafter whose weights are divided among processes (FSDP2), layer by layer.

Outside of a forward pass each process holds its share of every weight. `whole_weights` brings them together for as long as
something else than a training step reads them: a replay, whose passes differ in number from process to process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from drafters.dflash import DFlashDrafter
from drafters.fill import Drafter
from drafters.prune import layers_of


def shard(drafter: Drafter, mesh: DeviceMesh) -> None:
    """Divide a drafter among the processes of a mesh of one dimension; the weights of the first are everyone's."""
    for tensor in chain(drafter.parameters(), drafter.buffers()):
        dist.broadcast(tensor.data, group=mesh.get_group(), group_src=0)
    for layer in layers_of(drafter):
        fully_shard(layer, mesh=mesh)
    fully_shard(drafter, mesh=mesh)
    if isinstance(drafter, DFlashDrafter):
        for layer in drafter.layers:
            register_fsdp_forward_method(layer, "context_key_value")
        register_fsdp_forward_method(drafter, "context_key_values")


@contextmanager
def whole_weights(drafter: nn.Module) -> Iterator[None]:
    """Every process holds all weights meanwhile, and none needs another for a forward pass. Nothing happens to a drafter in
    one piece.
    """
    parts = [module for module in drafter.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            # the outermost part keeps its weights between forward and backward, as `fully_shard` has it
            part.set_reshard_after_forward(part is not drafter, recurse=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A divided tensor in one piece, in every process; others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

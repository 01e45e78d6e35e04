"""What a round would cost on a GPU of the data sheets: of each component the slower of computing and moving bytes.

Components follow each other. Sizes, devices and counts are those of `draftsmith plan`. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.plan.advice import USABLE
from pipeline.plan.architecture import Architecture
from pipeline.plan.devices import Device
from pipeline.plan.flops import delta_flops
from pipeline.plan.models import Models
from pipeline.plan.time import Component, forward_moved, layer_elements
from pipeline.simulation.costs import DraftWork, VerifyWork

STATE_BYTES = 4
"""Of an element of linear attention's state."""


@dataclass(frozen=True)
class RooflineCosts:
    """Costs of a target and its drafter on one device.

    Attributes:
        models: both, with their sizes.
        device: its efficiency counts for every product.
        block_size: B.
        element_bytes: of weights, keys, values and activations.
        overhead_s: what each pass takes besides: launches, the host, sampling.
    """

    models: Models
    device: Device
    block_size: int
    element_bytes: Literal[2, 4] = 2
    overhead_s: float = 0.0

    def draft_s(self, work: DraftWork) -> float:
        return self.overhead_s + sum(c.seconds for c in self.draft_components(work))

    def verify_s(self, work: VerifyWork) -> float:
        return self.overhead_s + sum(c.seconds for c in self.verify_components(work))

    def verify_components(self, work: VerifyWork) -> list[Component]:
        """The target's layers, its attention over the caches, and its head.

        Layers: 2·rows·(active matrices) and, of linear attention, its rule; all weights that any row needs are read once.
        Attention: 4·pairs·(query width) in each layer of softmax attention, keys and values read once; states of linear attention
        read and written. Head: 2·H·V for each row that needs logits.
        """
        arch, size, b = self.models.target, self.models.target_size, self.element_bytes
        full = sum(arch.full_attention)
        linear = arch.layers - full
        products = 2 * work.rows * (size.matrices - size.idle_matrices)
        layers = products + work.rows * linear * delta_flops(arch)
        state = 0
        if arch.linear is not None:
            each = arch.linear.value_heads * arch.linear.key_dim * arch.linear.value_dim
            state = 2 * STATE_BYTES * work.requests * linear * each
        keys = (work.keys + work.rows) * 2 * arch.kv_width * full * b
        return [
            self._component("target layers", layers, forward_moved(arch, size, work.rows, b)),
            self._component("target attention", 4 * work.pairs * arch.query_width * full, keys + state),
            self._head("target head", arch, work.head_rows),
        ]

    def draft_components(self, work: DraftWork) -> list[Component]:
        """The drafter's layers, its attention, and the head over the B-1 drafts of every block.

        DFlash: what it has not read goes through `fc` and the key and value projections, blocks through all layers. D3D: both are
        rows of a causal LM.
        """
        models, b = self.models, self.element_bytes
        arch, slots = models.drafter_shape, work.requests * self.block_size
        depth = models.drafter_layers
        if models.dflash is not None:
            size = models.dflash
            read = 2 * work.unread * (size.fc + size.context_matrices)
            layers = read + 2 * slots * (size.matrices - size.fc)
            rows = slots
        else:
            rows = slots + work.unread
            layers = 2 * rows * models.drafter.matrices
        moved = b * (models.drafter.matrices + 2 * rows * depth * layer_elements(arch, arch.intermediate))
        pairs = self.block_size * (work.keys + slots)
        keys = (work.keys + slots) * 2 * arch.kv_width * depth * b
        return [
            self._component("drafter layers", layers, moved),
            self._component("drafter attention", 4 * pairs * arch.query_width * depth, keys),
            self._head("drafter head", arch, slots - work.requests),
        ]

    def fits(self, keys: int) -> bool:
        """Whether weights, and keys and values of so many tokens, leave the device what the runtime needs."""
        target, lm = self.models.target, self.models.drafter_shape
        cached = target.kv_width * sum(target.full_attention) + lm.kv_width * self.models.drafter_layers
        weights = self.models.target_size.total + self.models.drafter.total
        return self.element_bytes * (weights + 2 * keys * cached) <= USABLE * self.device.memory_bytes

    def _head(self, name: str, arch: Architecture, rows: int) -> Component:
        """Logits of so many rows: written, and read once to choose."""
        table = arch.hidden * arch.vocab
        return self._component(name, 2 * rows * table, self.element_bytes * (table + 2 * rows * arch.vocab))

    def _component(self, name: str, flops: float, moved: float) -> Component:
        return Component(name, flops, moved, self.device.seconds(flops, moved, half=self.element_bytes == 2))

"""The models of a step with their sizes, for both families alike."""

from __future__ import annotations

from dataclasses import dataclass

from drafters.layer_ids import check_layer_ids, default_layer_ids
from pipeline.config import Config
from pipeline.plan.architecture import Architecture
from pipeline.plan.sizes import (
    DFlashSize,
    ModelSize,
    dflash_size,
    length_head_size,
    model_size,
)
from pipeline.plan.sources import drafter_architecture, target_architecture
from pipeline.plan.step import Step


@dataclass(frozen=True)
class Models:
    """Target and drafter.

    Attributes:
        target: the target's architecture.
        target_size: its parameters.
        context_layers: n, target layers whose states are captured; a DFlash drafter reads them.
        dflash: parameters of a DFlash drafter, or None.
        lm: architecture of a D3D drafter's causal LM, or None.
        lm_size: its parameters, or None.
    """

    target: Architecture
    target_size: ModelSize
    context_layers: int
    dflash: DFlashSize | None
    lm: Architecture | None
    lm_size: ModelSize | None

    @property
    def drafter(self) -> DFlashSize | ModelSize:
        """Parameters of the drafter."""
        size = self.dflash or self.lm_size
        assert size is not None
        return size

    @property
    def drafter_layers(self) -> int:
        """Decoder layers of the drafter."""
        if self.dflash is not None:
            return self.dflash.layers
        assert self.lm is not None
        return self.lm.layers

    @property
    def drafter_shape(self) -> Architecture:
        """Widths of the drafter: the target's for DFlash, its own for D3D."""
        return self.lm or self.target

    @property
    def head_elements(self) -> int:
        """V·H of the target."""
        return self.target.vocab * self.target.hidden

    def trained(self, step: Step) -> int:
        """Parameters of the drafter that get a gradient."""
        return self.drafter.total - self.drafter.mlp_matrices * step.freeze_mlp

    def length_head(self, step: Step) -> int:
        """Parameters of the length head; 0 without one."""
        width = step.length_head_width
        return 0 if width is None else length_head_size(self.drafter_shape.hidden, width)


def models_of(config: Config) -> Models:
    """The models that a configuration names.

    Raises:
        UserError: naming the key whose model has no known sizes or cannot be used.
    """
    target = target_architecture(config)
    size = model_size(target)
    ids = config.drafter.target_layer_ids
    chosen = (
        default_layer_ids(target.layers, config.drafter.num_context_layers)
        if ids is None
        else check_layer_ids(ids, target.layers)
    )
    if config.drafter.family == "d3d":
        lm = drafter_architecture(config, target)
        return Models(target, size, len(chosen), None, lm, model_size(lm))
    drafter = dflash_size(target, layers=config.drafter.num_layers, context_layers=len(chosen))
    return Models(target, size, len(chosen), drafter, None, None)

"""How Lightning trains in several processes, which exist already."""

from __future__ import annotations

import signal
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from pipeline import ranks
from pipeline.config import TrainerConfig


class LeaveOnSigterm(L.Callback):
    """Ends a process at once when it is told to.

    Lightning's own handler first talks to the other processes, which may wait for each other in something else by then, and for
    good. Checkpoints and exports are whole at any moment, so nothing has to be finished.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        signal.signal(signal.SIGTERM, ranks.leave)  # Lightning has set its own by now


def trainer_settings(trainer: TrainerConfig, *, divisible: bool = True) -> dict[str, Any]:
    """Arguments of `lightning.Trainer` for these processes; plugins and callbacks are to be added to others.

    Args:
        trainer: the configuration.
        divisible: whether the module can be divided among them; what is too small for that is trained whole.
    """
    if trainer.world_size == 1:
        return {"devices": 1, "plugins": [], "callbacks": []}
    settings = {
        "devices": trainer.devices,
        "num_nodes": trainer.num_nodes,
        "plugins": [TorchElasticEnvironment()],
        "callbacks": [LeaveOnSigterm()],
        # weights that were gathered in inference mode could not be trained afterwards
        "inference_mode": False,
    }
    if trainer.strategy == "fsdp2" and divisible:
        # one file, in the layout of a single process: written as a whole or not at all
        strategy: Any = ModelParallelStrategy(
            data_parallel_size=trainer.world_size, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    else:
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    return settings | {"strategy": strategy}


def is_divided(trainer: L.Trainer) -> bool:
    """Whether the module's weights are divided among the processes of this trainer."""
    return isinstance(trainer.strategy, ModelParallelStrategy)

"""`draftsmith retrain run-once`: one online round for a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config
from pipeline.fitting import CHECKPOINT
from pipeline.online import OnlineState
from pipeline.stages.online import distill_online
from serving_bridge.server import DraftServer
from serving_bridge.transports import LogPlace

ENOUGH_WAITING_S = 10.0
"""For records that are on their way; a scheduler calls again."""


def retrain_once(config: Config, *, log: LogPlace, servers: Sequence[DraftServer] = ()) -> Path:
    """Run at most one further round; without enough records nothing changes.

    Raises:
        UserError: when another trainer works in this output directory.
    """
    output = config.output / "online"
    settled = len(OnlineState.load(output / "state.json").outcomes)
    online = config.online.model_copy(
        update={
            "max_rounds": settled + 1,
            "idle_timeout_s": min(config.online.idle_timeout_s or ENOUGH_WAITING_S, ENOUGH_WAITING_S),
        }
    )
    return distill_online(
        config.model_copy(update={"online": online}),
        log=log,
        resume=(output / CHECKPOINT).is_file(),
        servers=lambda stage: servers,
    )

"""`draftsmith deploy`: register a drafter, let the gate judge it, make it champion."""

from __future__ import annotations

from pathlib import Path

from drafters.errors import UserError
from pipeline.config import Config
from pipeline.console import say
from pipeline.corpus import train_and_validation
from pipeline.lineage import DataWindow
from pipeline.release import ReleaseDesk, gate_policy
from pipeline.stages.context import open_stage


def deploy_drafter(config: Config, *, drafter: Path) -> Path:
    """Register and gate on the validation documents; the champion's checkpoint is kept in `<output>/deploy/champion`.

    A refused challenger stays in the registry with the reason, the champion stays, and the command still succeeds: its
    result says `accepted: false`.
    """
    with open_stage(config, "deploy") as stage:
        bundle = stage.bundle
        train, validation = train_and_validation(config, bundle.target.identity)
        if not validation:
            raise UserError("data.val_fraction: the gate needs validation documents; set it above 0")
        stage.result.add_input(drafter)
        desk = ReleaseDesk(
            stage.registry(), bundle, gate_policy(config.gate, config.seed), config.output / "versions"
        )
        version, verdict = desk.submit(
            drafter,
            validation,
            run_id=stage.tracked.run_id,
            lineage=stage.lineage(DataWindow.of("offline", train)),
        )
        if verdict.accepted:
            desk.registry.promote(version, reason=verdict.reason)
        champion = desk.registry.champion()
        say(f"version {version} {'is champion' if verdict.accepted else 'refused'}: {verdict.reason}")
        stage.result.metrics |= {
            "model_name": desk.registry.model_name,
            "version": version,
            "accepted": verdict.accepted,
            "reason": verdict.reason,
            "champion_version": champion.version if champion else None,
        }
        return stage.output

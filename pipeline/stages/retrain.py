"""`draftsmith retrain run-once`: look for drift, train one round if there is reason to, gate it, put it to work."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from datamodules.streaming import StreamState
from drafters.errors import UserError
from drafters.replay import replay
from pipeline.alarms import AlarmBoard, rules_for
from pipeline.config import Config
from pipeline.console import say
from pipeline.drift import (
    Decision,
    Observation,
    TauDrift,
    alarm_values,
    decide,
    population_shift,
    tau_drift,
)
from pipeline.fitting import CHECKPOINT
from pipeline.lineage import Lineage
from pipeline.lock import trainer_lock
from pipeline.models import load_drafter_for, read_identity
from pipeline.online import OnlineState, RoundOutcome, bring_to
from pipeline.registry import RegisteredVersion, Registry
from pipeline.stages.context import Stage, open_stage, registry_for
from pipeline.stages.online import READER, log_errors, online_rounds
from pipeline.survey import Survey, read_stream, survey
from pipeline.webhook import Courier, settle, webhook_for
from serving_bridge.server import DraftServer
from serving_bridge.transports import LogPlace, open_reader

ENOUGH_WAITING_S = 10.0
"""For records that are on their way; a scheduler calls again."""


class Outcome(IntEnum):
    """How a call ended, as exit code."""

    PROMOTED = 0
    NOTHING_TO_DO = 3
    REFUSED = 4
    LOCKED = 5
    SWAP_FAILED = 6


FAILURES = frozenset({Outcome.SWAP_FAILED})
"""Outcomes that somebody has to look at; the others are the schedule's daily bread."""

OUTCOME_OF = {
    "champion": Outcome.PROMOTED,
    "waiting": Outcome.PROMOTED,
    "refused": Outcome.REFUSED,
    "rolled_back": Outcome.REFUSED,
    "superseded": Outcome.REFUSED,
    "swap_failed": Outcome.SWAP_FAILED,
}


@dataclass(frozen=True)
class Retrained:
    """A call's result: where it is written, and its exit code."""

    output: Path
    outcome: Outcome


def retrain_once(config: Config, *, log: LogPlace, servers: Sequence[DraftServer] = ()) -> Retrained:
    """Run at most one further round; writes `<output>/retrain/result.json`.

    Raises:
        Locked: when another trainer works in this output directory.
        UserError: without a champion, or for an input that cannot be used.
    """
    with trainer_lock(config.output / "online"), open_stage(config, "retrain") as stage, log_errors(log):
        webhook = webhook_for(config.alarms)
        board = AlarmBoard.load(stage.output / "alarms.json")
        target_id = read_identity(config).target_id
        registry = registry_for(config, target_id)
        champion = require_champion(registry)
        online = config.output / "online"
        stream = read_stream(online / CHECKPOINT, target_id)
        with stage.result.section("survey"):
            found = survey(
                open_reader(log, READER, quarantine=False),
                stream,
                config.online,
                target_id=target_id,
                window=config.retrain.drift.window,
            )
        with stage.result.section("drift"):
            seen = observe(stage, registry, champion, stream, found)
        least = config.retrain.min_records or config.online.trigger
        decision = decide(config.retrain, least, seen)
        show_decision(decision)
        events = board.observe(
            rules_for(config.alarms),
            alarm_values(config.alarms, seen),
            _about(config, champion),
            seen=_measured_on(stream, found),
            champion=champion.version,
        )
        for event in events:
            say(f"ALARM {event['text']}")
        courier = Courier(webhook, board.undelivered) if webhook is not None else None
        try:
            if decision.train:
                outcome, settled = _train(stage, log, servers, found, least)
            else:
                outcome, settled = Outcome.NOTHING_TO_DO, None
                _follow(stage, registry, servers)
        finally:
            if courier is not None:
                settle(board, courier)
        reason = decision.reason if settled is None else settled.reason
        if decision.train and settled is None:
            reason = "stopped before a round was complete"
        stage.result.metrics |= _summary(decision, seen, found, champion, registry, outcome, reason, settled)
        stage.result.metrics["alarms"] = {
            "raised": sorted(name for name, state in board.states.items() if state.raised),
            "events": events,
            "undelivered": len(board.undelivered),
        }
        show_summary(stage.result.metrics)
        return Retrained(stage.output, outcome)


def require_champion(registry: Registry) -> RegisteredVersion:
    """The champion.

    Raises:
        UserError: when nothing is registered yet.
    """
    champion = registry.champion()
    if champion is None:
        raise UserError(f"registry {registry.model_name}: no champion yet; run `draftsmith deploy` first")
    return champion


def observe(
    stage: Stage,
    registry: Registry,
    champion: RegisteredVersion,
    stream: StreamState | None,
    found: Survey,
) -> Observation:
    """What has moved since the champion was promoted; what cannot be measured is said, with the reason."""
    unmeasured: dict[str, str] = {}
    tau = shift = None
    interrupted = _interrupted(stage.config.output / "online", stream)
    try:
        lineage = registry.lineage(champion.version) or Lineage()
    except UserError as error:
        # drift is information: what hides it must not end retraining
        return Observation(found.training, interrupted, unmeasured={"tau": str(error), "shift": str(error)})
    try:
        tau = _tau_drift(stage, registry, champion, lineage, found, unmeasured)
    except UserError as error:
        unmeasured["tau"] = str(error)
    problem = no_reference(champion, lineage, found)
    if problem is not None:
        unmeasured["shift"] = problem
    elif lineage.data is not None:
        shift = population_shift(lineage.data.domains, found.domains)
    return Observation(found.training, interrupted, tau, shift, unmeasured)


def _tau_drift(
    stage: Stage,
    registry: Registry,
    champion: RegisteredVersion,
    lineage: Lineage,
    found: Survey,
    unmeasured: dict[str, str],
) -> TauDrift | None:
    settings = stage.config.retrain.drift
    least = settings.min_baseline_documents
    baseline = {domain: sums for domain, sums in lineage.baseline.items() if sums.documents >= least}
    comparable = sum(document.domain in baseline for document in found.recent)
    if not lineage.baseline:
        unmeasured["tau"] = f"version {champion.version} has no record of its τ by domain"
        return None
    if comparable < settings.min_documents:
        unmeasured["tau"] = (
            f"only {comparable} recent held-out records of domains with a baseline of at least {least} documents, "
            f"{settings.min_documents} are needed to measure τ"
        )
        return None
    unmeasured["tau"] = "no recent held-out record has a round"
    results = _replay_champion(stage, registry, champion, found)
    key_of = {d.document_id: d.conversation_key or d.document_id for d in found.recent}
    return tau_drift(
        results,
        baseline,
        confidence=settings.confidence,
        seed=stage.config.seed,
        conversations=[key_of[result.document_id] for result in results],
    )


def no_reference(champion: RegisteredVersion, lineage: Lineage, found: Survey) -> str | None:
    """Why the new records cannot be compared with what the champion learned from; None if they can."""
    data = lineage.data
    if data is None or not data.domains:
        return f"version {champion.version} has no record of its data's domains"
    if data.since is None:
        return f"version {champion.version} learned from offline data, whose domains are no sample of traffic"
    if not found.domains:
        return "no new records"
    if not data.domains.keys() & found.domains.keys():
        return (
            f"the new records ({_named(found.domains)}) have no domain in common with those of version "
            f"{champion.version} ({_named(data.domains)}): does serving tag its requests as before?"
        )
    return None


def _named(domains: Collection[str]) -> str:
    names = sorted(domains)
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _replay_champion(
    stage: Stage, registry: Registry, champion: RegisteredVersion, found: Survey
) -> list[Any]:
    checkpoint = registry.download(
        champion.version, stage.config.output / "versions" / f"version-{champion.version}"
    )
    target = stage.bundle.target
    drafter = load_drafter_for(checkpoint, stage.bundle, dtype=target.dtype).drafter
    with torch.no_grad():
        return list(replay(drafter, target, list(found.recent)))


def _interrupted(online: Path, stream: StreamState | None) -> bool:
    """Whether a round is under way: its records admitted, or trained on but not settled."""
    state = OnlineState.load(online / "state.json")
    if state.phase != "collect":
        return True
    return stream is not None and (bool(stream.fresh) or stream.round_index > len(state.outcomes))


def _train(
    stage: Stage, log: LogPlace, servers: Sequence[DraftServer], found: Survey, least: int
) -> tuple[Outcome, RoundOutcome | None]:
    config, online = stage.config, stage.config.output / "online"
    settled = len(OnlineState.load(online / "state.json").outcomes)
    idle = config.online.idle_timeout_s or ENOUGH_WAITING_S
    settings = config.online.model_copy(
        update={
            "trigger": min(max(found.training, least), max(config.retrain.max_records, least)),
            "max_rounds": settled + 1,
            "idle_timeout_s": min(idle, ENOUGH_WAITING_S),
        }
    )
    online_rounds(
        config,
        settings=settings,
        log=log,
        resume=(online / CHECKPOINT).is_file(),
        servers=lambda _: servers,
        bundle=stage.bundle,
        deploy=config.retrain.deploy,
    )
    outcomes = OnlineState.load(online / "state.json").outcomes
    if len(outcomes) == settled:
        return Outcome.NOTHING_TO_DO, None
    return OUTCOME_OF[outcomes[-1].outcome], outcomes[-1]


def _follow(stage: Stage, registry: Registry, servers: Sequence[DraftServer]) -> None:
    """Bring servers to the champion, which a person may have moved since the last call."""
    champion = registry.champion()
    if servers and champion is not None:
        place = stage.config.output / "versions" / f"version-{champion.version}"
        bring_to(servers, registry.download(champion.version, place))


def _measured_on(stream: StreamState | None, found: Survey) -> dict[str, str]:
    """Names of the records that alarm values are of: the log only grows, so its beginning and a number name them."""
    start = json.dumps(None if stream is None else stream.cursor.to_json())
    return {
        "tau_drop": f"{found.held_out} held out from {start}",
        "population_shift": f"{found.training + found.held_out} from {start}",
    }


def _about(config: Config, champion: RegisteredVersion) -> dict[str, Any]:
    return {
        "run": config.name,
        "champion_version": champion.version,
        "drafter_version": champion.tags.get("drafter_version"),
    }


def _summary(
    decision: Decision,
    seen: Observation,
    found: Survey,
    champion: RegisteredVersion,
    registry: Registry,
    outcome: Outcome,
    reason: str,
    settled: RoundOutcome | None,
) -> dict[str, Any]:
    now = registry.champion()
    return {
        "outcome": outcome.name.lower(),
        "exit_code": int(outcome),
        "reason": reason,
        "decision": {"train": decision.train, "reason": decision.reason},
        "checks": [asdict(check) for check in decision.checks],
        "records": {
            "training": found.training,
            "held_out": found.held_out,
            "since": found.since,
            "until": found.until,
            "domains": dict(sorted(found.domains.items())),
            "refused": dict(found.refused),
        },
        "tau": None if seen.tau is None else asdict(seen.tau),
        "population": None if seen.shift is None else asdict(seen.shift),
        "model_name": registry.model_name,
        "champion_before": champion.version,
        "champion_after": None if now is None else now.version,
        "round": None if settled is None else asdict(settled),
    }


def show_decision(decision: Decision) -> None:
    """One line for each check, and what follows."""
    words = {True: "reason to train", False: "no reason", None: "not judged"}
    for check in decision.checks:
        say(f"{check.name:<10}  {words[check.fires]:<15}  {check.finding}")
    say(f"{'training' if decision.train else 'not training'}: {decision.reason}")


def show_summary(metrics: dict[str, Any]) -> None:
    """The last lines of a call, for a person who reads only those."""
    before, after = metrics["champion_before"], metrics["champion_after"]
    say(
        f"retrain: {metrics['outcome'].replace('_', ' ')} (exit code {metrics['exit_code']}): {metrics['reason']}"
    )
    say(f"champion: version {before}" + ("" if after == before else f" → {after}"))
    if metrics["alarms"]["raised"]:
        say(f"alarms raised: {', '.join(metrics['alarms']['raised'])}")

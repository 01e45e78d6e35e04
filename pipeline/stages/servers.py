"""`draftsmith deploy --to | status | rollback`: drafters in running SGLang servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafters.errors import UserError
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.fleet import connect, inspect, launch_of
from pipeline.models import read_identity
from pipeline.online import drafter_version_of
from pipeline.registry import RegisteredVersion, Registry
from pipeline.release import ReleaseDesk, gate_policy
from pipeline.stages.context import Stage, open_stage, registry_for
from serving_bridge.server import SwapError, SwapReport
from serving_bridge.sglang_launch import Launch
from serving_bridge.sglang_server import SGLangServer

MODELS = "models:/"


def deploy_to(config: Config, urls: Sequence[str], drafter: str | None = None) -> Path:
    """Swap the champion, or another drafter, into running servers: into all of them or none.

    Args:
        config: the run.
        urls: of the servers.
        drafter: a directory, or `models:/NAME@ALIAS`, `models:/NAME/VERSION`; None takes the champion.
    """
    with open_stage(config, "deploy-servers", "deploy_servers") as stage:
        directory = resolve_drafter(stage, drafter)
        stage.result.add_input(directory)
        servers = connect(config, urls)
        if not servers:
            raise UserError("--to: name a running server, http://HOST:PORT, or set sglang.urls")
        reports = swap_all(servers, directory)
        stage.result.metrics |= {
            "drafter_version": drafter_version_of(directory),
            "swaps": [
                {"url": server.client.url, **asdict(report)}
                for server, report in zip(servers, reports, strict=True)
            ],
        }
        return stage.output


def swap_all(servers: Sequence[SGLangServer], directory: Path) -> list[SwapReport]:
    """Swap every server; when one refuses, those before it go back.

    Raises:
        UserError: saying which server refused, and what each serves now.
    """
    reports: list[SwapReport] = []
    for number, server in enumerate(servers):
        try:
            report = server.swap(directory)
        except SwapError as error:
            left = _take_back(servers[:number])
            raise UserError(f"{error}; {left or 'no server was changed'}") from error
        reports.append(report)
        say(
            f"{server.client.url}: {report.old_version} → {report.new_version}, requests waited "
            f"{report.pause_ms:.0f} ms{f' ({report.note})' if report.note else ''}"
        )
    return reports


def _take_back(servers: Sequence[SGLangServer]) -> str:
    notes = []
    for server in servers:
        try:
            notes.append(f"{server.client.url} is back on {server.take_back()}")
        except SwapError as error:
            notes.append(f"{server.client.url} could not be taken back ({error})")
    return "; ".join(notes)


def resolve_drafter(stage: Stage, name: str | None) -> Path:
    """A local directory of a drafter.

    Raises:
        UserError: when there is no such drafter.
    """
    if name is not None and not name.startswith(MODELS):
        return Path(name)
    registry = stage.registry()
    desk = ReleaseDesk(
        registry,
        stage.bundle,
        gate_policy(stage.config.gate, stage.config.seed),
        stage.config.output / "versions",
    )
    return desk.checkpoint(registered_version(registry, name).version)


def registered_version(registry: Registry, name: str | None) -> RegisteredVersion:
    """The version that `models:/NAME@ALIAS` or `models:/NAME/VERSION` means; None means the champion.

    Raises:
        UserError: when there is none.
    """
    if name is None:
        champion = registry.champion()
        if champion is None:
            raise UserError(f"registry {registry.model_name}: no champion yet; run `draftsmith deploy` first")
        return champion
    model, _, alias = name.removeprefix(MODELS).partition("@")
    number = None
    if not alias and "/" in model:
        model, _, text = model.rpartition("/")
        number = int(text) if text.isdecimal() else None
    if model != registry.model_name:
        raise UserError(f"{name}: this target's drafters are registered as {registry.model_name}")
    if not alias and number is None:
        raise UserError(f"{name}: write {MODELS}{model}@champion or {MODELS}{model}/3")
    found = registry.get(number) if number is not None else aliased_version(registry, alias)
    return found


def aliased_version(registry: Registry, alias: str) -> RegisteredVersion:
    """The version with this alias.

    Raises:
        UserError: when none has it.
    """
    for version in registry.list_versions():
        if alias in version.aliases:
            return version
    raise UserError(f"registry: {registry.model_name} has no alias {alias!r}")


def roll_back(config: Config, urls: Sequence[str], reason: str) -> Path:
    """Make the previous champion champion again, in the registry and in the servers.

    The servers come first: should one refuse, the registry still says what the others run.
    """
    with open_stage(config, "rollback") as stage:
        registry = stage.registry()
        bad, good = registry.champion(), registry.previous_champion()
        if bad is None or good is None:
            raise UserError(f"registry: {registry.model_name} has no previous champion to roll back to")
        servers = connect(config, urls)
        directory = resolve_drafter(stage, f"{MODELS}{registry.model_name}/{good.version}")
        reports = swap_all(servers, directory)
        registry.rollback(reason, version=bad.version)
        say(f"version {good.version} is champion again, {bad.version} was rolled back: {reason}")
        stage.result.metrics |= {
            "rolled_back": bad.version,
            "champion_version": good.version,
            "reason": reason,
            "swaps": [asdict(report) for report in reports],
        }
        return stage.output


def status(config: Config, urls: Sequence[str]) -> dict[str, Any]:
    """Registry, servers and the online state, as plain values; a server that is down is reported as such."""
    with open_stage(config, "status") as stage:
        registry = registry_for(config, read_identity(config).target_id)
        champion, previous = registry.champion(), registry.previous_champion()
        states = [inspect(config, url) for url in urls or config.sglang.urls]
        expected = champion.tags.get("drafter_version") if champion else None
        online = config.output / "online" / "state.json"
        found: dict[str, Any] = {
            "model_name": registry.model_name,
            "champion": _described(champion),
            "previous_champion": _described(previous),
            "servers": [{**asdict(s), "in_step": s.drafter_version == expected} for s in states],
            "online": json.loads(online.read_text()) if online.is_file() else None,
        }
        stage.result.metrics |= found
    return found


def show_status(found: dict[str, Any]) -> None:
    """`status` as tables."""
    champion = found["champion"]
    say(f"{found['model_name']}: champion {champion['version'] if champion else 'none'}")
    if found["servers"]:
        rows = []
        for server in found["servers"]:
            plugin = server["plugin"] or {}
            records = plugin.get("records") or {}
            state = server["problem"] or ("champion" if server["in_step"] else "not the champion")
            counts = [str(records.get(key, "-")) for key in ("written", "dropped")]
            rows.append([server["url"], server["drafter_version"], state, *counts])
        show_table("servers", ["server", "drafter", "state", "records", "dropped"], rows)
    online = found["online"]
    if online is not None:
        say(f"online: round {online['round_index']}, {online['phase']}")
        rows = [
            [str(o["round_index"]), str(o["version"]), o["outcome"], o["reason"]]
            for o in online["outcomes"][-8:]
        ]
        show_table("latest rounds", ["round", "version", "outcome", "reason"], rows)


def _described(version: RegisteredVersion | None) -> dict[str, Any] | None:
    return None if version is None else {"version": version.version, **version.tags}


def prepare_launch(config: Config, drafter: str | None) -> Launch:
    """What `deploy --launch` runs: the target's own files are made a directory that SGLang can load."""
    with open_stage(config, "launch") as stage:
        directory = resolve_drafter(stage, drafter)
        return launch_of(config, directory, served_model(stage))


def served_model(stage: Stage) -> str:
    """Directory or hub name of the target as SGLang is to load it."""
    launch = stage.config.sglang.launch
    if launch.model is not None:
        return launch.model
    return stage.bundle.source

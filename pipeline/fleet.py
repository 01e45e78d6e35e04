"""The SGLang servers of a run: how to reach them, how to start one, what they serve."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.checkpoint import MANIFEST
from drafters.errors import UserError
from pipeline.config import Config
from serving_bridge.server import SwapError
from serving_bridge.sglang_http import ServerAddress, SGLangClient, plugin_status_of
from serving_bridge.sglang_launch import Launch
from serving_bridge.sglang_plugin.settings import LengthSettings, PluginSettings
from serving_bridge.sglang_server import SGLangServer


def log_place(config: Config) -> str:
    """Where the servers' records are."""
    return config.sglang.log or str((config.output / "spool").absolute())


def drafter_root(config: Config) -> Path:
    """Where the servers load drafters from."""
    return (config.sglang.drafter_root or config.output / "drafters").absolute()


def client_for(config: Config, url: str) -> SGLangClient:
    """A client with the keys that the environment holds.

    Raises:
        UserError: for an address that makes no sense, or that needs a key.
    """
    settings = config.sglang
    try:
        address = ServerAddress(
            url, os.environ.get(settings.api_key_env), os.environ.get(settings.admin_key_env)
        )
    except ValueError as error:
        raise UserError(f"{error} (environment variable {settings.admin_key_env})") from None
    return SGLangClient(address, settings.call_timeout_s)


def connect(config: Config, urls: Sequence[str] = ()) -> list[SGLangServer]:
    """The servers named on the command line, else those of `sglang.urls`; each must answer.

    Raises:
        UserError: naming the server that does not.
    """
    servers = []
    for url in urls or config.sglang.urls:
        server = SGLangServer(
            client_for(config, url),
            drafter_root=drafter_root(config),
            deadline_s=config.sglang.deadline_s,
            verify_target=config.sglang.verify_target,
        )
        try:
            server.client.server_info()
        except SwapError as error:
            raise UserError(str(error)) from error
        servers.append(server)
    return servers


def launch_of(config: Config, drafter: Path, model: str) -> Launch:
    """The server that the configuration describes.

    Raises:
        UserError: naming the key that does not fit.
    """
    settings, launch, policy = config.sglang, config.sglang.launch, config.policy
    if (drafter / MANIFEST).is_file():
        try:
            family = json.loads((drafter / MANIFEST).read_text()).get("family", "dflash")
        except (ValueError, AttributeError):
            raise UserError(f"{drafter / MANIFEST}: not a manifest") from None
        if (family == "d3d") != (launch.algorithm == "D3D"):
            raise UserError(
                f"sglang.launch.algorithm: {launch.algorithm} does not serve drafters of family {family}"
            )
    if policy.name in ("survival", "throughput"):
        raise UserError(
            f"policy.name: {policy.name} is served by the embedded engine only; SGLang takes fixed and adaflash"
        )
    length = LengthSettings(
        gamma=policy.gamma,
        gamma_by_load={str(load): gamma for load, gamma in policy.gamma_by_load.items()},
        off_below_load=policy.off_below_load,
        verify=launch.verify,
    )
    plugin = PluginSettings(
        log=log_place(config),
        log_share=settings.log_share,
        log_by_default=settings.log_by_default,
        redact=settings.redact,
        target_top_k=settings.target_top_k,
        buffer_records=settings.buffer_records,
        swap_root=str(drafter_root(config)),
        length=length,
        admission_beta=settings.admission_beta,
    )
    try:
        return Launch(
            python=launch.python,
            model=str(Path(model).absolute()) if Path(model).is_dir() else model,
            drafter=drafter.absolute(),
            settings=plugin,
            preset=launch.preset,
            algorithm=launch.algorithm,
            host=launch.host,
            port=launch.port,
            api_key=os.environ.get(settings.api_key_env),
            admin_key=os.environ.get(settings.admin_key_env),
            threads=launch.threads,
            max_total_tokens=launch.max_total_tokens,
            max_running=launch.max_running,
            context_length=launch.context_length,
            extra=tuple(launch.extra),
        )
    except ValueError as error:
        raise UserError(f"sglang.launch: {error} (environment variable {settings.admin_key_env})") from None


@dataclass(frozen=True)
class ServerState:
    """What a server tells of itself; `problem` is set when it does not."""

    url: str
    drafter_version: str = ""
    plugin: dict[str, Any] | None = None
    problem: str = ""


def inspect(config: Config, url: str) -> ServerState:
    """Ask a server; never raises for one that is down."""
    try:
        info = client_for(config, url).server_info()
    except SwapError as error:
        return ServerState(url, problem=str(error))
    plugin = plugin_status_of(info)
    if plugin is None:
        return ServerState(url, str(info.get("weight_version", "unknown")), problem="no draftsmith plugin")
    drafter = plugin.get("drafter") or {}
    missing = plugin.get("missing_hooks") or []
    return ServerState(
        url,
        str(drafter.get("drafter_version", "")),
        plugin,
        f"hooks not applied: {', '.join(missing)}" if missing else "",
    )

"""One real SGLang server with its files, and what tests ask of it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from serving_bridge.records import VerificationRecord
from serving_bridge.sglang_http import ServerAddress, SGLangClient
from serving_bridge.sglang_launch import Launch
from serving_bridge.sglang_plugin.settings import LengthSettings, PluginSettings
from serving_bridge.sglang_process import ServerProcess
from serving_bridge.sglang_server import SGLangServer
from serving_bridge.transports import open_reader
from tests.serving_bridge.tiny_serving import Scene

PYTHON = os.environ.get("DRAFTSMITH_SGLANG_PYTHON", "")
CONTEXT = 512
TIE = 0.0625
"""Gap between the two best bf16 logits under which the order of additions decides which is best."""


class Site:
    """Everything of one server: its files, its process, ways to talk to it."""

    def __init__(self, root: Path, scene: Scene, model: Path, algorithm: str, **settings: Any) -> None:
        self.root = root
        self.scene = scene
        self.spool = root / "spool"
        self.drafters = root / "drafters"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        plugin = PluginSettings(
            log=str(self.spool),
            swap_root=str(self.drafters),
            spool_max_age_s=0.2,
            length=LengthSettings(gamma=1.0),
            **settings,
        )
        self.launch = Launch(
            python=PYTHON,
            model=str(model),
            drafter=scene.first,
            settings=plugin,
            preset="cpu",
            algorithm=algorithm,  # type: ignore[arg-type]
            port=port,
            max_total_tokens=4096,
            max_running=8,
            context_length=CONTEXT,
            extra=("--skip-tokenizer-init", "--random-seed", "1", "--enable-cache-report"),
        )
        self.process: ServerProcess | None = None

    @property
    def client(self) -> SGLangClient:
        return SGLangClient(ServerAddress(f"http://127.0.0.1:{self.launch.port}"), 60.0)

    def server(self, **options: Any) -> SGLangServer:
        return SGLangServer(self.client, drafter_root=self.drafters, deadline_s=60.0, **options)

    def generate(self, prompt: list[int], new_tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        custom = {"custom_params": more.pop("custom")} if "custom" in more else {}
        sampling |= more.pop("sampling", {})
        return self.client.generate({"input_ids": prompt, "sampling_params": {**sampling, **custom}, **more})

    def records(self, reader: str) -> list[Any]:
        """All records from the start of the log, once the server has sealed what it wrote."""
        deliveries = open_reader(self.spool, reader, quarantine=False).read(100_000)
        return [delivery.record for delivery in deliveries]


def wait_for_records(site: Site, ids: set[str], reader: str) -> dict[str, VerificationRecord]:
    deadline = time.monotonic() + 30
    found: dict[str, VerificationRecord] = {}
    while time.monotonic() < deadline and not ids <= found.keys():
        found = {record.request_id: record for record in site.records(reader)}
        time.sleep(0.1)
    missing = ids - found.keys()
    assert not missing, f"no records of {missing}; {site.client.plugin_status()}"
    return {key: found[key] for key in ids}


def target_logits(site: Site, ids: list[int]) -> torch.Tensor:
    model = site.scene.target.model
    with torch.no_grad():
        return model.to(torch.bfloat16)(torch.tensor([ids])).logits[0].float()


def is_tie(logits_V: torch.Tensor) -> bool:
    best = logits_V.topk(2).values
    return bool(best[0] - best[1] <= TIE)

"""The online trainer beside the real server: killed in the middle of a canary, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from datamodules.chat import render_prompt
from drafters.checkpoint import verify_manifest
from pipeline.config import Config, load_config
from pipeline.models import load_target, read_identity
from pipeline.registry import Registry
from pipeline.stages.context import registry_for
from pipeline.stages.deploy import deploy_drafter
from pipeline.stages.regenerate import regenerate_responses
from pipeline.stages.train import train_drafter
from serving_bridge.sglang_process import running_server
from serving_bridge.sglang_server import SGLangServer
from tests.pipeline.tiny_run import write_config
from tests.serving_bridge.tiny_serving import Scene
from tests.sglang.live_server import Site

PATIENCE = 240.0
TRAINER = """
import pipeline.release
from pipeline.cli import main
from pipeline.gate import Verdict

pipeline.release.judge = lambda *_, **__: Verdict(True, "let through by the test")
main()
"""
"""The command line with a gate that lets every challenger pass: whether one learns anything is not what is tested."""


class Users:
    """Ask without end, each time another prompt, until told to stop."""

    def __init__(self, site: Site, prompt_ids: list[int]) -> None:
        self.site, self.prompt_ids = site, prompt_ids
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._ask, daemon=True)
        self.thread.start()

    def _ask(self) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            prompt = [*self.prompt_ids, 4 + number % 200, 4 + number // 200]
            custom = {"draftsmith_conversation": f"c{number}", "draftsmith_domain": "code"}
            self.site.generate(prompt, 24, rid=f"u{number}", custom=custom)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A tiny run whose drafter is champion."""
    directory = tmp_path_factory.mktemp("online")
    path = write_config(directory)
    settings = yaml.safe_load(path.read_text())
    settings["online"] |= {"trigger": 24, "passes": 1, "max_rounds": 1, "loss": {"objective": "osd"}}
    settings["canary"] = {"min_records": 40, "max_records": 60, "timeout_s": 120}
    path.write_text(yaml.safe_dump(settings))
    config = load_config(path)
    regenerate_responses(config)
    train_drafter(config)
    deploy_drafter(config, drafter=config.output / "train" / "drafter")
    assert registry_of(config).champion() is not None
    return config


@pytest.fixture(scope="module")
def site(config: Config, scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    champion = config.output / "train" / "drafter"
    served = replace(scene, first=champion)
    site = Site(tmp_path_factory.mktemp("site"), served, config.output / "target", "DFLASH")
    site.drafters = config.output / "drafters"
    site.launch = replace(
        site.launch,
        settings=type(site.launch.settings)(
            log=str(site.spool), swap_root=str(site.drafters.absolute()), spool_max_age_s=0.2
        ),
    )
    with running_server(site.launch, site.root / "server.log"):
        yield site


def trainer(config: Config, site: Site, *more: str) -> subprocess.Popen[str]:
    yaml_path = config.output.parent / "tiny.yaml"
    words = ["distill", str(yaml_path), "--online", "--spool", str(site.spool)]
    words += ["--serve", site.client.url, *more]
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


def state_of(config: Config) -> dict[str, Any]:
    path = config.output / "online" / "state.json"
    state: dict[str, Any] = (
        json.loads(path.read_text()) if path.is_file() else {"phase": "none", "outcomes": []}
    )
    return state


def registry_of(config: Config) -> Registry:
    return registry_for(config, read_identity(config).target_id)


def test_a_trainer_killed_in_its_canary_leaves_a_state_that_the_next_one_settles(
    config: Config, site: Site
) -> None:
    first = str(verify_manifest(site.scene.first)["drafter_version"])
    server = SGLangServer(site.client, drafter_root=site.drafters)
    assert server.drafter_version == first
    bundle = load_target(config)
    prompt = render_prompt(bundle.tokenizer, [{"role": "user", "content": "Write a function."}])
    users = Users(site, prompt)
    process = trainer(config, site)
    try:
        deadline = time.monotonic() + PATIENCE
        while state_of(config)["phase"] != "canary" and not state_of(config)["outcomes"]:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        outcomes = state_of(config)["outcomes"]
        assert not outcomes, f"the gate should have let the challenger pass: {outcomes}"
        process.send_signal(signal.SIGKILL)
        process.wait()
        # the unproven challenger serves, and the registry does not call it champion
        challenger = server.drafter_version
        assert challenger.startswith("tiny-r1-")
        champion = registry_of(config).champion()
        assert champion is not None and champion.tags["drafter_version"] == first

        process = trainer(config, site, "--resume")
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
        assert f"server brought from {challenger} to the champion {first}" in output
    finally:
        process.kill()
        users.stop.set()
        users.thread.join()
    (outcome,) = state_of(config)["outcomes"]
    champion = registry_of(config).champion()
    assert champion is not None
    assert outcome["outcome"] in {"champion", "rolled_back"}
    assert server.drafter_version == champion.tags["drafter_version"]
    if outcome["outcome"] == "champion":
        assert champion.tags["drafter_version"] == challenger


def test_a_server_that_does_not_answer_is_named_at_the_start(config: Config, site: Site) -> None:
    process = trainer(config, site, "--resume", "--serve", "http://127.0.0.1:9")
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "127.0.0.1:9" in output and "Traceback" not in output

"""A tiny target with drafters, and the real SGLang server that serves them; run by `make test-sglang`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drafters.checkpoint import load_drafter, save_drafter
from drafters.length_head import LengthHead
from serving_bridge.sglang_process import running_server
from tests.serving_bridge.tiny_serving import Scene, make_scene
from tests.sglang.live_server import CONTEXT, PYTHON, Site


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without the environment of SGLang there is nothing to start."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.sglang)
            if not PYTHON:
                item.add_marker(pytest.mark.skip(reason="needs SGLang; run `make test-sglang`"))


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"), "qwen3", CONTEXT)


@pytest.fixture(scope="session")
def model(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as SGLang loads it."""
    place = tmp_path_factory.mktemp("target")
    model = scene.target.model
    model.to(torch.bfloat16).save_pretrained(place)
    model.float()
    return place


@pytest.fixture(scope="session")
def with_head(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first drafter with a length head that asks for different lengths in different places."""
    loaded = load_drafter(scene.first, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = LengthHead(loaded.drafter.config.hidden_size, width=16)
        torch.nn.init.normal_(head.out.weight, std=4.0)
    return save_drafter(
        tmp_path_factory.mktemp("headed") / "v1h",
        loaded.drafter,
        identity=loaded.identity,
        drafter_version="v1h",
        length_head=head,
    )


def run_site(site: Site) -> Iterator[Site]:
    with running_server(site.launch, site.root / "server.log") as process:
        site.process = process
        yield site


@pytest.fixture(scope="module")
def dflash(scene: Scene, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server of plain DFLASH, shared by a module's tests."""
    yield from run_site(Site(tmp_path_factory.mktemp("dflash"), scene, model, "DFLASH", target_top_k=3))


@pytest.fixture(scope="module")
def adaflash(
    scene: Scene, model: Path, with_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A server that verifies by the length head."""
    headed = Scene(scene.target, scene.prompts, scene.outputs, scene.documents, with_head, scene.second)
    yield from run_site(Site(tmp_path_factory.mktemp("adaflash"), headed, model, "ADAFLASH"))

"""A desk over real checkpoints of a tiny target whose replayed acceptance length is written into the weights.

Element 0 of `fc.weight` is the quality that the replaced replay reports, so a test can order drafters as it likes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import pipeline.release
from drafters.checkpoint import save_drafter
from drafters.dflash import DFlashDrafter
from drafters.packing import Document
from drafters.replay import ReplayResult
from drafters.target import Target
from pipeline.gate import GatePolicy
from pipeline.models import TargetBundle
from pipeline.registry import Registry
from pipeline.release import ReleaseDesk
from pipeline.tracking import Tracking
from tests.serving_bridge.tiny_serving import tiny_drafter, tiny_target, to_document

ROUNDS = 16


def documents(count: int = 8, domain: str = "math", prefix: str = "d") -> list[Document]:
    """Documents for the gate; the replaced replay does not read their tokens."""
    return [to_document([1, 2], [3, 4, 5], f"{prefix}{i}", domain=domain) for i in range(count)]


def drafter_of(quality: float, seed: int = 1) -> DFlashDrafter:
    """A drafter whose replay will report this acceptance length (a multiple of 1/16, exact in bfloat16)."""
    drafter = tiny_drafter(tiny_target(), seed=seed)
    with torch.no_grad():
        drafter.state_dict()["fc.weight"].view(-1)[0] = quality
    return drafter


def checkpoint_of(directory: Path, quality: float, version: str, seed: int = 1) -> Path:
    """The same as a serving checkpoint."""
    identity = tiny_target().identity
    return save_drafter(directory, drafter_of(quality, seed), identity=identity, drafter_version=version)


class FakeReplay:
    """Reports the quality written into a drafter, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, list[str]]] = []

    def __call__(
        self, drafter: DFlashDrafter, target: Target, asked: Sequence[Document]
    ) -> list[ReplayResult]:
        quality = float(drafter.state_dict()["fc.weight"].view(-1)[0])
        self.asked.append((quality, [d.document_id for d in asked]))
        return [ReplayResult(d.document_id, d.domain, round(quality * ROUNDS), ROUNDS) for d in asked]


class Desks:
    """Makes desks on one registered model, as several processes would one after the other."""

    def __init__(self, tracking: Tracking, model_name: str, workspace: Path, replay: FakeReplay) -> None:
        self.tracking = tracking
        self.model_name = model_name
        self.workspace = workspace
        self.replay = replay
        with tracking.run("online") as run:
            self.run_id = run.run_id

    @property
    def registry(self) -> Registry:
        """The registered model."""
        return Registry(self.tracking.tracking_uri, self.model_name)

    def open(self) -> ReleaseDesk:
        """A desk that remembers nothing of earlier ones."""
        policy = GatePolicy(min_documents=4, bootstrap_samples=200)
        bundle = TargetBundle(tiny_target(), None, "tiny", [])
        return ReleaseDesk(self.registry, bundle, policy, self.workspace)


@pytest.fixture(scope="module")
def shared_tracking(migrated_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Tracking:
    """One store for a file of tests: opening another for each of them takes longer than the tests do."""
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    shutil.copyfile(migrated_database, database)
    return Tracking(f"sqlite:///{database}", "test")


@pytest.fixture
def desks(
    shared_tracking: Tracking,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Desks:
    """See `Desks`; every test has a registered model of its own."""
    replay = FakeReplay()
    monkeypatch.setattr(pipeline.release, "replay", replay)
    model_name = re.sub(r"\W+", "-", request.node.name)
    return Desks(shared_tracking, model_name, tmp_path / "versions", replay)

"""A desk over real checkpoints of a tiny target whose replayed acceptance length is written into the weights.

Element 0 of `fc.weight` is the quality that the replaced replay reports, so a test can order drafters as it likes.
"""

from __future__ import annotations

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
from pipeline.registry import Registry, model_name_for
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


class DeskFixture:
    """Makes desks on one store, as several processes would one after the other."""

    def __init__(self, tracking: Tracking, workspace: Path, replay: FakeReplay) -> None:
        self.tracking = tracking
        self.workspace = workspace
        self.replay = replay
        with tracking.run("online") as run:
            self.run_id = run.run_id

    def open(self) -> ReleaseDesk:
        """A desk that remembers nothing of earlier ones."""
        target = tiny_target()
        name = model_name_for(target.identity.target_id, "dflash")
        policy = GatePolicy(min_documents=4, bootstrap_samples=200)
        bundle = TargetBundle(target, None, "tiny", [])
        return ReleaseDesk(Registry(self.tracking.tracking_uri, name), bundle, policy, self.workspace)


@pytest.fixture
def desks(tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeskFixture:
    """See `DeskFixture`."""
    replay = FakeReplay()
    monkeypatch.setattr(pipeline.release, "replay", replay)
    return DeskFixture(tracking, tmp_path / "versions", replay)

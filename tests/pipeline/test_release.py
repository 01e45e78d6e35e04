"""From a checkpoint to a verdict: registration, replays asked for once, refusals with their reasons."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow.artifacts
import pytest
from safetensors.torch import load_file, save_file

from drafters.checkpoint import drafter_digest, file_sha256
from drafters.errors import UserError
from drafters.packing import Document
from pipeline.gate import Verdict
from pipeline.registry import CHAMPION
from pipeline.release import ReleaseDesk
from tests.pipeline.release_desk import Desks, checkpoint_of, desks, documents, shared_tracking

__all__ = ["desks", "shared_tracking"]


def submit(
    desk: ReleaseDesk, directory: Path, desks: Desks, held: list[Document] | None = None
) -> tuple[int, Verdict]:
    held = documents() if held is None else held
    return desk.submit(directory, held, run_id=desks.run_id, tags={"data_window": "test"})


@pytest.fixture
def desk(desks: Desks, tmp_path: Path) -> ReleaseDesk:
    """With version 1 as champion, of acceptance length 1.5."""
    desk = desks.open()
    version, verdict = submit(desk, checkpoint_of(tmp_path / "first", 1.5, "v1"), desks)
    assert verdict.accepted
    desk.registry.promote(version, reason=verdict.reason)
    return desk


def test_first_drafter_is_accepted_as_challenger_with_its_figures(desks: Desks, tmp_path: Path) -> None:
    desk = desks.open()
    held = documents(4) + documents(4, "code", "c")
    version, verdict = submit(desk, checkpoint_of(tmp_path / "first", 1.25, "v1"), desks, held)
    assert verdict.accepted and "1.250 is above 1" in verdict.reason
    challenger = desk.registry.challenger()
    assert challenger is not None and challenger.version == version == 1
    assert desk.registry.champion() is None  # promotion is not the desk's business
    tags = challenger.tags
    assert {tags["tau"], tags["tau_math"], tags["tau_code"]} == {"1.25"}
    assert tags["data_window"] == "test" and "parent_version" not in tags
    assert challenger.run_id == desks.run_id


def test_better_challenger_is_accepted(desk: ReleaseDesk, desks: Desks, tmp_path: Path) -> None:
    version, verdict = submit(desk, checkpoint_of(tmp_path / "better", 1.75, "v2"), desks)
    assert verdict.accepted
    found = desk.registry.get(version)
    assert found.version == 2 and found.tags["parent_version"] == "1" and found.tags["tau"] == "1.75"


def test_worse_but_finite_challenger_is_refused_with_the_reason_in_the_registry(
    desk: ReleaseDesk, desks: Desks, tmp_path: Path
) -> None:
    version, verdict = submit(desk, checkpoint_of(tmp_path / "worse", 1.25, "v2"), desks)
    assert not verdict.accepted
    tags = desk.registry.get(version).tags
    assert tags["gate_outcome"] == "refused"
    assert tags["gate_reason"] == verdict.reason and "1.250 vs champion 1.500" in verdict.reason
    assert desk.registry.challenger() is None
    champion = desk.registry.champion()
    assert champion is not None and champion.version == 1


def test_the_same_drafter_again_is_the_same_version_and_is_not_replayed_again(
    desk: ReleaseDesk, desks: Desks, tmp_path: Path
) -> None:
    first = submit(desk, checkpoint_of(tmp_path / "a", 1.75, "v2"), desks)
    asked = len(desks.replay.asked)
    again = submit(desk, checkpoint_of(tmp_path / "b", 1.75, "other name, equal weights"), desks)
    assert again == first and len(desks.replay.asked) == asked
    assert len(desk.registry.list_versions()) == 2


def test_the_champion_itself_is_told_so_and_stays(desk: ReleaseDesk, desks: Desks, tmp_path: Path) -> None:
    version, verdict = submit(desk, tmp_path / "first", desks)
    assert (version, verdict.accepted) == (1, False)
    assert verdict.reason == "version 1 is the champion already"
    found = desk.registry.get(1)
    assert found.aliases == (CHAMPION,) and found.tags["gate_outcome"] == "accepted"
    assert len(desk.registry.list_versions()) == 1


def test_weights_that_are_not_finite_are_registered_as_refused(
    desk: ReleaseDesk, desks: Desks, tmp_path: Path
) -> None:
    bad = checkpoint_of(tmp_path / "bad", 1.75, "v2")
    tensors = load_file(bad / "model.safetensors")
    tensors["fc.weight"][0, 1] = float("inf")
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((bad / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = file_sha256(bad / "model.safetensors")
    (bad / "manifest.json").write_text(json.dumps(manifest))
    version, verdict = submit(desk, bad, desks)
    assert not verdict.accepted and "not finite" in verdict.reason
    assert desk.registry.get(version).tags["gate_outcome"] == "refused"


def test_a_damaged_drafter_is_an_error_and_leaves_no_version(
    desk: ReleaseDesk, desks: Desks, tmp_path: Path
) -> None:
    bad = checkpoint_of(tmp_path / "bad", 1.75, "v2")
    with (bad / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(UserError, match="checksum"):
        submit(desk, bad, desks)
    assert len(desk.registry.list_versions()) == 1


def test_replays_are_kept_by_drafter_and_document(desk: ReleaseDesk, desks: Desks, tmp_path: Path) -> None:
    ids = [d.document_id for d in documents(10)]
    desks.replay.asked.clear()
    submit(desk, checkpoint_of(tmp_path / "a", 1.25, "v2"), desks)
    assert desks.replay.asked == [(1.25, ids[:8])]  # the champion's are known
    submit(desk, checkpoint_of(tmp_path / "b", 1.75, "v3"), desks, documents(10))
    assert desks.replay.asked[1:] == [(1.75, ids), (1.5, ids[8:])]
    submit(desk, checkpoint_of(tmp_path / "c", 1.375, "v4"), desks, documents(10)[5:])
    assert desks.replay.asked[3:] == [(1.375, ids[5:])]
    # what no submission can ask for again is forgotten
    assert {name for _, name in desk._replays} == set(ids[5:])
    assert {digest for digest, _ in desk._replays} == {
        drafter_digest(tmp_path / "first"),
        drafter_digest(tmp_path / "c"),
    }


def test_checkpoint_is_downloaded_once_and_verified(
    desk: ReleaseDesk, desks: Desks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = desks.open()
    fresh.workspace = tmp_path / "elsewhere"
    place = fresh.checkpoint(1)
    assert drafter_digest(place) == drafter_digest(tmp_path / "first")
    assert [p.name for p in fresh.workspace.iterdir()] == ["version-1"]

    def no_download(*arguments: object, **options: object) -> str:
        raise AssertionError("downloaded again")

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", no_download)
    assert fresh.checkpoint(1) == place
    (place / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"version-1.*remove it"):
        fresh.checkpoint(1)


def test_a_version_that_the_store_has_damaged_is_an_error(desk: ReleaseDesk, desks: Desks) -> None:
    store = Path(desks.tracking.tracking_uri.removeprefix("sqlite:///")).parent
    (weights,) = store.glob(f"artifacts/{desks.run_id}/**/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    fresh = desks.open()
    fresh.workspace = desks.workspace / "elsewhere"
    with pytest.raises(UserError, match="damaged in the artifact store"):
        fresh.checkpoint(1)
    assert not list(fresh.workspace.iterdir())

"""Life cycle of registered drafters, and downloads that are what was registered or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafters.checkpoint import FORMAT_VERSION, MANIFEST, file_sha256
from drafters.errors import UserError
from drafters.identity import TargetIdentity
from pipeline.lineage import Lineage
from pipeline.registry import CANDIDATE, CHAMPION, PREVIOUS_CHAMPION, Registry, model_name_for
from pipeline.result import hash_path
from pipeline.tracking import Tracking, open_client

TARGET = TargetIdentity("org/Target-1.5B", "main", "ab" * 32)


def drafter_directory(path: Path, weights: bytes, target: TargetIdentity = TARGET) -> Path:
    """A directory with the files and manifest of a serving checkpoint; the registry reads bytes only."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    manifest = {
        "format_version": FORMAT_VERSION,
        "family": "dflash",
        "drafter_version": f"v-{weights.hex()}",
        "block_size": 8,
        "target": target.to_json(),
        "files": {p.name: file_sha256(p) for p in sorted(path.iterdir())},
    }
    (path / MANIFEST).write_text(json.dumps(manifest))
    return path


@pytest.fixture
def run_id(tracking: Tracking) -> str:
    with tracking.run("train") as run:
        return run.run_id


@pytest.fixture
def registry(tracking: Tracking, run_id: str) -> Registry:
    return Registry(tracking.tracking_uri, model_name_for(TARGET.target_id, "dflash"))


@pytest.fixture
def versions(registry: Registry, run_id: str, tmp_path: Path) -> list[int]:
    """Three registered versions."""
    return [
        registry.register(drafter_directory(tmp_path / f"d{i}", bytes([i])), run_id=run_id) for i in range(3)
    ]


def stored_files(tracking: Tracking, name: str) -> list[Path]:
    return list((Path(tracking.tracking_uri.removeprefix("sqlite:///")).parent / "artifacts").rglob(name))


def test_whole_life_cycle(registry: Registry, versions: list[int]) -> None:
    first, second, third = versions
    assert versions == [1, 2, 3]
    assert registry.champion() is None and registry.challenger() is None

    registry.promote(first, reason="first champion")
    registry.set_challenger(second)
    challenger = registry.challenger()
    assert challenger is not None and challenger.version == second
    registry.refuse(second, "acceptance length 1.52 vs champion 1.71")
    assert registry.challenger() is None
    refused = registry.get(second).tags
    assert refused["gate_outcome"] == "refused" and refused["gate_reason"].endswith("1.71")

    registry.set_challenger(third)
    registry.promote(third, reason="better")
    assert registry.get(third).aliases == (CHAMPION,)
    assert registry.get(third).tags["gate_outcome"] == "accepted"
    assert registry.get(first).aliases == (PREVIOUS_CHAMPION,)
    assert registry.challenger() is None

    assert registry.rollback("canary lost 0.2") == first
    assert registry.get(first).aliases == (CHAMPION,)
    assert registry.get(third).aliases == ()
    assert registry.get(third).tags["rolled_back_reason"] == "canary lost 0.2"
    assert [v.aliases for v in registry.list_versions()] == [(CHAMPION,), (), ()]

    registry.promote(third, reason="fixed")
    assert "rolled_back_reason" not in registry.get(third).tags


def test_candidate_waits_through_later_rounds(registry: Registry, versions: list[int]) -> None:
    registry.promote(1)
    registry.set_challenger(2)
    registry.accept(2, "better")
    assert registry.get(2).aliases == (CANDIDATE,) and registry.challenger() is None
    registry.set_challenger(3)
    registry.refuse(3, "worse")
    assert registry.get(2).aliases == (CANDIDATE,)
    registry.promote(2)
    assert registry.candidate() is None and registry.get(2).aliases == (CHAMPION,)
    registry.accept(3, "better after all")
    registry.refuse(3, "no")
    assert registry.candidate() is None


@pytest.mark.parametrize("content", ["{", "[]", '{"data": 1}', "{}"])
def test_damaged_lineage_is_named(
    registry: Registry, run_id: str, tmp_path: Path, tracking: Tracking, content: str
) -> None:
    registry.register(drafter_directory(tmp_path / "d", b"w"), run_id=run_id, lineage=Lineage(stage="deploy"))
    (path,) = stored_files(tracking, "lineage.json")
    whole = json.loads(path.read_text())
    path.write_text(json.dumps(whole | {"moon": "full"}))  # of a later release
    assert registry.lineage(1) == Lineage(stage="deploy")
    path.write_text(content)
    with pytest.raises(UserError, match=r"lineage\.json"):
        registry.lineage(1)


def test_crash_within_promote_never_leaves_the_service_without_champion(
    registry: Registry, versions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.promote(1)
    registry.set_challenger(2)
    point = registry._point

    for fails_at in (PREVIOUS_CHAMPION, CHAMPION):

        def crash(alias: str, version: int, fails_at: str = fails_at) -> None:
            if alias == fails_at:
                raise ConnectionError("killed")
            point(alias, version)

        monkeypatch.setattr(registry, "_point", crash)
        with pytest.raises(ConnectionError):
            registry.promote(2)
        champion = registry.champion()
        assert champion is not None and champion.version == 1

    monkeypatch.setattr(registry, "_point", point)
    for _ in range(2):
        registry.promote(2)
        assert registry.get(2).aliases == (CHAMPION,)
        assert registry.get(1).aliases == (PREVIOUS_CHAMPION,)
    assert registry.challenger() is None


def test_rollback_is_safe_to_repeat_and_never_brings_the_bad_version_back(
    registry: Registry, versions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.promote(1)
    registry.promote(2)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_clear", lambda alias, version: (_ for _ in ()).throw(ConnectionError()))
        with pytest.raises(ConnectionError):
            registry.rollback("bad", version=2)
    for _ in range(2):
        assert registry.rollback("bad", version=2) == 1
        champion = registry.champion()
        assert champion is not None and champion.version == 1
        assert registry.previous_champion() is None
    with pytest.raises(UserError, match="no previous champion"):
        registry.rollback("worse")
    assert "rolled_back_reason" not in registry.get(1).tags


def test_rollback_without_champion_and_refusal_of_the_champion_are_errors(
    registry: Registry, versions: list[int]
) -> None:
    with pytest.raises(UserError, match="no previous champion"):
        registry.rollback("nothing there")
    registry.promote(1)
    with pytest.raises(UserError, match="roll back instead"):
        registry.refuse(1, "worse")


def test_tags_name_target_origin_and_measures(registry: Registry, run_id: str, tmp_path: Path) -> None:
    version = registry.register(
        drafter_directory(tmp_path / "d", b"w"),
        run_id=run_id,
        tags={"parent_version": "7", "data_window": "0..128"},
        metrics={"tau_math": 1.71, "tau_c++": 2, "tau_none": float("nan")},
    )
    found = registry.get(version)
    expected = {
        "target_id": TARGET.target_id,
        "tokenizer_hash": TARGET.tokenizer_hash,
        "block_size": "8",
        "family": "dflash",
        "drafter_version": "v-77",
        "parent_version": "7",
        "data_window": "0..128",
        "tau_math": "1.71",
        "tau_c__": "2",
    }
    assert {key: found.tags.get(key) for key in expected} == expected
    assert "tau_none" not in found.tags
    assert found.run_id == run_id


def test_registering_the_same_drafter_again_returns_its_version(
    registry: Registry, tracking: Tracking, versions: list[int], tmp_path: Path
) -> None:
    with tracking.run("after a crash") as run:
        again = registry.register(drafter_directory(tmp_path / "again", bytes([1])), run_id=run.run_id)
    assert again == 2
    assert len(registry.list_versions()) == 3


def test_download_is_bit_equal_by_version_and_by_alias(
    registry: Registry, versions: list[int], tmp_path: Path
) -> None:
    registry.promote(2)
    for wanted, name in ((2, "by-version"), (CHAMPION, "by-alias")):
        got = registry.download(wanted, tmp_path / "deep" / name)
        assert got == tmp_path / "deep" / name
        assert sorted(p.name for p in got.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]
        assert hash_path(got) == hash_path(tmp_path / "d1")
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["by-alias", "by-version"]


def test_download_keeps_what_is_there(registry: Registry, versions: list[int], tmp_path: Path) -> None:
    there = registry.download(1, tmp_path / "got")
    assert registry.download(1, there) == there
    with pytest.raises(UserError, match="exists and is not"):
        registry.download(2, there)
    assert hash_path(there) == hash_path(tmp_path / "d0")


def test_damaged_artifact_is_named_and_not_delivered(
    registry: Registry, tracking: Tracking, versions: list[int], tmp_path: Path
) -> None:
    for weights in stored_files(tracking, "model.safetensors"):
        weights.write_bytes(b"tampered")
    with pytest.raises(UserError, match=r"version 1 is damaged.*model\.safetensors"):
        registry.download(1, tmp_path / "got" / "d")
    assert list((tmp_path / "got").iterdir()) == []


def test_artifact_changed_together_with_its_manifest_is_detected(
    registry: Registry, tracking: Tracking, versions: list[int], tmp_path: Path
) -> None:
    for manifest in stored_files(tracking, MANIFEST):
        (manifest.parent / "model.safetensors").write_bytes(b"tampered")
        content = json.loads(manifest.read_text())
        content["files"]["model.safetensors"] = file_sha256(manifest.parent / "model.safetensors")
        manifest.write_text(json.dumps(content))
    with pytest.raises(UserError, match="not what was registered"):
        registry.download(1, tmp_path / "got")


def test_file_added_to_an_artifact_is_detected(
    registry: Registry, tracking: Tracking, versions: list[int], tmp_path: Path
) -> None:
    for manifest in stored_files(tracking, MANIFEST):
        (manifest.parent / "modeling.py").write_text("print('run me')")
    with pytest.raises(UserError, match="not what was registered"):
        registry.download(1, tmp_path / "got")


def test_damaged_directory_is_not_registered(registry: Registry, run_id: str, tmp_path: Path) -> None:
    directory = drafter_directory(tmp_path / "d", b"w")
    (directory / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="checksum"):
        registry.register(directory, run_id=run_id)
    assert registry.list_versions() == []


def test_drafter_of_another_target_is_not_registered(
    registry: Registry, versions: list[int], run_id: str, tmp_path: Path
) -> None:
    other = TargetIdentity("org/Target-1.5B", "other-revision", "ab" * 32)
    with pytest.raises(UserError, match="target_id"):
        registry.register(drafter_directory(tmp_path / "other", b"o", other), run_id=run_id)
    assert len(registry.list_versions()) == 3


def test_unknown_versions_and_aliases_are_named(
    registry: Registry, versions: list[int], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no version 99"):
        registry.get(99)
    with pytest.raises(UserError, match="no version 99"):
        registry.promote(99)
    with pytest.raises(UserError, match="no alias 'champion'"):
        registry.download(CHAMPION, tmp_path / "got")


def test_version_without_our_hash_is_not_delivered(
    registry: Registry, tracking: Tracking, versions: list[int], tmp_path: Path
) -> None:
    source = str(tmp_path / "d0")
    open_client(tracking.tracking_uri).create_model_version(registry.model_name, source)
    with pytest.raises(UserError, match="no hash"):
        registry.download(4, tmp_path / "got")


def test_model_names_are_legal_and_distinct(tracking: Tracking) -> None:
    one = model_name_for("org/Target-1.5B@main#abcdef", "dflash")
    assert one.startswith("dflash-org-Target-1-5B-")
    others = [
        model_name_for("org/Target-1.5B@v2#abcdef", "dflash"),
        model_name_for("org/Target-1.5B@main#abcdef", "d3d"),
        model_name_for("org-Target-1.5B@main#abcdef", "dflash"),
        model_name_for("/" * 300 + "@main#abcdef", "dflash"),
    ]
    assert len({one, *others}) == 5
    for name in (one, *others):
        Registry(tracking.tracking_uri, name)
    with pytest.raises(UserError, match="legal"):
        Registry(tracking.tracking_uri, "a/b")

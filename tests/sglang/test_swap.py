"""Hot swaps on the real server: whole or not at all."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters.checkpoint import MANIFEST, file_sha256, load_drafter
from drafters.replay import replay, total_acceptance_length
from serving_bridge.records import acceptance_length, committed_tokens, verification_rounds
from serving_bridge.server import ServerLost, SwapError
from serving_bridge.sglang_process import running_server
from tests.serving_bridge.tiny_serving import Scene
from tests.sglang.live_server import Site, wait_for_records


@pytest.fixture(autouse=True)
def back_to_first(dflash: Site) -> Iterator[None]:
    """Every test begins and ends with the first drafter, bit for bit."""
    before = dflash.client.checksum("draft")
    yield
    if dflash.server().drafter_version != "v1":
        dflash.server().swap(dflash.scene.first)
    assert dflash.client.checksum("draft") == before


def spoiled(scene: Scene, place: Path, spoil: Any) -> Path:
    """The second drafter with its tensors changed, and a manifest that agrees with them."""
    shutil.copytree(scene.second, place)
    tensors = load_file(place / "model.safetensors")
    save_file(spoil(tensors), place / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((place / MANIFEST).read_text())
    manifest["files"]["model.safetensors"] = file_sha256(place / "model.safetensors")
    manifest["drafter_version"] = place.name
    (place / MANIFEST).write_text(json.dumps(manifest))
    return place


def test_a_swap_in_mid_request_changes_the_draft_alone(dflash: Site) -> None:
    server = dflash.server()
    before = (dflash.client.checksum("draft"), dflash.client.checksum("target"))
    prompt = dflash.scene.prompts[2]
    undisturbed = dflash.generate(prompt, 300, rid="calm")["output_ids"]
    answer: list[Any] = []
    asking = threading.Thread(target=lambda: answer.append(dflash.generate(prompt, 300, rid="across")))
    asking.start()
    time.sleep(0.6)
    report = server.swap(dflash.scene.second)
    asking.join()
    assert (report.old_version, report.new_version, report.route) == ("v1", "v2", "directory")
    assert report.old_draft_checksum == before[0] != report.draft_checksum
    assert report.target_checksum == before[1] == dflash.client.checksum("target")
    assert answer[0]["output_ids"] == undisturbed
    record = wait_for_records(dflash, {"across"}, "across")["across"]
    versions = [r.drafter_version for r in record.rounds]
    assert set(versions) == {"v1", "v2"}, "the request should have been running during the swap"
    assert versions == sorted(versions)

    # and back: the very same weights
    server.swap(dflash.scene.first)
    assert dflash.client.checksum("draft") == before[0]


def test_after_a_swap_a_known_prefix_still_drafts_well(dflash: Site) -> None:
    """The second drafter must not read what the first left in the prefix cache."""
    scene = dflash.scene
    # a prefix long enough for the cache to matter
    prompt = [*scene.prompts[3], *scene.outputs[3][:8]]
    dflash.server().swap(scene.second)
    dflash.generate(prompt, 60, rid="fill")
    dflash.server().swap(scene.first)
    again = dflash.generate(prompt, 60, rid="again")
    # the prefix is in the cache, but in the old drafter's part of it
    assert again["meta_info"]["cached_tokens"] == 0
    known = dflash.generate(prompt, 60, rid="known")
    assert known["meta_info"]["cached_tokens"] > 0, "the second time the prefix should be cached"
    found = wait_for_records(dflash, {"again", "known"}, "prefix")
    document = scene.documents[3].__class__(
        [*prompt, *again["output_ids"]], [False] * len(prompt) + [True] * 60, "again"
    )
    drafter = load_drafter(scene.first, dtype=torch.float32).drafter
    expected = total_acceptance_length(replay(drafter, scene.target, [document]))
    for name in ("again", "known"):
        live = acceptance_length(found[name])
        assert live is not None and live > 0.9 * expected, name


def refusals(scene: Scene, place: Path) -> dict[str, tuple[Path, str]]:
    """Bad drafters and a word of the reason."""

    def wrong_shape(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return t | {"fc.weight": t["fc.weight"][:, :-1].contiguous()}

    def wrong_key(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {("fc.wait" if k == "fc.weight" else k): v for k, v in t.items()}

    def not_finite(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return t | {"norm.weight": torch.full_like(t["norm.weight"], float("nan"))}

    damaged = place / "damaged"
    shutil.copytree(scene.second, damaged)
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-5] ^= 0xFF
    (damaged / "model.safetensors").write_bytes(data)
    return {
        "shape": (spoiled(scene, place / "shape", wrong_shape), "shape"),
        "key": (spoiled(scene, place / "key", wrong_key), "fc.w"),
        "nan": (spoiled(scene, place / "nan", not_finite), "not finite"),
        "damaged": (damaged, "checksum"),
    }


def test_bad_drafters_leave_the_good_one(dflash: Site, tmp_path: Path) -> None:
    before = dflash.client.checksum("draft")
    for name, (directory, word) in refusals(dflash.scene, tmp_path).items():
        with pytest.raises(SwapError, match=word):
            dflash.server().swap(directory)
        assert dflash.server().drafter_version == "v1", name
        assert dflash.client.checksum("draft") == before, name
        # and it serves, unpaused
        assert len(dflash.generate(dflash.scene.prompts[0], 4)["output_ids"]) == 4


def test_a_damage_on_the_way_to_the_server_is_seen_there(
    dflash: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = dflash.server()
    place = server._place

    def damage(directory: Path) -> Path:
        placed = place(directory)
        data = bytearray((placed / "model.safetensors").read_bytes())
        data[-5] ^= 0xFF
        (placed / "model.safetensors").write_bytes(data)
        return placed

    monkeypatch.setattr(server, "_place", damage)
    before = dflash.client.checksum("draft")
    with pytest.raises(SwapError, match="checksum"):
        server.swap(dflash.scene.second)
    assert (dflash.server().drafter_version, dflash.client.checksum("draft")) == ("v1", before)


def test_roll_back_on_the_server(dflash: Site) -> None:
    before = dflash.client.checksum("draft")
    dflash.server().swap(dflash.scene.second)
    assert dflash.server().roll_back() == "v1"
    assert dflash.client.checksum("draft") == before
    with pytest.raises(SwapError, match="no earlier drafter"):
        dflash.server().roll_back()


def test_a_stale_drafter_shows_in_the_records(dflash: Site, tmp_path: Path) -> None:
    """Finite, whole and useless: only live acceptance tells."""

    def noise(t: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {k: torch.randn(v.shape, generator=generator).to(v.dtype) for k, v in t.items()}

    bad = spoiled(dflash.scene, tmp_path / "noise", noise)
    dflash.server().swap(bad)
    ids = {f"bad{n}" for n in range(4)}
    for n in range(4):
        dflash.generate(dflash.scene.prompts[n], 16, rid=f"bad{n}")
    found = wait_for_records(dflash, ids, "stale").values()
    tau = sum(map(committed_tokens, found)) / sum(map(verification_rounds, found))
    assert tau < 1.3


def test_a_restarted_server_runs_its_first_drafter_and_can_be_swapped_again(
    scene: Scene, model: Path, tmp_path: Path
) -> None:
    site = Site(tmp_path, scene, model, "DFLASH")
    with running_server(site.launch, tmp_path / "one.log") as process:
        site.server().swap(scene.second)
        process.stop(9)
        with pytest.raises(ServerLost):
            site.server().swap(scene.first)
    with running_server(site.launch, tmp_path / "two.log"):
        assert site.server().drafter_version == "v1"
        assert site.server().swap(scene.second).new_version == "v2"


def test_a_stock_server_is_swapped_through_shared_memory(
    scene: Scene, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, scene, model, "DFLASH")
    monkeypatch.setattr(
        type(site.launch),
        "variables",
        lambda launch: {k: v for k, v in site_variables(launch).items() if k != "DRAFTSMITH_SGLANG"},
    )
    with running_server(site.launch, tmp_path / "server.log"):
        assert site.client.plugin_status() is None
        first = site.client.checksum("draft")
        report = site.server().swap(scene.second)
        assert (report.new_version, report.route) == ("v2", "tensors")
        assert site.client.checksum("draft") == report.draft_checksum != first
        back = site.server().swap(scene.first)
        assert back.old_version == "v2" and back.draft_checksum == first
        assert len(site.generate(scene.prompts[0], 4)["output_ids"]) == 4


def site_variables(launch: Any) -> dict[str, str]:
    from serving_bridge.sglang_cpu import environment

    return environment(launch.threads)

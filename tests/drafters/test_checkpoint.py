"""Serving checkpoints: exact round trips, strict reading, and writes that never leave half a directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import checkpoint
from drafters.acceptance_head import AcceptanceHead
from drafters.checkpoint import (
    CONTENT,
    drafter_digest,
    file_sha256,
    load_drafter,
    save_drafter,
    verify_manifest,
)
from drafters.dflash import DFlashDrafter
from drafters.errors import UserError
from drafters.identity import TargetIdentity
from drafters.length_head import LengthHead
from drafters.target import Target

IDENTITY = TargetIdentity("tiny", "r1", "a" * 64)
MODEL = "model.safetensors"


@pytest.fixture
def drafter(make_target: Callable[..., Target], make_drafter: Callable[..., DFlashDrafter]) -> DFlashDrafter:
    return make_drafter(make_target("llama"))


@pytest.fixture
def saved(tmp_path: Path, drafter: DFlashDrafter) -> Path:
    head = LengthHead(32, width=8, features="embedding")
    return save_drafter(
        tmp_path / "out" / "drafter",
        drafter,
        identity=IDENTITY,
        drafter_version="v3",
        length_head=head,
        acceptance_head=AcceptanceHead(32, 5, 8),
        extra={"parent": "v2"},
    )


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any], name: str = MODEL) -> None:
    """Change tensors and keep the manifest truthful, so that only the strict check can notice."""
    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name)
    relist(directory)


def relist(directory: Path, **changes: Any) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"] = {name: file_sha256(directory / name) for name in manifest["files"]}
    (directory / "manifest.json").write_text(json.dumps({**manifest, **changes}))


@pytest.mark.parametrize("confidence", [True, False])
def test_an_acceptance_head_travels_along(tmp_path: Path, drafter: DFlashDrafter, confidence: bool) -> None:
    head = AcceptanceHead(32, drafter.block_size, 8, confidence=confidence)
    with torch.no_grad():
        head.calibration.copy_(torch.tensor([0.7, -0.3]))
    save_drafter(tmp_path / "d", drafter, identity=IDENTITY, drafter_version="v3", acceptance_head=head)
    loaded = load_drafter(tmp_path / "d")
    assert loaded.length_head is None and loaded.acceptance_head is not None
    torch.testing.assert_close(
        dict(loaded.acceptance_head.state_dict()), dict(head.state_dict()), rtol=0, atol=0
    )
    assert loaded.acceptance_head.reads_confidence == confidence
    assert not loaded.acceptance_head.training
    states, sure = torch.randn(2, drafter.block_size, 32), torch.randn(2, drafter.block_size - 1) - 3
    assert torch.equal(loaded.acceptance_head(states, sure), head(states, sure))
    save_drafter(
        tmp_path / "again",
        loaded.drafter,
        identity=IDENTITY,
        drafter_version="v4",
        acceptance_head=loaded.acceptance_head,
    )
    assert drafter_digest(tmp_path / "again") == drafter_digest(tmp_path / "d")
    save_drafter(tmp_path / "d", drafter, identity=IDENTITY, drafter_version="v5")
    assert load_drafter(tmp_path / "d").acceptance_head is None, "files of the old version must not survive"


def test_an_acceptance_head_of_another_block_size_is_refused(tmp_path: Path, drafter: DFlashDrafter) -> None:
    head = AcceptanceHead(32, drafter.block_size + 1, 8)
    save_drafter(tmp_path / "d", drafter, identity=IDENTITY, drafter_version="v3", acceptance_head=head)
    with pytest.raises(UserError, match="acceptance head is for blocks of 6, the drafter makes blocks of 5"):
        load_drafter(tmp_path / "d")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_bit_equal(tmp_path: Path, drafter: DFlashDrafter, dtype: torch.dtype) -> None:
    head = LengthHead(32, width=8, features="embedding")
    save_drafter(
        tmp_path / "d", drafter, identity=IDENTITY, drafter_version="v3", length_head=head, dtype=dtype
    )
    loaded = load_drafter(tmp_path / "d", dtype=dtype)
    expected = {name: tensor.to(dtype) for name, tensor in drafter.state_dict().items()}
    torch.testing.assert_close(dict(loaded.drafter.state_dict()), expected, rtol=0, atol=0)
    assert loaded.length_head is not None
    torch.testing.assert_close(dict(loaded.length_head.state_dict()), dict(head.state_dict()), rtol=0, atol=0)
    assert loaded.length_head.features == "embedding"
    assert (loaded.drafter_version, loaded.identity) == ("v3", IDENTITY)
    assert loaded.drafter.spec == drafter.spec
    assert loaded.drafter.config.rope_parameters == drafter.config.rope_parameters
    assert not loaded.drafter.training
    # writing what was read gives the same files
    save_drafter(
        tmp_path / "again", loaded.drafter, identity=IDENTITY, drafter_version="v4",
        length_head=loaded.length_head, dtype=dtype,
    )  # fmt: skip
    assert drafter_digest(tmp_path / "again") == drafter_digest(tmp_path / "d")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loading_in_any_precision_keeps_exact_rotary_frequencies(
    saved: Path, drafter: DFlashDrafter, dtype: torch.dtype
) -> None:
    """In half precision a rounded frequency turns far positions by whole radians."""
    x, positions = torch.zeros(1, 1, 1, dtype=torch.float32), torch.tensor([[1000]])
    expected = drafter.rotary_emb(x, positions)
    loaded = load_drafter(saved, dtype=dtype).drafter
    assert loaded.dtype == dtype
    torch.testing.assert_close(loaded.rotary_emb(x, positions), expected, rtol=0, atol=0)


def test_layout_is_the_serving_engines(saved: Path) -> None:
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(2):
        names |= {f"layers.{i}.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")}
        names |= {
            f"layers.{i}.self_attn.{n}.weight"
            for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        }
        names |= {f"layers.{i}.mlp.{n}.weight" for n in ("gate_proj", "up_proj", "down_proj")}
    tensors = load_file(saved / MODEL)
    assert set(tensors) == names, "no embedding, no head, nothing that an engine would ignore"
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert list(tensors["fc.weight"].shape) == [32, 3 * 32]
    config = json.loads((saved / "config.json").read_text())
    expected = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "num_target_layers": 5,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0, 1, 3]},
        "layer_types": ["full_attention"] * 2,
        "vocab_size": 64,
        "rope_scaling": None,
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert "auto_map" not in config
    assert sorted(p.name for p in saved.iterdir()) == [
        "acceptance_head.json", "acceptance_head.safetensors",
        "config.json", "length_head.json", "length_head.safetensors", "manifest.json", MODEL,
    ]  # fmt: skip


def test_manifest_lists_every_file_and_what_the_drafter_belongs_to(saved: Path) -> None:
    manifest = verify_manifest(saved)
    files = {p.name for p in saved.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == files
    assert manifest["target"] == IDENTITY.to_json()
    assert (manifest["drafter_version"], manifest["block_size"], manifest["parent"]) == ("v3", 5, "v2")


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("layers.1.self_attn.k_norm.weight"), r"missing tensors.*layers\.1\.self_attn\.k_norm"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2)}), r"unexpected tensors.*lm_head"),
        (lambda t: t.update({"fc.weight": torch.ones(32, 32)}), r"fc\.weight has shape \[32, 32\]"),
        (lambda t: t["norm.weight"].__setitem__(3, float("nan")), r"norm\.weight is not finite"),
        (lambda t: t["norm.weight"].__setitem__(3, float("inf")), r"norm\.weight is not finite"),
    ],
    ids=["missing", "extra", "shape", "nan", "inf"],
)
def test_wrong_tensors_are_refused_by_name(saved: Path, change: Any, message: str) -> None:
    rewrite(saved, change)
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(saved)
    assert MODEL in str(caught.value)


HEADS = ["length_head", "acceptance_head"]


@pytest.mark.parametrize("head", HEADS)
def test_heads_are_checked_as_strictly(saved: Path, head: str) -> None:
    rewrite(saved, drop("out.bias"), f"{head}.safetensors")
    with pytest.raises(UserError, match=rf"{head}\.safetensors.*out\.bias"):
        load_drafter(saved)


def test_a_calibration_that_is_lost_or_broken_is_noticed(saved: Path) -> None:
    rewrite(saved, lambda t: t["calibration"].__setitem__(0, float("nan")), "acceptance_head.safetensors")
    with pytest.raises(UserError, match="calibration is not finite"):
        load_drafter(saved)
    rewrite(saved, drop("calibration"), "acceptance_head.safetensors")
    with pytest.raises(UserError, match=r"missing tensors.*calibration"):
        load_drafter(saved)


@pytest.mark.parametrize(
    "name", ["config.json", MODEL, *(f"{head}.{kind}" for head in HEADS for kind in ("safetensors", "json"))]
)
def test_damaged_and_missing_files_are_named(saved: Path, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[len(content) // 2] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: checksum"):
        load_drafter(saved)
    (saved / name).unlink()
    with pytest.raises(UserError, match=f"{name}: listed in the manifest but missing"):
        load_drafter(saved)


def test_a_file_that_is_no_safetensors_is_refused(saved: Path) -> None:
    (saved / MODEL).write_bytes(b"not tensors")
    relist(saved)
    with pytest.raises(UserError, match="not a readable safetensors"):
        load_drafter(saved)


@pytest.mark.parametrize("head", HEADS)
def test_an_unlisted_head_is_not_trusted(saved: Path, head: str) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["files"][f"{head}.safetensors"], manifest["files"][f"{head}.json"]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"{head}.json, {head}.safetensors not listed"):
        load_drafter(saved)


@pytest.mark.parametrize("head", HEADS)
def test_half_a_head_is_refused(saved: Path, head: str) -> None:
    (saved / f"{head}.json").unlink()
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest["files"][f"{head}.json"]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"{head}.json not listed"):
        load_drafter(saved)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", "unreadable manifest"),
        ("[]", "unreadable manifest"),
        ('{"format_version": 1}', "unreadable manifest"),
        ('{"format_version": 1, "files": []}', "unreadable manifest"),
        ('{"format_version": 99, "files": {}}', "format version 99"),
        ('{"format_version": 1, "files": {}}', "not listed"),
    ],
)
def test_unusable_manifests_are_refused(saved: Path, manifest: str, message: str) -> None:
    (saved / "manifest.json").write_text(manifest)
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(saved)
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize("key", ["drafter_version", "target"])
def test_a_manifest_must_say_what_it_belongs_to(saved: Path, key: str) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    del manifest[key]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=key):
        load_drafter(saved)


def test_a_directory_without_a_manifest_is_refused(saved: Path, tmp_path: Path) -> None:
    (saved / "manifest.json").unlink()
    for directory in (saved, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=str(directory)):
            load_drafter(directory)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "", "a/b"])
def test_a_manifest_cannot_reach_outside(saved: Path, name: str) -> None:
    secret = saved.parent / "secret"
    secret.write_text("x")
    (saved / "a").mkdir()
    (saved / "a" / "b").write_text("x")
    manifest = json.loads((saved / "manifest.json").read_text())
    digest = file_sha256(secret)
    (saved / "manifest.json").write_text(
        json.dumps({**manifest, "files": {name: digest, **manifest["files"]}})
    )
    with pytest.raises(UserError, match="manifest"):
        verify_manifest(saved)


def listing(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("failing", ["_write_json", "save_file", "file_sha256", "replace_directory"])
def test_a_failed_save_leaves_the_old_directory_and_nothing_else(
    saved: Path, drafter: DFlashDrafter, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(saved.parent)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, failing, fail)
        with pytest.raises(OSError, match="disk full"):
            save_drafter(saved, drafter, identity=IDENTITY, drafter_version="v4")
    assert listing(saved.parent) == before


def test_a_failed_replacement_puts_the_old_directory_back(
    saved: Path, drafter: DFlashDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = listing(saved.parent)
    rename = Path.rename

    def fail_for_the_new_one(self: Path, target: Path) -> Path:
        if (self / "manifest.json").exists() and Path(target) == saved and self.name != "replaced":
            raise OSError("disk full")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_for_the_new_one)
        with pytest.raises(OSError, match="disk full"):
            save_drafter(saved, drafter, identity=IDENTITY, drafter_version="v4")
    assert listing(saved.parent) == before


def test_a_weight_that_is_not_finite_is_never_written(saved: Path, drafter: DFlashDrafter) -> None:
    before = listing(saved.parent)
    with torch.no_grad():
        drafter.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj\.weight is not finite"):
        save_drafter(saved, drafter, identity=IDENTITY, drafter_version="v4")
    assert listing(saved.parent) == before


def test_saving_again_replaces_the_directory_whole(saved: Path, drafter: DFlashDrafter) -> None:
    save_drafter(saved, drafter, identity=IDENTITY, drafter_version="v4")
    loaded = load_drafter(saved)
    assert loaded.length_head is None, "files of the old version must not survive"
    assert loaded.drafter_version == "v4"
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_version_can_name_its_content(drafter: DFlashDrafter, tmp_path: Path) -> None:
    def version(name: str) -> str:
        directory = save_drafter(
            tmp_path / name, drafter, identity=IDENTITY, drafter_version=f"run-r1-{CONTENT}"
        )
        found = str(verify_manifest(directory)["drafter_version"])
        assert found == f"run-r1-{drafter_digest(directory)[:8]}"
        return found

    first = version("a")
    assert version("b") == first
    with torch.no_grad():
        drafter.norm.weight[0] += 1
    assert version("c") != first


def test_the_digest_follows_weights_and_config_only(
    saved: Path, drafter: DFlashDrafter, tmp_path: Path
) -> None:
    base = drafter_digest(saved)

    def digest(name: str, **options: Any) -> str:
        fields: dict[str, Any] = {"identity": IDENTITY, "drafter_version": "v9", **options}
        return drafter_digest(save_drafter(tmp_path / name, drafter, **fields))

    headless = digest("a")
    assert headless != base
    other_target = TargetIdentity("other", "r", "b" * 64)
    assert digest("b", identity=other_target, drafter_version="w", extra={"x": 1}) == headless
    assert digest("c", dtype=torch.float32) != headless
    drafter.config.rms_norm_eps *= 2
    assert digest("d") != headless
    drafter.config.rms_norm_eps /= 2
    with torch.no_grad():
        drafter.norm.weight[0] += 0.5
    assert digest("e") != headless

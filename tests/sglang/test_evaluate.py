"""`evaluate` on the real server: τ of `sglang` and of `local` on the same prompts."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.cli import main
from serving_bridge.sglang_launch import Launch
from serving_bridge.sglang_plugin.settings import PluginSettings
from serving_bridge.sglang_process import running_server
from tests.pipeline.tiny_run import write_config, write_prompts
from tests.sglang.live_server import CONTEXT, PYTHON

Text = tuple[list[int], list[int]]
"""Prompt and output ids."""
TIE_STEPS = 4
"""Steps of bfloat16 between logits that another order of additions may exchange."""


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


def parted_at_a_tie(model: Any, ours: Text, theirs: Text) -> bool:
    """Whether two texts are equal, or first differ in tokens whose logits are within a few steps of the number format."""
    assert ours[0] == theirs[0]
    pairs = enumerate(zip(ours[1], theirs[1], strict=False))
    first = next((i for i, (a, b) in pairs if a != b), None)
    if first is None:
        return len(ours[1]) == len(theirs[1])
    with torch.no_grad():
        logits = model(torch.tensor([ours[0] + ours[1][:first]])).logits[0, -1].float()
    step = 2.0 ** (math.floor(math.log2(float(logits.max().abs()))) - 7)
    return all(float(logits.max() - logits[text[1][first]]) <= TIE_STEPS * step for text in (ours, theirs))


def texts(place: Path) -> dict[str, Text]:
    (cell,) = (place / "out/benchmark/cells").glob("mine--*--fixed--*")
    rows = [json.loads(line) for line in (cell / "answers.jsonl").read_text().splitlines()]
    return {row["document_id"]: (row["prompt_ids"], row["output_ids"]) for row in rows}


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
    # texts part only where half precision cannot tell the best tokens apart
    model = AutoModelForCausalLM.from_pretrained(place / "out/target", dtype=torch.bfloat16)
    assert sum(parted_at_a_tie(model, ours[name], theirs[name]) for name in ours) == len(ours)
    assert served["positions"]["accepted"][0] > 0
    # benchmarks leave no records
    assert not [p for p in (place / "spool").rglob("*.jsonl") if p.stat().st_size]

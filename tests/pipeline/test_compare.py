"""`compare`: signs, refusals, registry versions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.benchmark.compare import verdict
from pipeline.cli import main
from tests.pipeline.tiny_run import write_prompts

FIXED = ["--method", "fixed", "--max-new-tokens", "12"]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def compared(whole_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluations of an untrained drafter (`worse`) and a trained one (`better`)."""
    directory = tmp_path_factory.mktemp("compared") / "run"
    shutil.copytree(whole_run, directory)
    (directory / "tiny.yaml").write_text(
        (directory / "tiny.yaml").read_text().replace(str(whole_run), str(directory))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        write_prompts(directory / "extra.jsonl", "math", range(300, 312))
        make_blank(directory / "out/train/drafter", directory / "blank")
        for name, drafter in (("worse", "blank"), ("better", "out/train/drafter")):
            words = ["--drafter", f"{name}={drafter}", "--benchmark", "mine=extra.jsonl", *FIXED]
            assert call("evaluate", "tiny.yaml", *words) == 0
            shutil.move(directory / "out/benchmark", directory / name)
    return directory


def make_blank(trained: Path, place: Path) -> None:
    """A drafter that has learnt nothing."""
    import torch

    from drafters.checkpoint import load_drafter, save_drafter

    loaded = load_drafter(trained, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in loaded.drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    save_drafter(place, loaded.drafter, identity=loaded.identity, drafter_version="blank")


def compare(directory: Path, a: str, b: str, *words: str) -> dict[str, Any]:
    place = directory / "comparison.json"
    assert call("compare", a, b, "--json", str(place), *words) == 0
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def test_the_sign_is_b_minus_a(compared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(compared)
    (cell,) = compare(compared, "worse", "better")["cells"]
    difference = cell["acceptance_length_difference"]
    points = [
        json.loads((compared / n / "report/report.json").read_text())["cells"][0]["acceptance_length"][
            "point"
        ]
        for n in ("worse", "better")
    ]
    assert difference["point"] == pytest.approx(points[1] - points[0])
    assert difference["low"] > 0 and cell["verdict"] == "B is better"
    (other,) = compare(compared, "better", "worse")["cells"]
    assert other["verdict"] == "A is better"
    assert other["acceptance_length_difference"]["point"] == pytest.approx(-difference["point"])
    (same,) = compare(compared, "better/report/report.json", "better:better")["cells"]
    assert same["verdict"] == "no difference shown"
    assert same["acceptance_length_difference"] == {"point": 0, "low": 0, "high": 0}
    assert same["speed_ratio"]["point"] == pytest.approx(1)


def test_few_conversations_decide_nothing() -> None:
    sure = {"point": 1.0, "low": 1.0, "high": 1.0}
    assert verdict(sure, 1) == verdict(sure, 9) == "too few to say"
    assert verdict(sure, 10) == "B is better"


def test_intervals_pair_conversations(compared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(compared)
    (cell,) = compare(compared, "worse", "better")["cells"]
    sums = []
    for name in ("worse", "better"):
        (place,) = (compared / name / "cells").glob("mine--*")
        rows = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
        sums.append([(r["committed"], r["rounds"]) for r in rows])
    data = np.array([(*a, *b) for a, b in zip(*sums, strict=True)])
    draws = np.random.default_rng(1).multinomial(12, np.full(12, 1 / 12), size=2000)
    totals = draws @ data
    values = totals[:, 2] / totals[:, 3] - totals[:, 0] / totals[:, 1]
    found = cell["acceptance_length_difference"]
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert cell["by_domain"]["math"]["acceptance_length_difference"] == found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--benchmark", "mine=fewer.jsonl"], "asked different prompts of mine .12 and 8 conversations."),
        (["--benchmark", "mine=extra.jsonl", "--max-new-tokens", "9"], "different max_new_tokens .12 and 9."),
        (
            ["--benchmark", "mine=extra.jsonl", "--temperature", "1"],
            "different temperature .0.0 and 1.0., seed",
        ),
        (
            ["--benchmark", "mine=extra.jsonl", "--method", "fixed:2"],
            "no method, benchmark and concurrency in",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    compared: Path,
    change: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(compared)
    write_prompts(compared / "fewer.jsonl", "math", range(300, 308))
    base = [] if "--method" in change else ["--method", "fixed"]
    length = [] if "--max-new-tokens" in change else ["--max-new-tokens", "12"]
    words = ["--drafter", "other=out/train/drafter", *base, *length, *change]
    assert call("evaluate", "tiny.yaml", *words) == 0
    capfd.readouterr()
    assert call("compare", "better", "out") == 2
    message = capfd.readouterr().err
    assert message.startswith("error: ") and re.search(named, message), message


def test_speeds_of_different_machines_are_not_compared(
    compared: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(compared / "better", tmp_path / "elsewhere")
    path = other / "report/report.json"
    report = json.loads(path.read_text())
    report["machine"]["node"] = "elsewhere"
    path.write_text(json.dumps(report))
    (cell,) = compare(tmp_path, str(compared / "worse"), str(other))["cells"]
    assert cell["speed_ratio"] is None and cell["verdict"] == "B is better"
    assert "measured on different machines" in " ".join(capfd.readouterr().out.split())


def test_registry_versions(
    compared: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(compared)
    shutil.rmtree(compared / "out/benchmark", ignore_errors=True)
    words = ["--drafter", "1", "--drafter", "new=2", "--benchmark", "mine=extra.jsonl", *FIXED]
    assert call("evaluate", "tiny.yaml", *words) == 0
    report = json.loads((compared / "out/benchmark/report/report.json").read_text())
    assert list(report["drafters"]) == ["1", "new"]
    found = compare(compared, "champion", "2", "--config", "tiny.yaml")
    assert (found["a"]["drafter"], found["b"]["drafter"]) == ("1", "new")
    points = {c["drafter"]: c["acceptance_length"]["point"] for c in report["cells"]}
    assert found["cells"][0]["acceptance_length_difference"]["point"] == pytest.approx(
        points["new"] - points["1"]
    )
    capfd.readouterr()
    assert call("compare", "out", "better") == 2
    assert "holds several drafters (1, new); write out:LABEL" in capfd.readouterr().err
    assert call("compare", "nowhere", "better") == 2
    assert "nowhere: no report there" in capfd.readouterr().err
    assert call("compare", "out:7", "better") == 2
    assert "has no drafter '7', but 1, new" in capfd.readouterr().err

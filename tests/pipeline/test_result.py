"""Stage results: atomic, complete, and stable hashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from drafters.errors import UserError
from pipeline.result import hash_config, hash_path, stage_run, write_json


def read(output: Path) -> dict:
    return json.loads((output / "result.json").read_text())


def test_success_writes_inputs_outputs_metrics_and_costs(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    output = tmp_path / "out"
    with stage_run("train", output, {"seed": 1}) as stage:
        stage.add_input(tmp_path / "prompts.jsonl")
        stage.add_output(output / "model")
        stage.metrics["tau"] = {"math": np.float64(1.5), "positions": [np.float32(0.5), 0.25]}
        stage.metrics["steps"] = np.int64(7)
        for _ in range(2):
            with stage.section("replay"):
                sum(range(1000))
        (output / "model").mkdir()
        (output / "model" / "weights").write_bytes(b"w")
    result = read(output)
    assert result["stage"] == "train"
    assert result["config_hash"] == hash_config({"seed": 1})
    assert result["metrics"] == {"tau": {"math": 1.5, "positions": [0.5, 0.25]}, "steps": 7}
    assert result["inputs"] == {
        (tmp_path / "prompts.jsonl").as_posix(): hash_path(tmp_path / "prompts.jsonl")
    }
    assert result["outputs"] == {"model": hash_path(output / "model")}
    assert result["wall_seconds"] >= result["timings"]["replay"]["wall_seconds"] > 0
    assert result["peak_rss_mib"] > 1
    assert result["versions"]["python"] and result["versions"]["torch"]
    assert stage.result is not None and stage.result.config_hash == result["config_hash"]


def test_failure_leaves_the_earlier_result_as_it_was(tmp_path: Path) -> None:
    with stage_run("train", tmp_path, {}) as stage:
        stage.metrics["tau"] = 1.5
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(RuntimeError), stage_run("train", tmp_path, {}) as stage:
        stage.metrics["tau"] = 9.0
        raise RuntimeError("interrupted")
    assert (tmp_path / "result.json").read_bytes() == before


def test_first_failure_writes_nothing(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), stage_run("train", output, {}):
        raise KeyboardInterrupt
    with pytest.raises(UserError, match="missing"), stage_run("train", output, {}) as stage:
        stage.add_output(output / "missing")
    assert list(output.iterdir()) == []


def test_failed_write_keeps_the_old_file_and_no_remains(tmp_path: Path) -> None:
    write_json(tmp_path / "state.json", {"round": 1})
    with pytest.raises(ValueError):
        write_json(tmp_path / "state.json", {"round": float("nan")})
    assert json.loads((tmp_path / "state.json").read_text()) == {"round": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_metrics_that_are_not_finite_become_null_and_are_named(tmp_path: Path) -> None:
    with stage_run("train", tmp_path, {}) as stage:
        stage.metrics.update({"loss": float("nan"), "by": {"math": [1.0, np.float64("inf")]}})
    result = read(tmp_path)
    assert result["metrics"] == {"loss": None, "by": {"math": [1.0, None]}}
    assert result["non_finite_metrics"] == ["loss", "by.math.1"]


def test_metric_of_an_unknown_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'by\.math'"), stage_run("train", tmp_path, {}) as stage:
        stage.metrics["by"] = {"math": object()}


def test_output_directory_must_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="out"), stage_run("train", tmp_path / "out", {}):
        pass


def test_config_hash_ignores_key_order_and_sees_values() -> None:
    one = {"a": 1, "b": {"x": 1.5, "y": [1, 2]}}
    assert hash_config(one) == hash_config({"b": {"y": [1, 2], "x": 1.5}, "a": 1})
    assert hash_config(one) != hash_config({"a": 1, "b": {"x": 1.5, "y": [2, 1]}})
    assert hash_config({"a": 1}) == "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"


def test_directory_hash_sees_names_and_bytes_but_not_place(tmp_path: Path) -> None:
    def make(name: str, files: dict[str, bytes]) -> Path:
        for relative, content in files.items():
            path = tmp_path / name / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return tmp_path / name

    base = hash_path(make("a", {"x": b"1", "sub/y": b"2"}))
    assert hash_path(make("b", {"sub/y": b"2", "x": b"1"})) == base
    assert hash_path(make("c", {"x": b"1", "sub/y": b"3"})) != base
    assert hash_path(make("d", {"x": b"1", "sub/z": b"2"})) != base
    assert hash_path(make("e", {"x": b"1", "sub/y": b"2", "extra": b""})) != base
    with pytest.raises(UserError, match="nowhere"):
        hash_path(tmp_path / "nowhere")


def test_light_modules_do_not_load_torch_or_mlflow() -> None:
    script = (
        "import sys, pipeline.result, pipeline.tracking, pipeline.registry, pipeline.gate\n"
        "print(sorted({'torch', 'mlflow', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"

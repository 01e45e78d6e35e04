"""`draftsmith run` of a D3D preset, tiny: what demo-d3d promises, but its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from drafters.checkpoint import load_drafter
from drafters.replay import replay, total_acceptance_length
from pipeline.cli import main
from pipeline.config import load_config
from pipeline.models import load_drafter_for, load_target
from tests.pipeline.tiny_run import write_config


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return int(stop.value.code or 0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path) -> Path:
    directory = tmp_path_factory.mktemp("d3d")
    path = write_config(directory)
    settings = yaml.safe_load(path.read_text())
    settings |= {
        "drafter": {"family": "d3d", "block_size": 4, "init": "target"},
        "lookahead": {"mode": "auto", "fan_out": 2, "measure_documents": 2, "slowdowns": [4]},
    }
    settings["prune"] = {"layers": 1, "retention": 0, "steps": 4, "validate_every": 2, "checkpoint_every": 4}
    path.write_text(yaml.safe_dump(settings))
    config = load_config(path)
    config.output.mkdir()
    (config.output / "mlflow.db").write_bytes(migrated_database.read_bytes())
    assert call("run", str(path)) == 0
    return directory


def metrics(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "out" / "result.json").read_text())["metrics"]
    return found


def test_the_result_holds_what_was_measured(finished: Path) -> None:
    result = metrics(finished)
    config = load_config(finished / "tiny.yaml")
    bundle = load_target(config)
    documents = [json.loads(line) for line in (finished / "out" / "heldout.jsonl").open()]
    assert len(documents) > 1
    assert result["layers"] == 1 and result["lossless"] is True
    assert set(result["lossless_prompts"]) >= {"fixed", "lookahead", "hot_swap"}
    assert set(result["tau"]) == {"trained", "pruned_unrecovered", "pruned"}
    assert result["retention"] == pytest.approx(result["tau"]["pruned"] / result["tau"]["trained"])
    assert 0 <= result["hit_rate"] <= 1
    assert {"tokens_per_s_ar", "tokens_per_s_fixed", "tokens_per_s_lookahead"} <= set(result["speed"])
    from pipeline.corpus import load_documents

    heldout = load_documents(config, "heldout", bundle.target.identity)
    drafter = load_drafter_for(finished / "out" / "drafter", bundle, dtype=bundle.target.dtype).drafter
    tau = total_acceptance_length(replay(drafter, bundle.target, heldout))
    assert result["tau"]["pruned"] == pytest.approx(tau)


def test_the_look_ahead_says_what_it_chose_and_what_it_brought(finished: Path) -> None:
    lookahead = metrics(finished)["lookahead"]
    (slowed,) = lookahead["slowed"]
    assert slowed["slowdown"] == 4
    for report in (lookahead["as_is"], slowed):
        assert 1 <= report["coverage"] <= 4 and 1 <= report["fan_out"] <= 2
        assert report["round_gain"] > 0 and report["round_gain_foretold"] > 0
        assert report["sync"]["hit_rate"] == 0 <= report["ahead"]["hit_rate"] <= 1
        seconds = [estimate["round_s"] for estimate in report["estimates"][:-1]]
        assert seconds == sorted(seconds)
        assert report["estimates"][-1]["budget"] is None
    # a slowed target takes at least so many drafting passes
    assert slowed["sync"]["verify_ms"] >= 3.9 * lookahead["as_is"]["sync"]["draft_ms"]


def test_the_pruned_drafter_is_a_plain_checkpoint(finished: Path) -> None:
    directory = finished / "out" / "drafter"
    assert len(AutoModelForCausalLM.from_pretrained(directory).model.layers) == 1
    assert load_drafter(directory).manifest["family"] == "d3d"


def test_a_finished_run_is_not_run_again(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("run", str(finished / "tiny.yaml")) == 0
    assert capfd.readouterr().out.count("finished earlier, kept") == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["lookahead.coverage=9"], "lookahead.coverage 9 is outside 1..4"),
        (["lookahead.coverage=0"], "lookahead.coverage"),
        (["lookahead.fan_out=0"], "lookahead.fan_out"),
        (["lookahead.fan_out=100000"], "lookahead.fan_out: 100000 is outside 1.."),
        (["drafter.family=dflash"], "lookahead.mode 'auto' needs drafter.family d3d"),
        (["prune.layers=0"], "prune.layers"),
        (["prune.layers=99"], "prune.layers: 99 is not below"),
        (["drafter.block_size=100000"], "drafter.block_size"),
    ],
)
def test_bad_settings_end_with_one_message_and_code_two(
    finished: Path, tmp_path: Path, changes: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    path = copy / "tiny.yaml"
    path.write_text(path.read_text().replace(str(finished), str(copy)))
    shutil.rmtree(copy / "out" / "evaluate")
    command = "prune" if "prune" in changes[0] else "train" if "block_size" in changes[0] else "evaluate"
    words = [word for change in changes for word in ("--set", change)]
    start = [] if command == "train" else ["--drafter", str(copy / "out" / "train" / "drafter")]
    assert call(command, str(path), *start, *words) == 2
    error = capfd.readouterr().err
    assert said in error and "Traceback" not in error

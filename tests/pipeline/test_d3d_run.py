"""`draftsmith run` of a D3D preset, tiny: what demo-d3d promises, but its figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM

from drafters.checkpoint import drafter_digest, load_drafter
from drafters.replay import replay, total_acceptance_length
from pipeline.cli import main
from pipeline.config import load_config
from pipeline.corpus import load_documents
from pipeline.models import load_drafter_for, load_target
from pipeline.result import config_of, hash_config, mark_config
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


def copied(finished: Path, tmp_path: Path) -> Path:
    """The run, to be changed."""
    copy = tmp_path / "run"
    shutil.copytree(finished, copy)
    path = copy / "tiny.yaml"
    path.write_text(path.read_text().replace(str(finished), str(copy)))
    # the paths in it are part of a configuration
    ours = hash_config(load_config(path).dump())
    for file in copy.glob("out/**/result.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"config_hash": ours}))
    for directory in (copy / "out").iterdir():
        if config_of(directory) is not None:
            mark_config(directory, ours)
    return copy


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
    evaluated = json.loads((finished / "out" / "evaluate" / "result.json").read_text())["metrics"]
    assert evaluated["prepared_rounds"] > 0
    assert set(result["tau"]) == {"trained", "pruned_unrecovered", "pruned"}
    assert result["retention"] == pytest.approx(result["tau"]["pruned"] / result["tau"]["trained"])
    assert 0 <= result["hit_rate"] <= 1
    assert {"tokens_per_s_ar", "tokens_per_s_fixed", "tokens_per_s_lookahead"} <= set(result["speed"])
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
        assert report["gain"] == pytest.approx(
            report["ahead"]["tokens_per_s"] / report["sync"]["tokens_per_s"]
        )
        assert report["pays"] == (report["estimates"][0]["budget"] is not None)
        assert report["sync"]["hit_rate"] == 0 <= report["ahead"]["hit_rate"] <= 1
        seconds = [estimate["token_s"] for estimate in report["estimates"][:-1]]
        assert seconds == sorted(seconds)
        assert report["estimates"][-1]["budget"] is None
    # a slowed target takes at least so many drafting passes
    assert slowed["sync"]["verify_ms"] >= 3.9 * lookahead["as_is"]["sync"]["draft_ms"]


def test_the_pruned_drafter_is_a_plain_checkpoint(finished: Path) -> None:
    directory = finished / "out" / "drafter"
    assert len(AutoModelForCausalLM.from_pretrained(directory).model.layers) == 1
    assert load_drafter(directory).manifest["family"] == "d3d"


def test_one_position_needs_no_fan_out(finished: Path, tmp_path: Path) -> None:
    copy = copied(finished, tmp_path)
    words = [
        "--set",
        "lookahead.mode=fixed",
        "--set",
        "lookahead.coverage=1",
        "--set",
        "lookahead.slowdowns=[]",
    ]
    start = ["--drafter", str(copy / "out" / "drafter"), "--set", "evaluate.lossless_prompts=0"]
    assert call("evaluate", str(copy / "tiny.yaml"), *start, *words) == 0
    found = json.loads((copy / "out" / "evaluate" / "result.json").read_text())["metrics"]
    assert (found["lookahead"]["as_is"]["coverage"], found["lookahead"]["as_is"]["fan_out"]) == (1, 1)


def test_a_run_that_was_cut_off_while_pruning_goes_on_there(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = copied(finished, tmp_path)
    out = copy / "out"
    pruned = drafter_digest(out / "prune" / "drafter")
    for name in ("prune/result.json", "result.json", "deploy/result.json", "evaluate/result.json"):
        (out / name).unlink()
    # as a kill leaves it: the last depth not yet noted, its removal decided
    state = json.loads((out / "prune" / "state.json").read_text())
    last = state["steps"].pop()
    (out / "prune" / "state.json").write_text(json.dumps(state | {"pending": last["removal"]}))
    kept = out / "prune" / f"layers-{last['layers'] + 1:03d}"
    before = kept.stat().st_mtime_ns if kept.exists() else None
    assert call("run", str(copy / "tiny.yaml")) == 0
    assert drafter_digest(out / "prune" / "drafter") == pruned
    assert before is None or kept.stat().st_mtime_ns == before
    assert "layers, acceptance length" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.heldout=[]", "data.heldout"),
        ("data.val_fraction=0", "data.val_fraction"),
        ("prune.layers=99", "prune.layers: 99 is not below"),
        ("lookahead.fan_out=100000", "lookahead.fan_out"),
    ],
)
def test_a_run_refuses_at_its_start_what_it_would_need_at_its_end(
    finished: Path, tmp_path: Path, change: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", change, "--output", str(tmp_path / "new")]
    assert call("run", str(finished / "tiny.yaml"), *words) == 2
    error = capfd.readouterr().err
    assert said in error and "Traceback" not in error
    assert not (tmp_path / "new" / "responses").exists()


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
        (["policy.name=throughput"], "lookahead.mode 'auto' does not go with policy.name 'throughput'"),
        (["prune.layers=0"], "prune.layers"),
        (["prune.layers=99"], "prune.layers: 99 is not below"),
        (["drafter.block_size=100000"], "drafter.block_size"),
        (["evaluate.max_new_tokens=2"], "evaluate.max_new_tokens: no round followed another"),
        (["lookahead.slowdowns=[0]"], "lookahead.slowdowns"),
    ],
)
def test_bad_settings_end_with_one_message_and_code_two(
    finished: Path, tmp_path: Path, changes: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = copied(finished, tmp_path)
    path = copy / "tiny.yaml"
    shutil.rmtree(copy / "out" / "evaluate")
    command = "prune" if "prune" in changes[0] else "train" if "block_size" in changes[0] else "evaluate"
    words = [word for change in changes for word in ("--set", change)]
    start = [] if command == "train" else ["--drafter", str(copy / "out" / "train" / "drafter")]
    assert call(command, str(path), *start, *words) == 2
    error = capfd.readouterr().err
    assert said in error and "Traceback" not in error

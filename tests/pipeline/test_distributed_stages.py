"""The training commands in two processes: one result, one run in MLflow, refusals in one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from pipeline.cli import main
from pipeline.config import load_config
from pipeline.stages.context import tracking_for
from pipeline.stages.regenerate import regenerate_responses
from pipeline.tracking import open_client
from tests.lightning_modules.processes import PRELOAD
from tests.pipeline.tiny_run import write_config

TWO = ["--set", "trainer.devices=2", "--set", "trainer.strategy=fsdp2"]
D3D = ["--set", "drafter.family=d3d", "--set", "drafter.init=target"]
PRUNE = ["--set", "prune.steps=2", "--set", "prune.layers=5", "--set", "prune.retention=0"]


@pytest.fixture
def warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need not import everything anew."""
    get_context("forkserver").set_forkserver_preload([*PRELOAD, "mlflow", "pipeline.stages.prune"])
    monkeypatch.setattr("pipeline.launch.START_METHOD", "forkserver")


@pytest.fixture(scope="module")
def responses(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path) -> Path:
    """A directory with a configuration and the target's responses."""
    directory = tmp_path_factory.mktemp("responses")
    config = load_config(write_config(directory))
    config.output.mkdir()
    shutil.copyfile(migrated_database, config.output / "mlflow.db")
    regenerate_responses(config)
    return directory


@pytest.fixture
def run(responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "run"
    shutil.copytree(responses, directory)
    settings = yaml.safe_load((directory / "tiny.yaml").read_text().replace(str(responses), str(directory)))
    (directory / "tiny.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(directory)
    return directory


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([words[0], "tiny.yaml", *words[1:]])
    return int(stop.value.code or 0)


def metrics(run: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "out" / stage / "result.json").read_text())["metrics"]
    return found


@pytest.mark.usefixtures("warm_processes")
def test_train_distill_and_heads(run: Path) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert call("train", *TWO) == 0
    assert signal.getsignal(signal.SIGINT) is handler and "RANK" not in os.environ
    trained = metrics(run, "train")
    assert trained["steps"] == 12 and [step for step, _ in trained["history"]] == [6, 12]
    assert call("distill", *TWO) == 0
    assert call("fit-length-head", *TWO) == 0
    assert metrics(run, "length_head")["steps"] == 2
    config = load_config(run / "tiny.yaml")
    client, experiment = open_client(tracking_for(config).tracking_uri), tracking_for(config).experiment_id
    runs = {r.info.run_name: r for r in client.search_runs([experiment])}
    assert runs.keys() == {f"tiny-{stage}" for stage in ("regenerate", "train", "distill", "length_head")}
    assert len(client.search_runs([experiment])) == 4
    assert {r.info.status for r in runs.values()} == {"FINISHED"}
    logged = client.get_metric_history(runs["tiny-train"].info.run_id, "val/acceptance_length")
    assert [m.value for m in logged] == pytest.approx([tau for _, tau in trained["history"]])
    loaded = load_drafter(run / "out" / "length_head" / "drafter")
    assert loaded.length_head is not None and loaded.acceptance_head is not None


@pytest.mark.usefixtures("warm_processes")
def test_pruning_decides_in_one_process_and_measures_in_all(run: Path) -> None:
    assert call("train", *TWO, *D3D, "--set", "train.steps=2", "--set", "train.validate_every=2") == 0
    drafter = run / "out" / "train" / "drafter"
    # a run by one process from the same drafter finds the same layers dispensable
    found = []
    for processes in (TWO, []):
        shutil.rmtree(run / "out" / "prune", ignore_errors=True)
        assert call("prune", *processes, *D3D, *PRUNE, "--drafter", str(drafter)) == 0
        pruned = metrics(run, "prune")
        assert load_drafter(run / "out" / "prune" / "drafter").drafter.config.num_hidden_layers == 5
        found.append((pruned["tau_whole"], pruned["steps"][0]["removal"]))
    assert found[0] == found[1]


def test_what_is_wrong_is_said_once(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("train", *TWO, "--resume") == 2
    said = capfd.readouterr()
    assert said.err.count("nothing to resume") == 1 and "Traceback" not in said.err
    assert said.out.count(" train ") == 1, "every process talks"
    assert call("train", *TWO, "--set", "trainer.num_nodes=2") == 2
    assert "torchrun" in capfd.readouterr().err
    assert call("train", *TWO, "--set", "distill.loss.clip=position_normalised") == 2
    assert "distill.loss.clip" in capfd.readouterr().err


def test_processes_that_nobody_asked_for_are_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    assert call("train", *TWO) == 2
    said = capsys.readouterr().err
    assert "torchrun made 4 processes" in said and "trainer.devices" in said
    config = load_config(run / "tiny.yaml")
    with pytest.raises(UserError, match="runs in one process"):
        regenerate_responses(config)

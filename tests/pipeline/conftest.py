"""Tracking stores, copied from one whose tables were made once, and a whole run that tests share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.tracking import Tracking, open_client
from tests.pipeline.tiny_run import write_config


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with MLflow's tables and no experiment of ours."""
    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    open_client(f"sqlite:///{database}")
    return database


@pytest.fixture
def tracking(tmp_path: Path, migrated_database: Path) -> Tracking:
    """An experiment on a store of its own below `tmp_path`."""
    database = tmp_path / "store" / "mlflow.db"
    database.parent.mkdir()
    shutil.copyfile(migrated_database, database)
    return Tracking(f"sqlite:///{database}", "test")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory, migrated_database: Path) -> Path:
    """The directory of a finished whole run: `tiny.yaml`, its prompts, and `out`. Copy it before changing anything."""
    from pipeline.config import load_config
    from pipeline.stages.whole import run_whole

    directory = tmp_path_factory.mktemp("whole")
    config = load_config(write_config(directory))
    config.output.mkdir()
    shutil.copyfile(migrated_database, config.output / "mlflow.db")
    run_whole(config)
    return directory


@pytest.fixture
def run(whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished run, with its configuration pointing at the copy, as working directory."""
    directory = tmp_path / "run"
    shutil.copytree(whole_run, directory)
    settings = yaml.safe_load((directory / "tiny.yaml").read_text().replace(str(whole_run), str(directory)))
    (directory / "tiny.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(directory)
    return directory

"""A fresh tracking store per test, copied from one whose tables were made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.tracking import Tracking, open_client


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

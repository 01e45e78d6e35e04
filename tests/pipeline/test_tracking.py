"""Tracking on SQLite: set-up, runs, what is logged, and servers that do not answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from mlflow import MlflowClient

import pipeline.tracking
from drafters.errors import UserError
from pipeline.result import stage_run
from pipeline.tracking import Tracking, flatten_metrics, legal_key, open_client, sqlite_file


@pytest.fixture
def client(tracking: Tracking) -> MlflowClient:
    return open_client(tracking.tracking_uri)


@pytest.fixture
def clean_mlflow() -> Iterator[None]:
    """Undo the process-wide tracking URI that Lightning's logger sets."""
    import mlflow

    yield
    mlflow.set_tracking_uri(None)


def test_processes_may_initialise_a_fresh_store_at_once(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/new folder/mlflow.db"
    script = f"from pipeline.tracking import Tracking; print(Tracking({uri!r}, 'test').experiment_id)"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(2)
    ]
    outcomes = [worker.communicate() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outcomes
    again = Tracking(uri, "test")
    again.initialise()
    assert {out.decode().strip() for out, _ in outcomes} == {again.experiment_id}
    experiment = open_client(uri).get_experiment(again.experiment_id)
    assert Path(experiment.artifact_location) == tmp_path / "new folder" / "artifacts"
    with again.run("first") as run:
        run.log_config({"a": 1})
    assert list((tmp_path / "new folder" / "artifacts").rglob("config.yaml"))


def test_run_logs_params_metrics_config_and_artifacts(
    tracking: Tracking, client: MlflowClient, tmp_path: Path
) -> None:
    config = {
        "train": {"steps": 800, "domains": ["math", "code"]},
        "name": "γ",
        "stores": ["sqlite:///a.db", "pg://me:secret@db/x"],
    }
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "tau.txt").write_text("1.5")
    with tracking.run("train", {"stage": "train"}) as run:
        run.log_params({f"p{i}": i for i in range(150)} | {"long": "x" * 9000})
        run.log_metrics({"tau": {"math": 1.5, "by position": [0.5, 0.25]}, "loss": float("nan")})
        run.log_metrics({"tau": {"math": 1.75}}, step=3)
        run.log_config(config)
        run.log_artifact(tmp_path / "plots")
    logged = client.get_run(run.run_id)
    assert logged.info.status == "FINISHED"
    assert logged.data.params["p149"] == "149" and len(logged.data.params["long"]) == 500
    assert logged.data.metrics == {"tau.math": 1.75, "tau.by position.0": 0.5, "tau.by position.1": 0.25}
    assert logged.data.tags["non_finite.loss"] == "nan"
    assert [m.step for m in client.get_metric_history(run.run_id, "tau.math")] == [0, 3]
    copy = client.download_artifacts(run.run_id, "config.yaml", str(tmp_path))
    assert yaml.safe_load(Path(copy).read_text()) == config | {
        "stores": ["sqlite:///a.db", "pg://me:***@db/x"]
    }
    assert [f.path for f in client.list_artifacts(run.run_id, "plots")] == ["plots/tau.txt"]


def test_stage_result_is_logged_as_it_was_written(
    tracking: Tracking, client: MlflowClient, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with tracking.run("evaluate") as run:
        with stage_run("evaluate", output, {"seed": 1}) as stage:
            stage.metrics.update({"tau": {"math": 1.5}, "verdict": "refused", "lossless": True})
        run.log_result(output / "result.json")
    data = client.get_run(run.run_id).data
    assert data.metrics["tau.math"] == 1.5 and data.metrics["lossless"] == 1.0
    assert data.metrics["cost.wall_seconds"] > 0
    assert stage.result is not None and data.tags["config_hash"] == stage.result.config_hash
    assert [f.path for f in client.list_artifacts(run.run_id)] == ["result.json"]


@pytest.mark.parametrize(("error", "status"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_run_ends_with_the_status_of_its_block(
    tracking: Tracking, client: MlflowClient, error: type[BaseException], status: str
) -> None:
    with pytest.raises(error), tracking.run("train") as run:
        raise error
    assert client.get_run(run.run_id).info.status == status


def test_runs_leave_no_process_wide_state(tracking: Tracking) -> None:
    import mlflow

    def state() -> tuple[object, ...]:
        return mlflow.active_run(), mlflow.tracking.is_tracking_uri_set(), os.getenv("MLFLOW_TRACKING_URI")

    before = state()
    with tracking.run("outer") as outer, tracking.run("inner") as inner:
        assert state() == before
        assert outer.run_id != inner.run_id
    assert state() == before


def test_lightning_logger_writes_into_the_given_run(
    tracking: Tracking, client: MlflowClient, clean_mlflow: None
) -> None:
    with tracking.run("train") as run:
        logger = tracking.lightning_logger(run.run_id)
        logger.log_metrics({"val/tau": 1.5}, step=2)
        logger.finalize("success")
        run.log_metrics({"after": 1.0})
    data = client.get_run(run.run_id).data
    assert data.metrics == {"val/tau": 1.5, "after": 1.0}
    assert len(client.search_runs([tracking.experiment_id])) == 1


def test_unreachable_server_is_named_before_mlflow_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(uri: str) -> MlflowClient:
        raise AssertionError("a dead server must not reach MLflow's retries")

    monkeypatch.setattr(pipeline.tracking, "open_client", never)
    with pytest.raises(UserError) as caught:
        Tracking("http://me:secret@127.0.0.1:9", "test").initialise()
    assert "tracking.uri" in str(caught.value) and "127.0.0.1:9" in str(caught.value)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["", "mlruns", "file:./mlruns", "sqlite://", "sqlite:///:memory:", "foo://x"])
def test_address_without_a_database_is_refused(uri: str) -> None:
    with pytest.raises(UserError, match=r"tracking\.uri"):
        Tracking(uri, "test").initialise()


def test_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("not a database, but longer than an SQLite header" * 10)
    with pytest.raises(UserError, match=r"tracking\.uri.*mlflow\.db.*not a database"):
        Tracking(f"sqlite:///{tmp_path}/mlflow.db", "test").initialise()
    assert (tmp_path / "mlflow.db").read_text().startswith("not a database")


def test_deleted_experiment_is_explained(tracking: Tracking, client: MlflowClient) -> None:
    client.delete_experiment(tracking.experiment_id)
    with pytest.raises(UserError, match=r"tracking\.experiment.*deleted"):
        Tracking(tracking.tracking_uri, "test").initialise()


def test_sqlite_file_reads_relative_and_absolute_addresses() -> None:
    assert sqlite_file("sqlite:///outputs/mlflow.db") == Path("outputs/mlflow.db")
    assert sqlite_file("sqlite:////data/mlflow.db?timeout=5") == Path("/data/mlflow.db")
    assert sqlite_file("http://host:5000") is None


def test_flattening_and_legal_names() -> None:
    finite, non_finite = flatten_metrics(
        {"a": {"b": True, "text": "x"}, "l": [1, None, float("inf")], "accept@4": 2}
    )
    assert finite == {"a.b": 1.0, "l.0": 1.0, "accept_4": 2.0}
    assert non_finite == {"l.2": float("inf")}
    assert legal_key("../a//b:ü") == "a/b__" and legal_key("") == "_"

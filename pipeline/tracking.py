"""MLflow tracking with explicit clients and run ids, never MLflow's process-wide active run or URI.

The default store is an SQLite file whose artifacts lie in `artifacts/` beside it. Its tables are
made by `Tracking.initialise`, which must run once before workers start: processes that meet on a
fresh file fail.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from drafters.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow import MlflowClient

PROBE_SECONDS = 5.0
_SQLITE = "sqlite:///"
_PARAM_LENGTH = 500  # a table cell; the whole configuration is the artifact config.yaml
_PARAMS_PER_BATCH = 100  # limits of MLflow's log_batch
_METRICS_PER_BATCH = 1000


class TrackedRun:
    """One MLflow run, addressed by its id."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self.run_id = run_id

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Log flat parameters; MLflow forbids changing one later. Values are cut at 500 characters."""
        from mlflow.entities import Param

        entries = [Param(legal_key(k), str(v)[:_PARAM_LENGTH]) for k, v in params.items()]
        for start in range(0, len(entries), _PARAMS_PER_BATCH):
            batch = entries[start : start + _PARAMS_PER_BATCH]
            self._client.log_batch(self.run_id, params=batch)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log nested metrics as `a.b`.

        Values that are not finite would break MLflow's charts: they become the tag
        `non_finite.<key>` instead.
        """
        from mlflow.entities import Metric

        finite, non_finite = flatten_metrics(metrics)
        now = int(time.time() * 1000)
        entries = [Metric(key, value, now, step or 0) for key, value in finite.items()]
        for start in range(0, len(entries), _METRICS_PER_BATCH):
            batch = entries[start : start + _METRICS_PER_BATCH]
            self._client.log_batch(self.run_id, metrics=batch)
        for key, value in non_finite.items():
            text = str(value) if step is None else f"{value} at step {step}"
            self._client.set_tag(self.run_id, f"non_finite.{key}"[:250], text)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Log the whole configuration (JSON types) as the artifact `config.yaml`, addresses without their passwords."""
        import yaml

        text = yaml.safe_dump(without_passwords(dict(config)), sort_keys=False, allow_unicode=True)
        self._client.log_text(self.run_id, text, "config.yaml")

    def log_artifact(self, path: Path) -> None:
        """Copy a file, or a directory under its name, into the run's artifacts."""
        if path.is_dir():
            self._client.log_artifacts(self.run_id, str(path), path.name)
        else:
            self._client.log_artifact(self.run_id, str(path))

    def log_result(self, result_file: Path) -> None:
        """Log a stage's `result.json`: its metrics, costs, identity as tags, and the file itself."""
        result = json.loads(result_file.read_text(encoding="utf-8"))
        self.log_metrics(result["metrics"])
        costs = ("wall_seconds", "cpu_seconds", "peak_rss_mib", "timings")
        self.log_metrics({"cost": {name: result[name] for name in costs}})
        for name in ("stage", "config_hash", "git_commit"):
            if result[name] is not None:
                self._client.set_tag(self.run_id, name, result[name])
        self.log_artifact(result_file)


class Tracking:
    """An experiment on a tracking store, such as `sqlite:///<output>/mlflow.db` or `http://host:5000`."""

    def __init__(self, tracking_uri: str, experiment: str) -> None:
        self.tracking_uri = tracking_uri
        self.experiment = experiment
        self._experiment_id: str | None = None

    @property
    def experiment_id(self) -> str:
        """Id of the experiment; initialises the store on first use."""
        if self._experiment_id is None:
            self.initialise()
        assert self._experiment_id is not None
        return self._experiment_id

    def initialise(self) -> None:
        """Create or migrate the store, and create the experiment. Safe to repeat, and to race.

        Raises:
            UserError: the store cannot be reached or opened, naming the URI and the key
                `tracking.uri`.
        """
        database = sqlite_file(self.tracking_uri)
        with tracking_errors(self.tracking_uri):
            if database is None:
                probe(self.tracking_uri)
                self._experiment_id = self._find_or_create(None)
                return
            database.parent.mkdir(parents=True, exist_ok=True)
            with _locked(database.with_name(f"{database.name}.lock")):
                self._experiment_id = self._find_or_create(database.parent / "artifacts")

    @contextmanager
    def run(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator[TrackedRun]:
        """A run that ends as FINISHED, FAILED after an exception, or KILLED after an interrupt."""
        client = open_client(self.tracking_uri)
        created = client.create_run(self.experiment_id, run_name=name, tags=dict(tags or {}))
        run = TrackedRun(client, created.info.run_id)
        try:
            yield run
        except BaseException as error:
            status = "FAILED" if isinstance(error, Exception) else "KILLED"
            with suppress(Exception):  # the error that ended the run matters more than its status
                client.set_terminated(run.run_id, status)
            raise
        client.set_terminated(run.run_id, "FINISHED")

    def lightning_logger(self, run_id: str) -> MLFlowLogger:
        """A Lightning logger that writes into an existing run and uploads no checkpoints.

        Lightning itself sets MLflow's process-wide URI on first use, to this same store.
        """
        from lightning.pytorch.loggers import MLFlowLogger

        return MLFlowLogger(
            experiment_name=self.experiment,
            tracking_uri=self.tracking_uri,
            run_id=run_id,
            log_model=False,
        )

    def _find_or_create(self, artifacts: Path | None) -> str:
        from mlflow.exceptions import MlflowException

        client = open_client(self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        if found is None:
            location = str(artifacts.resolve()) if artifacts else None
            try:
                return client.create_experiment(self.experiment, artifact_location=location)
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = client.get_experiment_by_name(self.experiment)
        if found is None or found.lifecycle_stage == "deleted":
            raise UserError(
                f"tracking.experiment: {self.experiment!r} was deleted on {redacted(self.tracking_uri)}; "
                "restore it with `mlflow experiments restore`, or choose another name"
            )
        return found.experiment_id


def open_client(tracking_uri: str) -> MlflowClient:
    """A client for tracking and registry on one explicit URI."""
    _quiet_mlflow()
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri, registry_uri=tracking_uri)


def sqlite_file(tracking_uri: str) -> Path | None:
    """The file behind an SQLite URI, None for other stores.

    Raises:
        UserError: the URI is empty, names a plain folder (which MLflow 3 refuses), or a database in
            memory (which other processes cannot see).
    """
    example = "use sqlite:///<path>/mlflow.db or the http(s) address of an MLflow server"
    scheme = urlsplit(tracking_uri).scheme
    if scheme in {"", "file"}:
        raise UserError(f"tracking.uri: {tracking_uri!r} names no database; {example}")
    if not scheme.startswith("sqlite"):
        return None
    path = tracking_uri.removeprefix(_SQLITE).partition("?")[0]
    if not tracking_uri.startswith(_SQLITE) or path in {"", ":memory:"}:
        raise UserError(f"tracking.uri: {tracking_uri!r} names no database file; {example}")
    return Path(path)


def flatten_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Nested metrics as `a.b` → value, list items as `a.0`: (finite ones, those that are not).

    Booleans become 0 or 1; text and None are left out.
    """
    finite: dict[str, float] = {}
    non_finite: dict[str, float] = {}

    def visit(key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, item in value.items():
                visit(f"{key}.{name}" if key else str(name), item)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(f"{key}.{index}", item)
        elif value is not None and not isinstance(value, str):
            number = float(value)
            (finite if math.isfinite(number) else non_finite)[legal_key(key)] = number

    visit("", metrics)
    return finite, non_finite


def legal_key(key: str) -> str:
    """A name that MLflow takes for metrics, parameters and tags: other characters become `_`."""
    cleaned = re.sub(r"[^A-Za-z0-9_.\- /]", "_", key)
    parts = [part for part in cleaned.split("/") if part not in {"", ".", ".."}]
    return "/".join(parts)[:250] or "_"


def _quiet_mlflow() -> None:
    """No usage telemetry, progress bars or chatter of MLflow unless asked for, also if it was imported before."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    logging.getLogger("mlflow").setLevel(os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING"))


@contextmanager
def tracking_errors(tracking_uri: str) -> Iterator[None]:
    """Turn what the stores raise (their drivers' own errors among it) into one message."""
    _quiet_mlflow()
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, ImportError, OSError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"tracking.uri: cannot use {redacted(tracking_uri)} ({cause}); start the server or fix the address, "
            "or use sqlite:///<path>/mlflow.db"
        ) from error


def probe(tracking_uri: str) -> None:
    """Ask a server for `/health` first: MLflow's client retries a dead one for minutes.

    Raises:
        OSError: nothing answers within `PROBE_SECONDS`, or the server reports a failure.
    """
    if urlsplit(tracking_uri).scheme not in {"http", "https"}:
        return
    import requests
    from mlflow.environment_variables import (
        MLFLOW_TRACKING_INSECURE_TLS,
        MLFLOW_TRACKING_SERVER_CERT_PATH,
    )

    verify = MLFLOW_TRACKING_SERVER_CERT_PATH.get() or not MLFLOW_TRACKING_INSECURE_TLS.get()
    try:
        url = f"{tracking_uri.rstrip('/')}/health"
        status = requests.get(url, timeout=PROBE_SECONDS, verify=verify).status_code
    except requests.RequestException as error:
        raise OSError(f"no answer: {type(error).__name__}") from error
    # Anything below 500 is an answer; refusing the client is the business of MLflow's own call.
    if status >= 500:
        raise OSError(f"the server answers with status {status}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; it ends with the process at the latest."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def redacted(uri: str) -> str:
    """The URI without its password."""
    try:
        parts = urlsplit(uri)
        password = parts.password
    except ValueError:
        return uri
    if not password:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.replace(f":{password}@", ":***@")))


def without_passwords(value: Any) -> Any:
    """Plain values with the password of every address in them left out."""
    if isinstance(value, Mapping):
        return {key: without_passwords(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_passwords(item) for item in value]
    return redacted(value) if isinstance(value, str) and "://" in value else value

"""A real MLflow server on the loopback, on SQLite or PostgreSQL."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

UP_WITHIN_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def mlflow_server(directory: Path, backend: str | None = None) -> Iterator[str]:
    """Its address; artifacts go through it into a directory that clients do not know."""
    port = free_port()
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", backend or f"sqlite:///{directory / 'server.db'}"]
    words += ["--artifacts-destination", str(directory / "server-artifacts")]
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words],
            cwd=directory,
            env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONWARNINGS": "ignore"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(address, process, directory / "server.log")
            yield address
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def why_no_postgres() -> str | None:
    """The reason to skip what needs PostgreSQL."""
    if shutil.which("initdb") is None or shutil.which("postgres") is None:
        return "no PostgreSQL server (initdb, postgres) on the path"
    if importlib.util.find_spec("psycopg2") is None:
        return "psycopg2, which MLflow's server needs for PostgreSQL, is not installed"
    if os.geteuid() == 0 and _other_user() is None:
        return "PostgreSQL refuses to run as root, and there is no other user"
    return None


@contextmanager
def postgres() -> Iterator[str]:
    """SQLAlchemy's address of an empty database."""
    user = _other_user() if os.geteuid() == 0 else None
    # below /tmp: pytest's own directories are closed to other users, and socket paths must be short
    directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    port = free_port()
    try:
        if user is not None:
            shutil.chown(directory, user)
        data = directory / "data"
        subprocess.run(
            ["initdb", "-D", str(data), "-U", "draftsmith", "--auth=trust", "--no-sync"],
            check=True,
            capture_output=True,
            user=user,
            cwd=directory,
        )
        process = subprocess.Popen(
            ["postgres", "-D", str(data), "-p", str(port), "-k", str(directory), "-h", "127.0.0.1", "-F"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=user,
            cwd=directory,
        )
        try:
            deadline = time.monotonic() + UP_WITHIN_S
            while True:
                assert process.poll() is None, "postgres did not start"
                assert time.monotonic() < deadline
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield f"postgresql+psycopg2://draftsmith@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait(30)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _other_user() -> str | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    return None


def _wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + UP_WITHIN_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if requests.get(f"{address}/health", timeout=2).ok:
                return
        except requests.RequestException:
            time.sleep(0.2)

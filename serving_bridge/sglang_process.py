"""An SGLang server as a child process: started, waited for, stopped with all that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import requests

from serving_bridge.server import ServerLost
from serving_bridge.sglang_launch import Launch


@dataclass
class ServerProcess:
    """A server that this process started."""

    launch: Launch
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.launch.port}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Until it answers.

        Raises:
            ServerLost: with the end of its log, when it ends before or takes longer.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.alive:
                raise ServerLost(
                    f"SGLang ended with code {self.process.returncode}; {self.log}: {self.complaint()}"
                )
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=2).ok:
                    return
            time.sleep(0.5)
        raise ServerLost(f"SGLang is not up after {timeout_s:.0f} s; {self.log}: {self.complaint()}")

    def complaint(self) -> str:
        """The last line of its log that looks like a reason."""
        lines = self.log.read_text(errors="replace").splitlines()
        reasons = [line for line in lines if "Error" in line or "draftsmith:" in line]
        return (reasons or lines or ["(empty)"])[-1].strip()[:400]

    def stop(self, sig: int = signal.SIGTERM, timeout_s: float = 20.0) -> None:
        """End it and its children; harder, if it does not listen."""
        for attempt in (sig, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, attempt)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
                break
        # the schedulers are in the same group and may outlive their parent
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def start_server(launch: Launch, log: Path) -> ServerProcess:
    """Start without waiting; output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.arguments(),
            env=launch.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return ServerProcess(launch, log, process)


@contextlib.contextmanager
def running_server(launch: Launch, log: Path, timeout_s: float = 240.0) -> Iterator[ServerProcess]:
    """A server that is up inside the `with` block and gone after it."""
    server = start_server(launch, log)
    try:
        server.wait_ready(timeout_s)
        yield server
    finally:
        server.stop()

"""The record logs that the contract is tested on, each with what a test does to it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from serving_bridge import spool_writer
from serving_bridge.records import MAX_LINE_BYTES
from serving_bridge.redis_stream import RedisStreamReader, RedisStreamSink
from serving_bridge.spool import SpoolReader, SpoolWriter
from serving_bridge.transport import Delivery, RecordSink
from serving_bridge.transports import describe
from tests.serving_bridge.record_samples import make_record

PATIENCE = 20.0
Reader = SpoolReader | RedisStreamReader


class Log(Protocol):
    """A log of which each segment, where it has such, holds one record."""

    place: str

    def sink(self) -> RecordSink: ...

    def reader(self, name: str, max_line_bytes: int = MAX_LINE_BYTES) -> Reader: ...

    def inject(self, lines: Iterable[bytes]) -> None:
        """Append lines as they are."""
        ...

    def size(self) -> int: ...


class SpoolLog:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.place = f"spool:{directory}"

    def sink(self) -> SpoolWriter:
        return SpoolWriter(self.directory, max_bytes=1, fsync=False)

    def reader(self, name: str, max_line_bytes: int = MAX_LINE_BYTES) -> SpoolReader:
        return SpoolReader(self.directory, name, max_line_bytes=max_line_bytes)

    def inject(self, lines: Iterable[bytes]) -> None:
        self.sink().close()
        number = len(list((self.directory / "segments").iterdir()))
        data = b"".join(line + b"\n" for line in lines)
        (self.directory / "segments" / f"{number:012d}.jsonl").write_bytes(data)

    def size(self) -> int:
        return int(describe(self.place)["sealed_bytes"])


class RedisLog:
    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.place = f"redis://127.0.0.1:{server.port}/0?stream=records"

    def sink(self) -> RedisStreamSink:
        return RedisStreamSink(self.place)

    def reader(self, name: str, max_line_bytes: int = MAX_LINE_BYTES) -> RedisStreamReader:
        return RedisStreamReader(self.place, name, max_line_bytes=max_line_bytes, patience_s=0)

    def inject(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.server.client().xadd("records", {"record": line})

    def size(self) -> int:
        return int(describe(self.place)["memory_bytes"])


class RedisServer:
    """A real broker on a loopback port, which a test may kill, freeze and start again over the same files."""

    def __init__(self, directory: Path) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("no redis-server: apt-get install redis-server")
        self._binary = binary
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self) -> None:
        """Start and wait until it answers; the first time on a free port, later on the same."""
        candidates = [self.port] * 5 if self.port else [free_port() for _ in range(5)]
        for port in candidates:
            self.port = port
            self._process = self._spawn(port)
            if self._answers(self._process):
                return
            self.kill()
        raise AssertionError((self._directory / "redis.log").read_text())

    def kill(self) -> None:
        """SIGKILL, as the kernel does it to a process that is too big."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        import redis

        return redis.Redis(port=self.port, protocol=2)

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        settings = {
            "port": port,
            "bind": "127.0.0.1",
            "dir": self._directory,
            "save": "",
            "appendonly": "yes",
        }
        settings |= {"appendfsync": "always", "logfile": self._directory / "redis.log"}
        arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
        return subprocess.Popen([self._binary, *arguments], stdout=subprocess.DEVNULL)

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        import redis

        while process.poll() is None:
            try:
                state = self.client().info()
            except (redis.ConnectionError, redis.ResponseError):
                pass
            else:
                if not state["loading"]:
                    # Somebody else's server on the port would answer as well.
                    return bool(state["process_id"] == process.pid)
            threading.Event().wait(0.01)
        return False


@contextmanager
def running_redis(directory: Path) -> Iterator[RedisLog]:
    """An empty log in a broker of its own."""
    server = RedisServer(directory)
    try:
        server.start()
        yield RedisLog(server)
    finally:
        server.kill()


class FullDisk:
    """The module ``os``, but no byte can be written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, *_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def failing(log: Log, fault: str) -> Iterator[None]:
    """Let the log fail inside the block: its disk or memory is ``full``, or its broker ``down``."""
    if isinstance(log, SpoolLog):
        assert fault == "full"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spool_writer, "os", FullDisk())
            yield
        return
    assert isinstance(log, RedisLog)
    if fault == "down":
        log.server.kill()
        yield
        log.server.start()
    else:
        log.server.client().config_set("maxmemory", 1)
        yield
        log.server.client().config_set("maxmemory", 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fill(log: Log, names: Iterable[str]) -> list[str]:
    """Write records by these names and let readers see them."""
    written = list(names)
    sink = log.sink()
    for name in written:
        assert sink.write(make_record(name))
    sink.close()
    return written


def names(deliveries: Iterable[Delivery]) -> list[str]:
    return [delivery.record.request_id for delivery in deliveries]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for another thread; a test that hangs here for long has failed."""
    for _ in range(int(PATIENCE / 0.005)):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("never came true")

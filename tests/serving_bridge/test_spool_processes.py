"""Several writer processes, and writers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from serving_bridge.spool import SpoolReader, SpoolWriter, describe, seal_orphans
from tests.serving_bridge.record_samples import make_record

ROOT = Path(__file__).parents[2]

WRITE = """
import sys
from serving_bridge.spool import SpoolWriter
from tests.serving_bridge.record_samples import make_record
directory, name = sys.argv[1:]
writer = SpoolWriter(directory, max_bytes=1, fsync=False)
print("ready", flush=True)
sys.stdin.readline()
for index in range(200):
    writer.write(make_record(f"{name}-{index}"))
writer.close()
"""

TEAR = """
import os, signal, sys
from pathlib import Path
from serving_bridge.records import encode
from serving_bridge.spool import SpoolWriter
from tests.serving_bridge.record_samples import make_record
writer = SpoolWriter(sys.argv[1])
for index in range(5):
    writer.write(make_record(str(index)))
[path] = Path(sys.argv[1], "open").iterdir()
with path.open("ab") as file:
    file.write(encode(make_record("5"))[:-40])
os.kill(os.getpid(), signal.SIGKILL)
"""

ENDLESS = """
import itertools, sys
from serving_bridge.spool import SpoolWriter
from tests.serving_bridge.record_samples import make_record
writer = SpoolWriter(sys.argv[1], max_bytes=4000, fsync=False)
for index in itertools.count():
    writer.write(make_record(str(index)))
    print(index, flush=True)
"""

FULL_DISK = """
import resource, sys
from serving_bridge.spool import SpoolWriter
from tests.serving_bridge.record_samples import make_record
writer = SpoolWriter(sys.argv[1])
writer.write(make_record("0"))
writer.write(make_record("1"))
resource.setrlimit(resource.RLIMIT_FSIZE, (writer._size + 100, resource.RLIM_INFINITY))
try:
    writer.write(make_record("2"))
except OSError:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.write(make_record("2"))
    writer.close()
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def request_ids(directory: Path) -> list[str]:
    return [delivery.record.request_id for delivery in SpoolReader(directory, "trainer").read(10_000)]


def test_two_processes_share_a_spool_without_gaps_or_losses(tmp_path: Path) -> None:
    writers = [start(WRITE, tmp_path, name) for name in "ab"]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        print("go", file=writer.stdin, flush=True)
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    state = describe(tmp_path)
    assert state["segments"] == state["last_segment"] + 1 == 400
    assert state["open_files"] == 0
    by_writer = defaultdict(list)
    for name in request_ids(tmp_path):
        writer_name, index = name.split("-")
        by_writer[writer_name].append(int(index))
    assert by_writer == {"a": list(range(200)), "b": list(range(200))}


@pytest.mark.parametrize("recover", ["next writer", "operator"])
def test_a_torn_last_line_costs_only_itself(tmp_path: Path, recover: str) -> None:
    killed = start(TEAR, tmp_path)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert request_ids(tmp_path) == []
    if recover == "operator":
        assert seal_orphans(tmp_path) == 1
    else:
        writer = SpoolWriter(tmp_path)
        writer.write(make_record("next"))
        writer.close()
    reader = SpoolReader(tmp_path, "trainer")
    got = [delivery.record.request_id for delivery in reader.read(100)]
    assert got == [*"01234", *(["next"] if recover == "next writer" else [])]
    assert reader.quarantine_reasons == {"torn": 1}
    assert seal_orphans(tmp_path) == 0


def test_a_live_writer_picks_up_what_a_killed_one_left(tmp_path: Path) -> None:
    now = [0.0]
    writer = SpoolWriter(tmp_path, max_age_s=60, clock=lambda: now[0])
    start(TEAR, tmp_path).communicate()
    now[0] = 59
    writer.maybe_roll()
    assert request_ids(tmp_path) == []
    now[0] = 60
    writer.maybe_roll()
    assert request_ids(tmp_path) == list("01234")


def test_kill_at_any_moment_loses_and_repeats_nothing_acknowledged(tmp_path: Path) -> None:
    with start(ENDLESS, tmp_path) as writer:
        assert writer.stdout is not None
        for _ in range(100):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = 100 + writer.stdout.read().count("\n")
    seal_orphans(tmp_path)
    reader = SpoolReader(tmp_path, "trainer")
    got = [int(delivery.record.request_id) for delivery in reader.read(100_000)]
    assert got == list(range(len(got)))
    assert len(got) >= acknowledged
    assert reader.quarantined <= 1


def test_a_write_the_system_cuts_short_is_repaired(tmp_path: Path) -> None:
    writer = start(FULL_DISK, tmp_path)
    writer.communicate()
    assert writer.returncode == 0
    reader = SpoolReader(tmp_path, "trainer")
    assert [delivery.record.request_id for delivery in reader.read(9)] == list("012")
    assert reader.quarantined == 0

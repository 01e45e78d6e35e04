"""What a process asks of the machine's memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROBE = """
import sys, torch
from pathlib import Path
from pipeline.hardware import keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

torch.ones(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
before = resident()
buffer = torch.ones(2**26)
del buffer
print((resident() - before) // 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
def test_a_large_buffer_that_was_freed_stays_with_the_process() -> None:
    def kept_mib(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", PROBE, mode], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert kept_mib("keep") >= 250
    assert kept_mib("default") < 50

"""A scheduler in a process of its own, whose runs are a given command."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.config import load_config
from pipeline.schedule.service import serve, stop_on_signals

if __name__ == "__main__":
    with stop_on_signals() as stop:
        serve(load_config(Path(sys.argv[1])), sys.argv[2:], stop)

"""Processes of their own for functions of importable modules.

They are forked from a server that has done the heavy imports, so that each costs a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

PRELOAD = [
    "lightning",
    "pipeline.stages.online",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]
LIMIT_S = 900  # a guard against hanging, generous for crowded machines


def start_process(function: Callable[..., None], *arguments: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=function, args=arguments)
    process.start()
    return process


def exit_code(process: BaseProcess) -> int | None:
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError("the process hangs")
    return process.exitcode


def in_process(function: Callable[..., None], *arguments: Any) -> int | None:
    """Run a function to its end, or until it is killed, and return the exit code."""
    return exit_code(start_process(function, *arguments))

"""Starting a stage in several processes.

A stage decorated with `across_ranks` starts its own processes on this machine, as many as `trainer.devices` says, and waits for
them. Processes that torchrun has made, here or on several machines, run the stage at once. Either way the environment is
torchrun's, so there is one kind of process to think of.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from drafters.errors import UserError
from pipeline import ranks
from pipeline.config import Config

Stage = TypeVar("Stage", bound=Callable[..., Path])

START_METHOD = "spawn"
"""Of the processes: they inherit neither threads nor devices, which `draftsmith run` has used here, and end if this one is
killed."""

TIMEOUT = timedelta(hours=2)
"""For one process to wait for another in a collective. A dead one is noticed at once; this is for one that is busy alone."""

AFTERMATH_S = 2.0
"""After an error a process stays for so long. If the error followed from the death of another, that one is to be noticed first;
and the first process is to end by itself, as its run in MLflow has to be ended."""

REFUSED, DEFECT = ".refused", ".defect"

TORCHRUN = "torchrun --nnodes N --nproc-per-node DEVICES --rdzv-backend c10d --rdzv-endpoint HOST:PORT --no-python draftsmith …"


def across_ranks(stage: Stage) -> Stage:
    """Let a stage of this configuration run in all processes that `trainer` asks for; returns what the first returns.

    Raises:
        UserError: of the stage in any process, or when the processes are not those that the configuration asks for.
    """

    @functools.wraps(stage)
    def run(config: Config, *args: Any, **kwargs: Any) -> Path:
        trainer = config.trainer
        if ranks.launched():
            _require_agreement(config)
            with _connected(config):
                return stage(config, *args, **kwargs)
        if trainer.world_size == 1:
            return stage(config, *args, **kwargs)
        if trainer.num_nodes > 1:
            raise UserError(
                f"trainer.num_nodes: {trainer.num_nodes} machines need the same command on each: {TORCHRUN}"
            )
        return _launch(run, config, *args, **kwargs)

    return cast(Stage, run)


def _require_agreement(config: Config) -> None:
    trainer, found = config.trainer, ranks.world_size()
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    if (found, local) != (trainer.world_size, trainer.devices):
        raise UserError(
            f"trainer.devices: torchrun made {found} processes, {local} on this machine; the config asks for "
            f"{trainer.num_nodes} × {trainer.devices} (trainer.num_nodes × trainer.devices)"
        )


@contextmanager
def _connected(config: Config) -> Iterator[None]:
    """Be one of the processes: with a device, or a share of the cores, and a connection to the others."""
    if config.trainer.world_size == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    local_rank, devices = int(os.environ["LOCAL_RANK"]), config.trainer.devices
    if torch.cuda.is_available():
        if devices > torch.cuda.device_count():
            raise UserError(f"trainer.devices: {devices}, but this machine has {torch.cuda.device_count()}")
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=torch.device("cuda", local_rank))
    else:
        if config.threads is None and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // devices))
        dist.init_process_group("gloo", timeout=TIMEOUT)
    yield
    # not after an error, which others may not know of yet: the end of the process tells them
    dist.destroy_process_group()


def _launch(stage: Callable[..., Path], config: Config, *args: Any, **kwargs: Any) -> Path:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_torchrun()
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.trainer.devices,
            run_id=secrets.token_hex(16),
            rdzv_backend="c10d",
            # torchrun unpickles what its rendezvous holds: in a private file, not behind a port
            rdzv_configs={"store_type": "file"},
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method=START_METHOD,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        errors = Path(folder) / "errors"
        errors.mkdir()
        try:
            with _signal_handlers_kept():
                returned = elastic_launch(settings, _process)(errors, stage, config, args, kwargs)
        except ChildFailedError as failed:
            _report(failed.failures, errors)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + stopped.sigval) from None
        path: Path = returned[0]
        return path


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """torchrun takes over signals and does not give them back."""
    kept = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                signal.signal(number, handler)


def _process(errors: Path, stage: Callable[..., Path], config: Config, args: Any, kwargs: Any) -> Path:
    """The life of one process. What went wrong is left in a file, for `_report` to find the cause among all."""
    signal.signal(signal.SIGTERM, ranks.leave)
    try:
        return stage(config, *args, **kwargs)
    except UserError as error:
        (errors / f"{ranks.rank()}{REFUSED}").write_text(str(error))
        if not ranks.is_first():
            time.sleep(AFTERMATH_S)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception:
        (errors / f"{ranks.rank()}{DEFECT}").write_text(traceback.format_exc())
        time.sleep(AFTERMATH_S)
        sys.exit(1)


def _report(failures: dict[int, Any], errors: Path) -> NoReturn:
    """Say what ended the processes: a kill, or else the earliest error, as the death of one is an error in others.

    Raises:
        UserError: if it was one.
        SystemExit: otherwise.
    """
    killed = {rank: f for rank, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    notes = sorted(errors.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    if killed:
        rank, failure = min(killed.items())
        what = f"training process {rank} was killed by {failure.signal_name()}"
    elif notes and notes[0].suffix == REFUSED:
        raise UserError(notes[0].read_text()) from None
    elif notes:
        print(notes[0].read_text(), file=sys.stderr)
        what = f"training process {notes[0].stem} failed"
    else:
        rank, failure = min(failures.items())
        what = f"training process {rank} ended with {failure.exitcode}"
    print(
        f"error: {what}, the others were stopped; --resume goes on from the last checkpoint", file=sys.stderr
    )
    raise SystemExit(1) from None


def _quiet_torchrun() -> None:
    """It reports every process that it stops, at length; `_report` says what there is to know."""
    elastic = "torch.distributed.elastic"
    for name in (
        f"{elastic}.agent.server.api",
        f"{elastic}.multiprocessing.api",
        "torch.multiprocessing.spawn",
    ):
        logging.getLogger(name).setLevel(logging.CRITICAL)

"""Which of several training processes this is, and how they act together.

The processes of a stage are made by `pipeline.launch` or by torchrun, which tells each its rank in the environment. All of them
run the stage; the first alone writes files, MLflow and the terminal. Everywhere else there is one process of rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

from drafters.errors import UserError

if TYPE_CHECKING:
    from drafters.packing import Document

Value = TypeVar("Value")


def launched() -> bool:
    """Whether this process was made by torchrun or `pipeline.launch`."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Number of this process, from 0."""
    return int(os.environ["RANK"]) if launched() else 0


def world_size() -> int:
    """Number of processes."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def is_first() -> bool:
    """Whether this process writes what there is to write."""
    return rank() == 0


def require_connection(stage: str) -> None:
    """Refuse to do in every process what is to be done once.

    Raises:
        UserError: in one of several processes that have not been connected by `pipeline.launch`.
    """
    if world_size() == 1:
        return
    import torch.distributed as dist

    if not dist.is_initialized():
        raise UserError(
            f"{stage}: runs in one process; start it without torchrun (train, prune, distill and fit-length-head run in several)"
        )


def leave(*_: object) -> NoReturn:
    """Answers SIGTERM: the first process leaves by an exception, so that its run in MLflow is ended; others have none."""
    if not is_first():
        os._exit(128 + signal.SIGTERM)
    sys.exit(128 + signal.SIGTERM)


def wait_for_all() -> None:
    """Go on when all processes have come here."""
    if world_size() > 1:
        import torch.distributed as dist

        dist.barrier()


@contextmanager
def first_alone() -> Iterator[bool]:
    """The first process does the block, which asks for that; the others wait until it has."""
    yield is_first()
    wait_for_all()


def decided_by_first(decide: Callable[[], Value]) -> Value:
    """What the first process finds, in all processes; for what others might see otherwise, as a file or a clock."""
    import torch.distributed as dist

    if world_size() == 1 or not dist.is_initialized():
        return decide()

    found = [decide() if is_first() else None]
    dist.broadcast_object_list(found, src=0)
    value: Value = found[0]  # type: ignore[assignment]
    return value


def spread(documents: Sequence[Document], work: Callable[[list[Document]], Sequence[Value]]) -> list[Value]:
    """`work` on documents, each in one of the processes; its results by document, in all of them."""
    from drafters.replay import REPLAY_TOKENS, iterate_packs

    if world_size() == 1:
        return list(work(list(documents)))
    import torch.distributed as dist

    packs = list(iterate_packs(documents, REPLAY_TOKENS))
    own = [document for pack in packs[rank() :: world_size()] for document in pack]
    parts: list[list[Value]] = [[]] * world_size()
    dist.all_gather_object(parts, list(work(own)) if own else [])
    results = [iter(part) for part in parts]
    return [next(results[number % world_size()]) for number, pack in enumerate(packs) for _ in pack]

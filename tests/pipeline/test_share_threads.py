"""The division of the CPU between the embedded engine and the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.stages.whole import ShareThreads


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_trainer_takes_the_rest_and_all_when_the_traffic_is_over() -> None:
    service: Any = SimpleNamespace(engine=SimpleNamespace(threads=4), traffic_over=False)
    sharing = ShareThreads(service, total=4, serving=1)
    torch.set_num_threads(4)
    sharing.on_train_batch_start()
    assert (service.engine.threads, torch.get_num_threads()) == (1, 3)
    service.traffic_over = True
    sharing.on_train_batch_start()
    assert torch.get_num_threads() == 4
    sharing.on_train_epoch_end()
    assert service.engine.threads == 4


def test_both_always_keep_a_thread() -> None:
    service: Any = SimpleNamespace(engine=SimpleNamespace(threads=1), traffic_over=False)
    ShareThreads(service, total=1, serving=1).on_train_batch_start()
    assert (service.engine.threads, torch.get_num_threads()) == (1, 1)

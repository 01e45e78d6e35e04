"""Acceptance length adds up exactly over documents, batches and processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drafters.replay import ReplayResult, position_acceptance, total_acceptance_length
from lightning_modules.metrics import AcceptanceLength
from tests.lightning_modules.processes import exit_code, start_process

BLOCK_SIZE = 5


def random_results(seed: int, count: int) -> list[ReplayResult]:
    generator = torch.Generator().manual_seed(seed)
    results = []
    for number in range(count):
        rounds = int(torch.randint(0, 7, (1,), generator=generator))
        accepted = torch.randint(0, BLOCK_SIZE, (rounds,), generator=generator).tolist()
        reached = [0, *(sum(a >= j - 1 for a in accepted) for j in range(1, BLOCK_SIZE))]
        matched = [0, *(sum(a >= j for a in accepted) for j in range(1, BLOCK_SIZE))]
        starts = list(range(rounds))
        committed = sum(accepted) + rounds
        results.append(ReplayResult(f"d{number}", "x", committed, rounds, accepted, starts, reached, matched))
    return results


def assert_equals_the_sums(metric: AcceptanceLength, results: list[ReplayResult]) -> None:
    tau = sum(r.committed for r in results) / sum(r.rounds for r in results)
    assert float(metric.compute()) == pytest.approx(tau, rel=1e-6)
    assert tau == total_acceptance_length(results)
    assert float(metric.acceptance_rate()) == pytest.approx((tau - 1) / (BLOCK_SIZE - 1), rel=1e-6)
    rates = (metric.matched_B / metric.reached_B)[1:].tolist()
    assert rates == pytest.approx(position_acceptance(results), rel=1e-6)
    assert int(metric.rounds) == sum(r.rounds for r in results)


@pytest.mark.parametrize("sizes", [[20], [1] * 20, [7, 0, 13]])
def test_equals_the_sums_however_it_is_split(sizes: list[int]) -> None:
    results = random_results(0, 20)
    metric = AcceptanceLength(BLOCK_SIZE)
    rest = list(results)
    for size in sizes:
        metric.update(rest[:size])
        rest = rest[size:]
    assert_equals_the_sums(metric, results)


def test_is_not_the_mean_of_the_documents() -> None:
    short, long = ReplayResult("a", "x", 4, 1), ReplayResult("b", "x", 9, 9)
    results = [r.__class__(**{**vars(r), "reached_B": [0] * 5, "matched_B": [0] * 5}) for r in (short, long)]
    metric = AcceptanceLength(BLOCK_SIZE)
    metric.update(results)
    assert float(metric.compute()) == pytest.approx(1.3)


def test_counts_beyond_what_single_precision_can_hold() -> None:
    metric = AcceptanceLength(BLOCK_SIZE)
    many = 2**25
    zeros = [0] * BLOCK_SIZE
    metric.update([ReplayResult("a", "x", 2 * many, many, [], [], zeros, zeros)])
    metric.update([ReplayResult("b", "x", 1, 1, [], [], zeros, zeros)])
    assert int(metric.committed) == 2 * many + 1


def test_states_of_two_ranks_add_up() -> None:
    first, second = random_results(1, 9), random_results(2, 4)
    metrics = []
    for results in (first, second):
        metric = AcceptanceLength(BLOCK_SIZE)
        metric.update(results)
        metrics.append(metric)
    total = AcceptanceLength(BLOCK_SIZE)
    total.update([])
    for name, reduce in total._reductions.items():
        assert callable(reduce)
        stacked = torch.stack([getattr(metric, name) for metric in metrics])
        setattr(total, name, reduce(stacked))
    assert_equals_the_sums(total, first + second)


def test_reset_forgets_and_nothing_seen_is_nan() -> None:
    metric = AcceptanceLength(BLOCK_SIZE)
    metric.update([])
    assert torch.isnan(metric.compute())
    metric.update(random_results(3, 5))
    metric.reset()
    metric.update(random_results(4, 5))
    assert_equals_the_sums(metric, random_results(4, 5))


def _one_rank(rank: int, rendezvous: str, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    metric = AcceptanceLength(BLOCK_SIZE)
    metric.update(random_results(10 + rank, 6 + 5 * rank))
    torch.save([metric.compute(), metric.acceptance_rate()], Path(directory) / f"{rank}.pt")
    metric.reset()
    metric.update(random_results(20, 3) if rank else [])
    torch.save(metric.compute(), Path(directory) / f"{rank}-again.pt")
    dist.destroy_process_group()


def test_two_processes_see_the_same_total(tmp_path: Path) -> None:
    ranks = [start_process(_one_rank, rank, str(tmp_path / "rendezvous"), str(tmp_path)) for rank in range(2)]
    assert [exit_code(rank) for rank in ranks] == [0, 0]
    expected = total_acceptance_length(random_results(10, 6) + random_results(11, 11))
    for rank in range(2):
        tau, rate = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert float(tau) == pytest.approx(expected, rel=1e-6)
        assert float(rate) == pytest.approx((expected - 1) / (BLOCK_SIZE - 1), rel=1e-6)
        again = torch.load(tmp_path / f"{rank}-again.pt", weights_only=True)
        assert float(again) == pytest.approx(total_acceptance_length(random_results(20, 3)), rel=1e-6)

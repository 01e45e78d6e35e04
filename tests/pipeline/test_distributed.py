"""Two processes train as one does on both their batches; what stops one of them stops both, and what was trained goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoint import drafter_digest, load_drafter
from drafters.errors import UserError
from pipeline.fitting import CHECKPOINT
from tests.lightning_modules.processes import PRELOAD, in_process
from tests.pipeline.distributed_worker import FIT, config_of, train
from tests.pipeline.test_resume_offline import assert_same

CASES: dict[str, dict[str, Any]] = {
    "dflash": {"kind": "dflash", "loss": {"weighting": "survival"}, "accumulate": 2},
    "d3d": {"kind": "d3d", "loss": {"objective": "osd"}},
    "recovery": {"kind": "recovery"},
    "heads": {"kind": "heads"},
}


@pytest.fixture(scope="module", autouse=True)
def warm_processes() -> Iterator[None]:
    """Processes that need not import everything anew."""
    get_context("forkserver").set_forkserver_preload([*PRELOAD, "tests.pipeline.distributed_worker"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.launch.START_METHOD", "forkserver")
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Directory of an uninterrupted run of a case, by two processes or by one on the batches of both."""

    @cache
    def run(name: str, strategy: str | None) -> Path:
        directory = tmp_path_factory.mktemp(f"{name}-{strategy}")
        if strategy is None:
            case = CASES[name] | {"merged": True}
            assert in_process(train, config_of(), directory, case) == 0
        else:
            train(config_of(devices=2, strategy=strategy), directory, CASES[name])
        return directory

    yield run


def seen(directory: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / f"seen-{rank}.pt", weights_only=True)
    return found


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(name, how) for name in CASES for how in ("ddp", "fsdp2") if (name, how) != ("heads", "fsdp2")],
)
def test_two_processes_are_one(name: str, strategy: str, finished: Any) -> None:
    both, alone = finished(name, strategy), finished(name, None)
    first, second, reference = seen(both, 0), seen(both, 1), seen(alone)
    assert not any(set(a) & set(b) for a, b in zip(first["documents"], second["documents"], strict=True))
    together = [a + b for a, b in zip(first["documents"], second["documents"], strict=True)]
    assert together == reference["documents"]
    assert first["losses"] == second["losses"]
    torch.testing.assert_close(first["losses"], reference["losses"], rtol=1e-5, atol=1e-6)
    assert len(reference["gradients"]) == FIT.steps
    if name != "heads":  # which are clipped one by one
        norms = [torch.nn.utils.get_total_norm(list(g.values())) for g in reference["gradients"]]
        assert float(min(norms)) == pytest.approx(FIT.optim.clip_norm, rel=1e-4)
    torch.testing.assert_close(first["gradients"], reference["gradients"], rtol=1e-3, atol=1e-6)
    assert_same(second["gradients"], first["gradients"])
    weights, expected = (torch.load(d / "final.ckpt", weights_only=True)["state_dict"] for d in (both, alone))
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=2e-6)
    # replay τ over documents that the processes share unevenly; a ratio of counts, so equal
    assert first["history"] == second["history"] == reference["history"]
    assert [step for step, _ in reference["history"]] == ([] if name == "heads" else [0, 2, 4, 6])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["dflash", "d3d"])
def test_the_export_is_whole_and_loads_in_one_process(name: str, strategy: str, finished: Any) -> None:
    exported, expected = (
        load_drafter(finished(name, how) / "drafter", dtype=torch.float32).drafter.state_dict()
        for how in (strategy, None)
    )
    assert exported.keys() == expected.keys()
    for key, tensor in expected.items():
        # the last digit of bfloat16 may fall to either side
        torch.testing.assert_close(exported[key], tensor, rtol=2**-7, atol=1e-5, msg=key)


def listed(value: Any) -> Any:
    """Tuples as lists: what was broadcast comes back with the latter."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("fsdp2", 1)])
def test_a_killed_process_ends_the_run_which_then_goes_on_bit_for_bit(
    strategy: str, rank: int, finished: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, case = config_of(devices=2, strategy=strategy), CASES["dflash"]
    with pytest.raises(SystemExit) as stopped:
        train(config, tmp_path, case | {"dies": (rank, 3, "kill")})
    assert stopped.value.code == 1
    assert f"training process {rank} was killed by SIGKILL" in capfd.readouterr().err
    written = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert written["global_step"] == 2
    train(config, tmp_path, case)
    expected = finished("dflash", strategy)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks"):
        found, wanted = (torch.load(d / "final.ckpt", weights_only=True)[key] for d in (tmp_path, expected))
        assert_same(listed(found), listed(wanted), key)
    assert drafter_digest(tmp_path / "drafter") == drafter_digest(expected / "drafter")
    with pytest.raises(UserError, match=r"trainer.devices: .*written by 2 processes, not by 1"):
        train(config_of(), tmp_path, case)


def test_a_checkpoint_of_the_other_strategy_is_refused(finished: Any, tmp_path: Path) -> None:
    for written, asked in (("ddp", "fsdp2"), ("fsdp2", "ddp")):
        shutil.copyfile(finished("d3d", written) / CHECKPOINT, tmp_path / CHECKPOINT)
        with pytest.raises(UserError, match=f"trainer.strategy: .*under {written}, not {asked}"):
            train(config_of(devices=2, strategy=asked), tmp_path, CASES["d3d"])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_loss_that_is_not_finite_in_one_process_stops_both_before_the_step(
    strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="stopped at step 3: the loss is nan"):
        train(config_of(devices=2, strategy=strategy), tmp_path, {"poisoned": True})
    written = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert written["global_step"] == 2
    assert all(torch.isfinite(t).all() for t in written["state_dict"].values())


def test_a_defect_in_one_process_stops_both(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        train(config_of(devices=2), tmp_path, {"dies": (1, 1, "raise")})
    assert stopped.value.code == 1
    said = capfd.readouterr().err
    assert "ValueError: a defect" in said and "training process 1 failed" in said
    assert said.count("Traceback") == 1, "what followed from it in the other process is not shown"

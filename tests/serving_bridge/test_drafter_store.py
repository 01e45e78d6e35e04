"""The server's side of a hot swap: whole or not at all, and back bit by bit."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.checkpoint import MANIFEST, file_sha256, load_drafter
from drafters.errors import UserError
from drafters.identity import TargetIdentity
from serving_bridge.sglang_plugin import drafter_store
from serving_bridge.sglang_plugin.drafter_store import DrafterStore, SwapRefused, checked_module, read_served
from tests.serving_bridge.swap_samples import (
    HEAD,
    MODEL,
    FakeDraftModel,
    Tensors,
    damage,
    make_store,
    order,
    relist,
    rewrite_config,
    rewrite_tensors,
    same_bits,
    snapshot,
    weights_of,
    write_drafter,
)

PATIENCE = 30.0


def head_of(directory: Path) -> Tensors:
    """Weights of the length head; nothing without one."""
    return weights_of(directory, HEAD) if (directory / HEAD).is_file() else {}


@dataclass
class Desk:
    """A store that serves `first`, and another drafter below its root."""

    root: Path
    first: Path
    second: Path
    model: FakeDraftModel
    store: DrafterStore

    def serves(self, directory: Path) -> bool:
        """Whether version, weights and length head are those of a directory."""
        head = self.store.served.length_head
        return (
            self.store.status()["drafter_version"] == directory.name
            and same_bits(snapshot(self.model), weights_of(directory))
            and same_bits({} if head is None else snapshot(head), head_of(directory))
        )

    def try_swap(self, directory: Path | str, digest: str | None = None) -> tuple[bool, str]:
        """Stage, wait, commit; the first refusal, or the answer to the commit."""
        answer = self.store.handle(order("stage", directory, digest))
        if not answer[0]:
            return answer
        self.store.wait_staged()
        return self.store.handle(order("commit", directory, digest))


def make_desk(base: Path, **changes: Any) -> Desk:
    root = base / "root"
    first = write_drafter(root / "v1", seed=1)
    second = write_drafter(root / "v2", seed=2)
    model = FakeDraftModel(first)
    return Desk(root, first, second, model, make_store(model, first, root, **changes))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path)


# swaps that happen


def test_a_swap_serves_the_new_version_weights_and_length_head(desk: Desk) -> None:
    assert desk.serves(desk.first)
    assert desk.store.handle(order("stage", desk.second)) == (True, "staging")
    desk.store.wait_staged()
    assert desk.serves(desk.first), "staging changes nothing"
    assert desk.store.status()["staged"] == {
        "manifest_sha256": file_sha256(desk.second / MANIFEST), "ready": True, "problem": None,
    }  # fmt: skip
    ok, message = desk.store.handle(order("commit", desk.second))
    assert (ok, message) == (True, "serving v2")
    assert desk.serves(desk.second)
    status = desk.store.status()
    assert (status["previous_version"], status["swaps"], status["failures"]) == ("v1", 1, 0)
    assert status["staged"] is None


def test_a_commit_waits_for_what_is_still_being_read(desk: Desk) -> None:
    desk.store.handle(order("stage", desk.second))
    assert desk.store.handle(order("commit", desk.second))[0]
    assert desk.serves(desk.second)


def test_a_drafter_without_length_head_takes_the_old_head_away(desk: Desk) -> None:
    headless = write_drafter(desk.root / "v3", seed=3, head=False)
    assert desk.try_swap(headless)[0]
    assert desk.store.served.length_head is None


def test_a_later_stage_replaces_an_earlier_one(desk: Desk) -> None:
    third = write_drafter(desk.root / "v3", seed=3)
    for directory in (desk.second, third):
        desk.store.handle(order("stage", directory))
        desk.store.wait_staged()
    assert desk.store.handle(order("commit", third))[0]
    assert desk.serves(third)


def test_status_is_plain_json(desk: Desk) -> None:
    desk.try_swap(desk.second)
    assert json.loads(json.dumps(desk.store.status()))["drafter_version"] == "v2"


def test_what_was_derived_from_the_weights_is_rebuilt_after_each_change(tmp_path: Path) -> None:
    seen: list[Tensors] = []
    changing: Desk = make_desk(tmp_path, after_load=lambda: seen.append(snapshot(changing.model)))
    changing.try_swap(changing.second)
    changing.store.handle(order("rollback"))
    assert len(seen) == 2
    assert same_bits(seen[0], weights_of(changing.second))
    assert same_bits(seen[1], weights_of(changing.first))


# refusals

Break = Callable[[Desk], tuple[Path | str, str | None]]


def wrong_digest(desk: Desk) -> tuple[Path | str, str | None]:
    return desk.second, "0" * 64


def changed_manifest(desk: Desk) -> tuple[Path | str, str | None]:
    digest = file_sha256(desk.second / MANIFEST)
    relist(desk.second, drafter_version="v9")
    return desk.second, digest


def damaged_file(desk: Desk) -> tuple[Path | str, str | None]:
    damage(desk.second)
    return desk.second, None


def damaged_head(desk: Desk) -> tuple[Path | str, str | None]:
    damage(desk.second, "length_head.safetensors")
    return desk.second, None


def missing_file(desk: Desk) -> tuple[Path | str, str | None]:
    (desk.second / MODEL).unlink()
    return desk.second, None


def no_manifest(desk: Desk) -> tuple[Path | str, str | None]:
    (desk.second / MANIFEST).unlink()
    return desk.second, "0" * 64


def no_directory(desk: Desk) -> tuple[Path | str, str | None]:
    return "absent", "0" * 64


def broken_config(desk: Desk) -> tuple[Path | str, str | None]:
    (desk.second / "config.json").write_text("{")
    relist(desk.second)
    return desk.second, None


def no_target(desk: Desk) -> tuple[Path | str, str | None]:
    relist(desk.second, target={"name": "tiny"})
    return desk.second, None


def missing_tensor(desk: Desk) -> tuple[Path | str, str | None]:
    rewrite_tensors(desk.second, lambda tensors: tensors.pop("fc.weight"))
    return desk.second, None


def extra_tensor(desk: Desk) -> tuple[Path | str, str | None]:
    rewrite_tensors(desk.second, lambda tensors: tensors.update(more=torch.zeros(1)))
    return desk.second, None


def wrong_shape(desk: Desk) -> tuple[Path | str, str | None]:
    rewrite_tensors(desk.second, lambda tensors: tensors.update({"norm.weight": torch.ones(3)}))
    return desk.second, None


def not_finite(desk: Desk) -> tuple[Path | str, str | None]:
    rewrite_tensors(desk.second, lambda tensors: tensors["norm.weight"].fill_(float("nan")))
    return desk.second, None


def other_width(desk: Desk) -> tuple[Path | str, str | None]:
    return write_drafter(desk.root / "v3", seed=3, width=32), None


def other_block_size(desk: Desk) -> tuple[Path | str, str | None]:
    return write_drafter(desk.root / "v3", seed=3, block_size=8), None


def other_layers_read(desk: Desk) -> tuple[Path | str, str | None]:
    return write_drafter(desk.root / "v3", seed=3, layer_ids=(0, 1)), None


def other_rotation(desk: Desk) -> tuple[Path | str, str | None]:
    rewrite_config(desk.second, rope_theta=123.0)
    return desk.second, None


def other_epsilon(desk: Desk) -> tuple[Path | str, str | None]:
    rewrite_config(desk.second, rms_norm_eps=0.1)
    return desk.second, None


def other_activation(desk: Desk) -> tuple[Path | str, str | None]:
    rewrite_config(desk.second, hidden_act="relu")
    return desk.second, None


def other_target(desk: Desk) -> tuple[Path | str, str | None]:
    return write_drafter(desk.root / "v3", seed=3, identity=TargetIdentity("large", "r0", "0" * 16)), None


def too_large(desk: Desk) -> tuple[Path | str, str | None]:
    (desk.second / "notes.bin").write_bytes(b"\0" * 2**20)
    return desk.second, None


def parent_directory(desk: Desk) -> tuple[Path | str, str | None]:
    outside = write_drafter(desk.root.parent / "v3", seed=3)
    return "../v3", file_sha256(outside / MANIFEST)


def absolute_path(desk: Desk) -> tuple[Path | str, str | None]:
    outside = write_drafter(desk.root.parent / "v3", seed=3)
    return str(outside), file_sha256(outside / MANIFEST)


def symbolic_link(desk: Desk) -> tuple[Path | str, str | None]:
    outside = write_drafter(desk.root.parent / "v3", seed=3)
    os.symlink(outside, desk.root / "link")
    return desk.root / "link", None


REFUSALS: list[tuple[Break, list[str]]] = [
    (wrong_digest, [MANIFEST, "sha256"]),
    (changed_manifest, [MANIFEST, "sha256"]),
    (damaged_file, [MODEL, "checksum differs"]),
    (damaged_head, ["length_head.safetensors", "checksum differs"]),
    (missing_file, [MODEL, "missing"]),
    (no_manifest, [MANIFEST, "missing"]),
    (no_directory, ["absent", "cannot read"]),
    (broken_config, ["config.json"]),
    (no_target, ["target", "revision"]),
    (missing_tensor, ["missing tensors", "fc.weight"]),
    (extra_tensor, ["unexpected tensors", "more"]),
    (wrong_shape, ["norm.weight", "shape"]),
    (not_finite, ["norm.weight", "not finite"]),
    (other_width, ["intermediate_size", "32"]),
    (other_block_size, ["block_size", "8"]),
    (other_layers_read, ["dflash_config"]),
    (other_rotation, ["rope_theta"]),
    (other_epsilon, ["rms_norm_eps"]),
    (other_activation, ["hidden_act"]),
    (other_target, ["large@r0", "tiny@r0"]),
    (too_large, ["max_drafter_bytes"]),
    (parent_directory, ["outside", "swap_root"]),
    (absolute_path, ["outside", "swap_root"]),
    (symbolic_link, ["outside", "swap_root"]),
]


@pytest.mark.parametrize(("spoil", "named"), REFUSALS, ids=[spoil.__name__ for spoil, _ in REFUSALS])
def test_a_wrong_drafter_is_refused_and_nothing_changes(desk: Desk, spoil: Break, named: list[str]) -> None:
    directory, digest = spoil(desk)
    ok, message = desk.try_swap(directory, digest)
    assert not ok
    assert [text for text in named if text not in message] == []
    assert desk.serves(desk.first)
    assert desk.model.copied == 0, "not even tried"
    status = desk.store.status()
    assert (status["last_problem"], status["swaps"]) == (message, 0)
    assert status["failures"] > 0
    good = write_drafter(desk.root / "v4", seed=4)
    assert desk.try_swap(good)[0], "a refusal is not the end"
    assert desk.serves(good)


def test_the_problem_of_a_staged_drafter_is_seen_in_the_status(desk: Desk) -> None:
    damage(desk.second)
    desk.store.handle(order("stage", desk.second))
    desk.store.wait_staged()
    status = desk.store.status()
    assert status["staged"]["ready"]
    assert "checksum differs" in status["staged"]["problem"]
    assert (status["failures"], status["last_problem"]) == (1, status["staged"]["problem"])


def test_without_a_root_nothing_can_be_swapped(tmp_path: Path) -> None:
    desk = make_desk(tmp_path, swap_root="")
    ok, message = desk.try_swap(desk.second)
    assert not ok
    assert "swap_root" in message
    assert desk.serves(desk.first)


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (b"", ""),
        (b"\xff\x00", ""),
        (b"[]", "object"),
        (b"{}", "step"),
        (b'{"step": "explode"}', "explode"),
        (b'{"step": "stage", "path": "v2"}', "path"),
        (b'{"step": "stage", "directory": 5}', "directory"),
        (b'{"step": "stage", "directory": "\\u0000"}', ""),
        (order("commit", "v2", "0" * 64), "not staged"),
        (order("rollback"), "no earlier drafter"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(desk: Desk, payload: bytes, named: str) -> None:
    ok, message = desk.store.handle(payload)
    assert not ok
    assert message
    assert named in message
    assert desk.serves(desk.first)
    assert desk.store.status()["failures"] == 1


def test_a_commit_of_another_drafter_than_the_staged_one_is_refused(desk: Desk) -> None:
    third = write_drafter(desk.root / "v3", seed=3)
    desk.store.handle(order("stage", desk.second))
    ok, message = desk.store.handle(order("commit", third))
    assert not ok
    assert "not staged" in message
    assert desk.serves(desk.first)


def test_a_staged_drafter_is_committed_once(desk: Desk) -> None:
    assert desk.try_swap(desk.second)[0]
    ok, message = desk.store.handle(order("commit", desk.second))
    assert not ok
    assert "not staged" in message
    assert desk.serves(desk.second)


def test_while_a_drafter_is_read_another_must_wait(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow_load(directory: Path) -> Any:
        assert go_on.wait(PATIENCE)
        return load_drafter(directory)

    monkeypatch.setattr(drafter_store, "load_drafter", slow_load)
    desk.store.handle(order("stage", desk.second))
    staged = desk.store.status()["staged"]
    third = write_drafter(desk.root / "v3", seed=3)
    ok, message = desk.store.handle(order("stage", third))
    go_on.set()
    assert (staged["ready"], staged["problem"]) == (False, None)
    assert not ok
    assert "wait" in message
    assert desk.store.handle(order("commit", desk.second))[0], "the first goes on"
    assert desk.serves(desk.second)


@pytest.mark.parametrize("spoil", [other_block_size, other_rotation, other_layers_read])
def test_the_shape_is_checked_at_every_swap(desk: Desk, spoil: Break) -> None:
    between = write_drafter(desk.root / "v5", seed=5)
    assert desk.try_swap(between)[0]
    directory, digest = spoil(desk)
    ok, _ = desk.try_swap(directory, digest)
    assert not ok
    assert desk.serves(between)


def test_the_served_directory_is_the_one_that_was_staged(desk: Desk) -> None:
    desk.store.handle(order("stage", desk.second))
    desk.store.handle(order("commit", "elsewhere", file_sha256(desk.second / MANIFEST)))
    assert Path(desk.store.status()["directory"]).name == "v2"


# failures while loading, and the way back


@pytest.mark.parametrize("fail_after", [0, 1, 5])
def test_a_load_that_fails_half_way_leaves_every_bit_as_it_was(desk: Desk, fail_after: int) -> None:
    desk.model.fail_after = fail_after
    ok, message = desk.try_swap(desk.second)
    assert not ok
    assert "the device is lost" in message
    assert "last good drafter is back" in message
    assert desk.model.copied == fail_after, "it really had begun"
    assert desk.serves(desk.first)
    desk.model.fail_after = None
    assert desk.try_swap(desk.second)[0]
    assert desk.serves(desk.second)


def test_a_failure_after_loading_is_undone_as_well(tmp_path: Path) -> None:
    problems = [RuntimeError("no memory for the copies")]

    def after_load() -> None:
        if problems:
            raise problems.pop()

    desk = make_desk(tmp_path, after_load=after_load)
    ok, message = desk.try_swap(desk.second)
    assert not ok
    assert "no memory" in message
    assert desk.model.copied > 0
    assert desk.serves(desk.first)


def test_a_failed_swap_does_not_become_the_way_back(desk: Desk) -> None:
    desk.try_swap(desk.second)
    third = write_drafter(desk.root / "v3", seed=3)
    desk.model.fail_after = 2
    assert not desk.try_swap(third)[0]
    assert desk.store.handle(order("rollback"))[0]
    assert desk.serves(desk.first)


def test_a_rollback_brings_back_every_bit_and_works_once(desk: Desk) -> None:
    desk.try_swap(desk.second)
    assert desk.store.handle(order("rollback")) == (True, "serving v1")
    assert desk.serves(desk.first)
    assert desk.store.status()["previous_version"] is None
    ok, message = desk.store.handle(order("rollback"))
    assert not ok
    assert "no earlier drafter" in message
    assert desk.serves(desk.first)


def test_a_rollback_goes_one_swap_back(desk: Desk) -> None:
    third = write_drafter(desk.root / "v3", seed=3)
    desk.try_swap(desk.second)
    desk.try_swap(third)
    assert desk.store.handle(order("rollback"))[0]
    assert desk.serves(desk.second)


def test_a_rollback_does_not_need_the_files(desk: Desk) -> None:
    before = snapshot(desk.model)
    desk.try_swap(desk.second)
    damage(desk.first)
    assert desk.store.handle(order("rollback"))[0]
    assert same_bits(snapshot(desk.model), before)


@pytest.mark.parametrize("fail", [False, True])
def test_a_rollback_between_stage_and_commit_does_not_mix_drafters(desk: Desk, fail: bool) -> None:
    third = write_drafter(desk.root / "v3", seed=3)
    desk.try_swap(desk.second)
    desk.store.handle(order("stage", third))
    desk.store.wait_staged()
    assert desk.store.handle(order("rollback"))[0]
    assert desk.serves(desk.first)
    desk.model.fail_after = 2 if fail else None
    if desk.store.handle(order("commit", third))[0]:
        assert desk.serves(third)
        assert desk.store.handle(order("rollback"))[0]
    assert desk.serves(desk.first)


def test_a_rollback_that_fails_does_not_leave_one_drafter_under_the_name_of_another(tmp_path: Path) -> None:
    fail = threading.Event()

    def after_load() -> None:
        if fail.is_set():
            raise RuntimeError("no memory for the copies")

    desk = make_desk(tmp_path, after_load=after_load)
    desk.try_swap(desk.second)
    fail.set()
    ok, _ = desk.store.handle(order("rollback"))
    assert not ok
    assert desk.serves(desk.first) or desk.serves(desk.second)


# several ranks


class Group:
    """Another rank that reports a problem at one of the questions."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.heard: list[str | None] = []

    def __call__(self, problem: str | None) -> list[str]:
        self.heard.append(problem)
        others = ["rank 1 cannot read it"] if len(self.heard) - 1 == self.at else []
        return [*([problem] if problem else []), *others]


def test_another_ranks_problem_before_loading_prevents_the_swap(tmp_path: Path) -> None:
    group = Group(at=0)
    desk = make_desk(tmp_path, agree=group)
    ok, message = desk.try_swap(desk.second)
    assert not ok
    assert "rank 1 cannot read it" in message
    assert desk.model.copied == 0
    assert desk.serves(desk.first)
    assert group.heard == [None]


def test_another_ranks_problem_while_loading_undoes_the_swap(tmp_path: Path) -> None:
    group = Group(at=1)
    desk = make_desk(tmp_path, agree=group)
    ok, message = desk.try_swap(desk.second)
    assert not ok
    assert "rank 1 cannot read it" in message
    assert desk.model.copied > 0, "it really had begun"
    assert desk.serves(desk.first)
    assert group.heard == [None, None]


def test_another_ranks_problem_prevents_a_rollback(tmp_path: Path) -> None:
    group = Group(at=2)
    desk = make_desk(tmp_path, agree=group)
    desk.try_swap(desk.second)
    ok, message = desk.store.handle(order("rollback"))
    assert not ok
    assert "rank 1 cannot read it" in message
    assert desk.serves(desk.second)


def test_the_group_hears_this_ranks_problems(tmp_path: Path) -> None:
    group = Group(at=99)
    desk = make_desk(tmp_path, agree=group)
    desk.model.fail_after = 1
    desk.try_swap(desk.second)
    damage(desk.second)
    desk.try_swap(desk.second)
    desk.store.handle(order("rollback"))
    assert [problem is not None for problem in group.heard] == [False, True, True, True]


# never an exception


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return make_desk(tmp_path_factory.mktemp("lasting"))


texts = st.text(alphabet=st.characters(), max_size=12)
orders = st.fixed_dictionaries(
    {"step": st.sampled_from(["stage", "commit", "rollback", "other"])},
    optional={"directory": texts | st.integers(), "manifest_sha256": texts},
).map(lambda said: json.dumps(said).encode())


@given(payload=st.binary(max_size=40) | orders)
def test_no_payload_raises_or_changes_what_is_served(lasting: Desk, payload: bytes) -> None:
    ok, message = lasting.store.handle(payload)
    assert isinstance(message, str)
    lasting.store.wait_staged()
    if ok:
        assert message == "staging"
    assert lasting.serves(lasting.first)


# what serves at the start


def test_a_directory_names_its_own_version_and_target(desk: Desk) -> None:
    served = read_served(str(desk.first), "ignored")
    assert (served.version, served.target_id) == ("v1", "tiny@r0#0123456789ab")
    assert served.length_head is not None


def test_a_directory_without_manifest_is_named_by_its_config(desk: Desk) -> None:
    for directory in (desk.first, desk.second):
        (directory / MANIFEST).unlink()
    rewritten = json.loads((desk.second / "config.json").read_text()) | {"rms_norm_eps": 0.1}
    (desk.second / "config.json").write_text(json.dumps(rewritten))
    versions = [read_served(str(d), "tiny@r0").version for d in (desk.first, desk.second)]
    assert all(version.startswith("unversioned-") for version in versions)
    assert versions[0] != versions[1]
    assert read_served(str(desk.first), "tiny@r0").target_id == "tiny@r0"


def test_a_hub_name_is_its_own_version() -> None:
    assert read_served("owner/drafter", "tiny@r0").version == "unversioned-owner/drafter"


def test_a_damaged_directory_is_not_taken_for_what_serves(desk: Desk) -> None:
    damage(desk.first)
    with pytest.raises(UserError, match=MODEL):
        read_served(str(desk.first), "")


def test_a_model_that_cannot_be_loaded_into_is_refused(desk: Desk) -> None:
    assert checked_module(desk.model) is desk.model
    with pytest.raises(SwapRefused, match="load_weights"):
        checked_module(torch.nn.Linear(1, 1))

"""Hot swaps of a running server: either whole, or the last good drafter serves on and requests go on."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from drafters.checkpoint import drafter_digest
from drafters.identity import TargetIdentity
from serving_bridge import sglang_server
from serving_bridge.server import ServerLost, SwapError
from serving_bridge.sglang_http import ServerAddress, SGLangClient
from serving_bridge.sglang_server import KEPT_DRAFTERS, SGLangServer, SharedTensors
from tests.serving_bridge.fake_sglang import (
    BEGIN,
    CHECK,
    CONTINUE,
    DROP,
    END,
    INFO,
    PAUSE,
    TENSORS,
    FakeSGLang,
    serving,
)
from tests.serving_bridge.swap_samples import (
    MODEL,
    FakeDraftModel,
    damage,
    make_store,
    same_bits,
    snapshot,
    weights_of,
    write_drafter,
)

REFUSED = (400, {"success": False, "message": "not today"})
BROKEN = (500, {"message": "internal error"})


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


class Desk:
    """A server with the plugin, serving `first`, and a client that knows its drafter root."""

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.root.mkdir()
        self.first = write_drafter(base / "v1", seed=1)
        self.second = write_drafter(base / "v2", seed=2)
        model = FakeDraftModel(self.first)
        self.fake = FakeSGLang(model=model, store=make_store(model, self.first, self.root))

    def server(self, **changes: Any) -> SGLangServer:
        settings: dict[str, Any] = {"drafter_root": self.root, "sleep": lambda seconds: time.sleep(0.01)}
        return SGLangServer(SGLangClient(ServerAddress(self.fake.url)), **(settings | changes))

    def serves(self, directory: Path) -> bool:
        assert self.fake.model is not None
        same = same_bits(snapshot(self.fake.model), weights_of(directory))
        return self.fake.version == directory.name and same and not self.fake.paused

    def refusal(self, directory: Path | None = None, **changes: Any) -> str:
        """The message of a swap that does not happen; `ServerLost` is not meant here."""
        with pytest.raises(SwapError) as caught:
            self.server(**changes).swap(directory or self.second)
        assert not isinstance(caught.value, ServerLost), caught.value
        return str(caught.value)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    with serving(made.fake):
        yield made


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# addresses and keys


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.5:30000", "https://serving.example:443", "http://0.0.0.0:30000", "http://[::]:3000"],
)
def test_an_address_off_this_machine_needs_a_key(url: str) -> None:
    with pytest.raises(ValueError, match="--admin-api-key"):
        ServerAddress(url)
    assert ServerAddress(url, admin_key="k").url == url
    assert ServerAddress(url, api_key="k").url == url


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "http://localhost:1", "http://[::1]:30000"])
def test_this_machine_needs_no_key(url: str) -> None:
    assert ServerAddress(url).url == url


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "ftp://localhost:1", "http://", "/path"])
def test_an_address_must_be_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        ServerAddress(url, admin_key="k")


def test_a_trailing_slash_does_no_harm(desk: Desk) -> None:
    client = SGLangClient(ServerAddress(desk.fake.url + "/"))
    assert client.server_info()["tp_size"] == 1
    assert desk.fake.calls == [INFO]


@pytest.mark.parametrize("keys", [{"admin_key": "wrong"}, {"api_key": "wrong"}, {}])
def test_a_wrong_key_is_told(desk: Desk, keys: dict[str, str]) -> None:
    desk.fake.key = "right"
    server = SGLangServer(SGLangClient(ServerAddress(desk.fake.url, **keys)), drafter_root=desk.root)
    with pytest.raises(SwapError, match="refuses the key"):
        server.swap(desk.second)
    assert desk.fake.controls() == []


def test_each_class_of_endpoints_gets_its_own_key(desk: Desk) -> None:
    desk.fake.key, desk.fake.admin_key = "users", "operators"
    address = ServerAddress(desk.fake.url, api_key="users", admin_key="operators")
    server = SGLangServer(SGLangClient(address), drafter_root=desk.root)
    assert server.swap(desk.second).new_version == "v2"


def test_this_machine_is_not_reached_through_a_proxy(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    assert desk.server().drafter_version == "v1"


def test_a_server_that_is_down_is_lost(desk: Desk) -> None:
    desk.fake.url = f"http://127.0.0.1:{closed_port()}"
    server = desk.server()
    with pytest.raises(ServerLost, match="is the server running"):
        server.swap(desk.second)
    with pytest.raises(ServerLost, match="is the server running"):
        _ = server.drafter_version


def test_an_error_that_is_no_json_is_shown(desk: Desk) -> None:
    desk.fake.before[INFO] = lambda body: (502, "Bad Gateway")
    assert "502" in desk.refusal()


# swaps through a directory


def test_a_swap_reports_what_it_did(desk: Desk) -> None:
    before = desk.fake.draft_checksum()
    report = desk.server().swap(desk.second)
    assert desk.serves(desk.second)
    assert (report.old_version, report.new_version, report.route) == ("v1", "v2", "directory")
    assert (report.old_draft_checksum, report.draft_checksum) == (before, desk.fake.draft_checksum())
    assert report.draft_checksum != before
    assert report.target_checksum == "target-0"
    assert report.pause_ms > 0
    assert desk.fake.steps == ["stage", "commit"]
    assert desk.server().drafter_version == "v2"


def test_requests_wait_for_single_orders_only(desk: Desk) -> None:
    """Reading the weights takes long, so it happens while requests run."""
    desk.server().swap(desk.second)
    assert desk.fake.controls() == [PAUSE, TENSORS, CONTINUE] * 2


def test_the_servers_own_weight_version_changes_with_the_commit(desk: Desk) -> None:
    desk.server().swap(desk.second)
    assert [body["weight_version"] for body in desk.fake.bodies_of(TENSORS)] == [None, "v2"]


def test_the_target_is_not_summed_unless_asked(desk: Desk) -> None:
    report = desk.server(verify_target=False).swap(desk.second)
    assert {body["selector"] for body in desk.fake.bodies_of(CHECK)} == {"draft"}
    assert report.target_checksum == ""


def test_swaps_follow_one_another(desk: Desk, tmp_path: Path) -> None:
    server = desk.server()
    server.swap(desk.second)
    third = write_drafter(tmp_path / "v3", seed=3)
    report = server.swap(third)
    assert (report.old_version, report.new_version) == ("v2", "v3")
    assert desk.serves(third)


def test_rolling_back_brings_the_drafter_before(desk: Desk) -> None:
    server = desk.server()
    server.swap(desk.second)
    assert server.roll_back() == "v1"
    assert desk.serves(desk.first)


# swaps that do not happen


def test_a_damaged_directory_is_refused_before_any_call(desk: Desk) -> None:
    damage(desk.second)
    assert MODEL in desk.refusal()
    assert desk.fake.calls == []


def test_another_block_size_is_refused_before_anything_is_sent(desk: Desk) -> None:
    desk.fake.plugin["block_size"] = 8
    assert "block size" in desk.refusal()
    assert desk.fake.calls == [INFO]
    assert list(desk.root.iterdir()) == []


def test_a_plugin_that_is_not_whole_is_refused(desk: Desk) -> None:
    desk.fake.plugin["missing_hooks"] = ["sglang.some.Hook"]
    assert "sglang.some.Hook" in desk.refusal()
    assert desk.fake.calls == [INFO]


def test_without_a_drafter_root_the_setting_is_named(desk: Desk) -> None:
    assert "sglang.drafter_root" in desk.refusal(drafter_root=None)
    assert desk.fake.calls == [INFO]


def test_a_drafter_of_another_shape_is_refused_by_the_server(desk: Desk, tmp_path: Path) -> None:
    assert "intermediate_size" in desk.refusal(write_drafter(tmp_path / "v3", seed=3, width=32))
    assert desk.serves(desk.first)


def test_a_root_that_cannot_hold_the_drafter_is_told(desk: Desk) -> None:
    place = desk.root / f"drafter-{drafter_digest(desk.second)[:16]}"
    place.write_text("a file stands here")
    assert str(desk.root) in desk.refusal()
    assert desk.serves(desk.first)
    assert list(desk.root.iterdir()) == [place]


def corrupt_placed(desk: Desk) -> None:
    for place in desk.root.glob("drafter-*"):
        damage(place)


def test_a_directory_damaged_on_the_way_is_refused(desk: Desk) -> None:
    desk.fake.before["stage"] = lambda body: corrupt_placed(desk)
    assert "checksum differs" in desk.refusal()
    assert desk.serves(desk.first)


def test_a_damaged_copy_is_replaced_by_the_next_swap(desk: Desk) -> None:
    desk.fake.before["stage"] = lambda body: corrupt_placed(desk)
    desk.refusal()
    desk.fake.before.clear()
    desk.server().swap(desk.second)
    assert desk.serves(desk.second)
    assert len(list(desk.root.iterdir())) == 1


@pytest.mark.parametrize("step", ["stage", "commit"])
def test_a_server_restarted_in_between_has_forgotten_the_drafter(desk: Desk, step: str) -> None:
    hooks = desk.fake.after if step == "stage" else desk.fake.before
    hooks[step] = lambda body: desk.fake.forget_staged(desk.first, desk.root)
    message = desk.refusal()
    assert ("restarted" if step == "stage" else "not staged") in message
    assert desk.serves(desk.first)


def read_slowly(desk: Desk, polls: int) -> None:
    """The server says of so many calls that it is still reading the staged drafter."""
    left = [polls]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        info = desk.fake.server_info()
        staged = info["internal_states"][0]["draftsmith"]["drafter"]["staged"]
        if staged is not None and left[0]:
            left[0] -= 1
            staged["ready"] = False
        elif staged is not None and desk.fake.store is not None:
            desk.fake.store.wait_staged()
            info = desk.fake.server_info()
        return 200, info

    desk.fake.before[INFO] = answer


def test_the_client_waits_until_the_drafter_is_read(desk: Desk) -> None:
    waits: list[float] = []
    read_slowly(desk, polls=3)
    desk.server(sleep=waits.append).swap(desk.second)
    assert len(waits) == 3
    assert desk.serves(desk.second)


def test_a_drafter_that_takes_too_long_to_read_is_given_up(desk: Desk) -> None:
    read_slowly(desk, polls=10**6)
    assert "still reading" in desk.refusal(deadline_s=0.0)
    assert desk.fake.steps == ["stage"]
    assert desk.serves(desk.first)


def change_target(desk: Desk) -> None:
    desk.fake.target = "target-1"


def test_a_changed_target_takes_the_swap_back(desk: Desk) -> None:
    desk.fake.after["commit"] = lambda body: change_target(desk)
    message = desk.refusal()
    assert "target's weights changed" in message
    assert "rolled back to v1" in message
    assert desk.fake.steps == ["stage", "commit", "rollback"]
    assert desk.serves(desk.first)


def test_a_commit_that_does_nothing_is_noticed(desk: Desk) -> None:
    desk.fake.before["commit"] = lambda body: (200, {"success": True, "message": "serving v2"})
    desk.refusal()
    assert desk.serves(desk.first)


def test_a_rollback_that_fails_leaves_a_lost_server(desk: Desk) -> None:
    desk.fake.after["commit"] = lambda body: change_target(desk)
    desk.fake.before["rollback"] = lambda body: REFUSED
    with pytest.raises(ServerLost, match="target's weights changed"):
        desk.server().swap(desk.second)
    assert not desk.fake.paused


def test_checks_that_fail_after_the_commit_take_the_swap_back(desk: Desk) -> None:
    def break_checks(body: dict[str, Any]) -> None:
        desk.fake.before[CHECK] = lambda body: BROKEN

    desk.fake.after["commit"] = break_checks
    with pytest.raises(SwapError) as caught:
        desk.server().swap(desk.second)
    assert desk.serves(desk.first) or isinstance(caught.value, ServerLost)


@pytest.mark.parametrize("answer", [{"success": True, "message": ""}, {"ranks": []}, {"ranks": [{}]}, []])
def test_a_checksum_that_was_not_given_is_not_taken_for_one(desk: Desk, answer: Any) -> None:
    desk.fake.before[CHECK] = lambda body: (200, answer)
    desk.refusal()
    assert desk.serves(desk.first)


# requests always go on


def forbid(desk: Desk, place: str, answer: tuple[int, Any], late: bool) -> None:
    (desk.fake.after if late else desk.fake.before)[place] = lambda body: answer


@pytest.mark.parametrize("late", [False, True], ids=["unheard", "done"])
@pytest.mark.parametrize("answer", [REFUSED, BROKEN, DROP], ids=["refused", "broken", "dropped"])
@pytest.mark.parametrize("step", ["stage", "commit"])
def test_requests_go_on_whatever_happens(desk: Desk, step: str, answer: tuple[int, Any], late: bool) -> None:
    forbid(desk, step, answer, late)
    with pytest.raises(SwapError) as caught:
        desk.server().swap(desk.second)
    assert not desk.fake.paused
    controls = desk.fake.controls()
    assert controls[-1] == CONTINUE
    assert controls.count(PAUSE) <= controls.count(CONTINUE)
    assert isinstance(caught.value, ServerLost) == (answer == DROP)
    # also where the server did what it was asked, and only the answer was lost
    assert desk.serves(desk.first)


@pytest.mark.parametrize("answer", [BROKEN, DROP], ids=["broken", "dropped"])
def test_requests_go_on_after_a_pause_whose_answer_was_lost(desk: Desk, answer: tuple[int, Any]) -> None:
    forbid(desk, PAUSE, answer, late=True)
    with pytest.raises(SwapError):
        desk.server().swap(desk.second)
    assert not desk.fake.paused
    assert desk.fake.steps == []


def test_going_on_is_tried_again(desk: Desk) -> None:
    refusals = [BROKEN, DROP]
    desk.fake.before[CONTINUE] = lambda body: refusals.pop() if refusals else None
    desk.server().swap(desk.second)
    assert desk.serves(desk.second)
    assert refusals == []


def test_a_server_that_does_not_go_on_is_lost(desk: Desk) -> None:
    desk.fake.before[CONTINUE] = lambda body: BROKEN
    with pytest.raises(ServerLost):
        desk.server().swap(desk.second)


# directories below the root


def test_the_same_drafter_is_placed_once(desk: Desk, tmp_path: Path) -> None:
    server = desk.server()
    for directory in (desk.second, write_drafter(tmp_path / "v3", seed=3), desk.second):
        server.swap(directory)
    assert desk.serves(desk.second)
    assert len(list(desk.root.iterdir())) == 2


def test_old_directories_leave_and_the_served_one_stays(desk: Desk, tmp_path: Path) -> None:
    (desk.root / "notes").mkdir()
    server = desk.server()
    for number in range(3, 3 + KEPT_DRAFTERS + 3):
        for place in desk.root.iterdir():
            os.utime(place, (2**33, 2**33))  # whatever another machine's clock says
        server.swap(write_drafter(tmp_path / f"v{number}", seed=number))
        assert desk.fake.store is not None
        served = desk.root / Path(desk.fake.store.served.directory).name
        assert (served / MODEL).is_file()
    placed = list(desk.root.glob("drafter-*"))
    assert KEPT_DRAFTERS <= len(placed) <= KEPT_DRAFTERS + 2
    assert (desk.root / "notes").is_dir(), "what we did not put there is not ours"


def test_the_drafter_before_stays_for_a_rollback(desk: Desk, tmp_path: Path) -> None:
    server = desk.server()
    for number in range(3, 3 + KEPT_DRAFTERS + 1):
        server.swap(write_drafter(tmp_path / f"v{number}", seed=number))
    early = write_drafter(tmp_path / "early", seed=90)
    os.utime(early, (1, 1))
    server.swap(early)
    server.swap(write_drafter(tmp_path / "late", seed=91))
    assert server.roll_back() == "early"
    assert desk.fake.store is not None
    assert (desk.root / Path(desk.fake.store.served.directory).name / MODEL).is_file()


# stock servers


class Sharing:
    """Stands in for the process that shares tensors."""

    def __init__(self) -> None:
        self.shared: list[str] = []
        self.events: list[str] = []
        self.failure: SwapError | None = None

    def __call__(self, directory: Path, ranks: int) -> Sharing:
        self.shared = [f"tensors of {directory.name}"] * ranks
        return self

    def __enter__(self) -> list[str]:
        if self.failure is not None:
            raise self.failure
        self.events.append("shared")
        return self.shared

    def __exit__(self, *_: object) -> None:
        self.events.append("released")


class Stock:
    """A server without the plugin, serving `first`."""

    def __init__(self, base: Path, sharing: Sharing) -> None:
        self.first = write_drafter(base / "v1", seed=1)
        self.second = write_drafter(base / "v2", seed=2)
        self.sharing = sharing
        self.fake = FakeSGLang(
            info={"device": "cpu", "tp_size": 2, "speculative_draft_model_path": str(self.first)}
        )
        self.fake.before[TENSORS] = lambda body: sharing.events.append("sent")

    def server(self, **changes: Any) -> SGLangServer:
        return SGLangServer(SGLangClient(ServerAddress(self.fake.url)), **changes)

    def sent(self) -> list[str]:
        return [body["serialized_named_tensors"][0] for body in self.fake.bodies_of(TENSORS)]

    def refusal(self, directory: Path | None = None, **changes: Any) -> str:
        with pytest.raises(SwapError) as caught:
            self.server(**changes).swap(directory or self.second)
        assert not isinstance(caught.value, ServerLost), caught.value
        return str(caught.value)


@pytest.fixture
def stock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    sharing = Sharing()
    monkeypatch.setattr(sglang_server, "SharedTensors", sharing)
    made = Stock(tmp_path, sharing)
    with serving(made.fake):
        yield made


def test_a_stock_server_is_sent_the_tensors(stock: Stock) -> None:
    server = stock.server()
    before = stock.fake.draft_checksum()
    report = server.swap(stock.second)
    assert stock.fake.controls() == [PAUSE, BEGIN, TENSORS, END, CONTINUE]
    assert [body["selector"] for body in stock.fake.bodies_of(CHECK)] == ["draft", "target"] * 2
    (body,) = stock.fake.bodies_of(TENSORS)
    assert body["serialized_named_tensors"] == ["tensors of v2"] * 2, "one for each rank"
    assert (body["load_format"], body["weight_version"]) == (None, "v2")
    assert stock.sharing.events == ["shared", "sent", "released"]
    assert (report.old_version, report.new_version, report.route) == ("v1", "v2", "tensors")
    assert (report.old_draft_checksum, report.draft_checksum) == (before, stock.fake.draft_checksum())
    assert "prefix cache" in report.note
    assert server.last_good == stock.second
    assert server.drafter_version == "v2"


def test_a_stock_server_needs_a_drafter_to_go_back_to(stock: Stock) -> None:
    del stock.fake.info["speculative_draft_model_path"]
    assert "go back to" in stock.refusal()
    assert stock.fake.calls == [INFO]
    assert stock.server(last_good=stock.first).swap(stock.second).new_version == "v2"


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_stock_server_on_a_gpu_is_refused(stock: Stock, device: str) -> None:
    stock.fake.info["device"] = device
    assert "install the plugin" in stock.refusal()
    assert stock.fake.calls == [INFO]


def test_a_stock_server_cannot_roll_back(stock: Stock) -> None:
    with pytest.raises(SwapError, match="plugin"):
        stock.server().roll_back()
    assert stock.fake.controls() == []


def test_tensors_of_another_shape_never_reach_a_stock_server(stock: Stock, tmp_path: Path) -> None:
    assert "shape" in stock.refusal(write_drafter(tmp_path / "v3", seed=3, width=32))
    assert stock.fake.calls == [INFO]


def block_of_eight(place: Path) -> Path:
    return write_drafter(place, seed=3, block_size=8)


def other_target(place: Path) -> Path:
    return write_drafter(place, seed=3, identity=TargetIdentity("large", "r0", "0" * 16))


def other_layers(place: Path) -> Path:
    return write_drafter(place, seed=3, layer_ids=(0, 1))


@pytest.mark.parametrize("write", [block_of_eight, other_target, other_layers])
def test_another_kind_of_drafter_never_reaches_a_stock_server(
    stock: Stock, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    stock.refusal(write(tmp_path / "v3"))
    assert stock.fake.controls() == []


def fail_first(answer: tuple[int, Any]) -> Callable[[dict[str, Any]], tuple[int, Any] | None]:
    answers = [answer]
    return lambda body: answers.pop() if answers else None


@pytest.mark.parametrize("answer", [REFUSED, BROKEN], ids=["refused", "broken"])
def test_a_failed_update_puts_the_last_good_drafter_back(stock: Stock, answer: tuple[int, Any]) -> None:
    before = stock.fake.draft_checksum()
    stock.fake.after[TENSORS] = fail_first(answer)
    server = stock.server()
    with pytest.raises(SwapError) as caught:
        server.swap(stock.second)
    assert not isinstance(caught.value, ServerLost)
    assert stock.sent() == ["tensors of v2", "tensors of v1"]
    assert stock.fake.controls() == [PAUSE, BEGIN, TENSORS, END, CONTINUE] * 2
    assert (stock.fake.draft_checksum(), stock.fake.version) == (before, "v1")
    assert not stock.fake.paused
    assert server.last_good is None


def test_a_changed_target_puts_the_last_good_drafter_back(stock: Stock) -> None:
    def change(body: dict[str, Any]) -> None:
        stock.fake.target = "target-1"

    stock.fake.after[TENSORS] = change
    assert "target's weights changed" in stock.refusal()
    assert stock.sent() == ["tensors of v2", "tensors of v1"]


def test_a_stock_server_that_takes_nothing_back_is_lost(stock: Stock) -> None:
    stock.fake.after[TENSORS] = lambda body: REFUSED
    with pytest.raises(ServerLost, match="restart the server"):
        stock.server().swap(stock.second)
    assert not stock.fake.paused


def test_without_an_answer_nothing_more_is_sent(stock: Stock) -> None:
    stock.fake.after[TENSORS] = lambda body: DROP
    with pytest.raises(ServerLost):
        stock.server().swap(stock.second)
    assert stock.sent() == ["tensors of v2"]
    assert not stock.fake.paused


def test_tensors_that_cannot_be_shared_change_nothing(stock: Stock) -> None:
    stock.sharing.failure = SwapError("its tensors could not be shared")
    assert "could not be shared" in stock.refusal()
    assert stock.fake.controls() == []


def test_a_last_good_drafter_that_is_gone_is_told(stock: Stock, tmp_path: Path) -> None:
    assert "gone" in stock.refusal(last_good=tmp_path / "gone")
    assert stock.fake.controls() == []


# sharing tensors


def test_a_process_shares_the_tensors_of_a_checkpoint(tmp_path: Path) -> None:
    directory = write_drafter(tmp_path / "v1", seed=1)
    sharing = SharedTensors(directory, 2)
    with sharing as payloads:
        assert sharing._process is not None
        assert sharing._process.poll() is None, "the memory lasts as long as its process"
        assert len(payloads) == 2
        assert payloads[0] == payloads[1]
        shared = dict(pickle.loads(base64.b64decode(payloads[0])))
        expected = load_file(directory / MODEL)
        assert all(tensor.is_shared() for tensor in shared.values())
        assert same_bits(shared, expected)
    assert sharing._process.returncode == 0, "it left by itself"


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SwapError, match="could not be shared"), SharedTensors(tmp_path, 1):
        pass

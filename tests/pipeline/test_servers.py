"""Drafters in several running servers: all or none, and what status says of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from drafters.errors import UserError
from pipeline.cli_deploy import deploy_app
from pipeline.config import Config
from pipeline.doctor_sglang import examine_server, plugin_checks
from pipeline.fleet import connect, inspect, launch_of
from pipeline.lock import trainer_lock
from pipeline.registry import RegisteredVersion
from pipeline.stages.servers import registered_version, swap_all
from serving_bridge.sglang_http import ServerAddress, SGLangClient
from serving_bridge.sglang_server import SGLangServer
from tests.serving_bridge.fake_sglang import FakeSGLang, serving
from tests.serving_bridge.swap_samples import FakeDraftModel, damage, make_store, write_drafter


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "first", seed=1)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return write_drafter(tmp_path / "second", seed=2)


@pytest.fixture
def fakes(tmp_path: Path, first: Path) -> Iterator[list[FakeSGLang]]:
    """Two servers of the first drafter."""
    root = tmp_path / "drafters"
    models = [FakeDraftModel(first) for _ in range(2)]
    servers = [FakeSGLang(model=model, store=make_store(model, first, root)) for model in models]
    with serving(servers[0]), serving(servers[1]):
        yield servers


def clients(fakes: list[FakeSGLang], root: Path) -> list[SGLangServer]:
    return [SGLangServer(SGLangClient(ServerAddress(fake.url)), drafter_root=root) for fake in fakes]


def config(tmp_path: Path, **sglang: Any) -> Config:
    return Config.model_validate(
        {
            "output": str(tmp_path),
            "target": {"model": "tiny:qwen3"},
            "data": {"train": [{"path": "x.jsonl"}]},
            "sglang": sglang,
        }
    )


def test_all_servers_are_swapped(fakes: list[FakeSGLang], second: Path, tmp_path: Path) -> None:
    reports = swap_all(clients(fakes, tmp_path / "drafters"), second)
    assert [fake.version for fake in fakes] == ["second", "second"]
    assert [(r.old_version, r.new_version) for r in reports] == [("first", "second")] * 2


def test_one_that_refuses_takes_the_others_back(
    fakes: list[FakeSGLang], second: Path, tmp_path: Path
) -> None:
    fakes[1].before["commit"] = lambda body: (400, {"success": False, "message": "no room"})
    with pytest.raises(UserError, match=r"no room.*is back on first"):
        swap_all(clients(fakes, tmp_path / "drafters"), second)
    assert [fake.version for fake in fakes] == ["first", "first"]


def test_a_damaged_drafter_changes_no_server(fakes: list[FakeSGLang], second: Path, tmp_path: Path) -> None:
    damage(second)
    with pytest.raises(UserError, match="no server was changed"):
        swap_all(clients(fakes, tmp_path / "drafters"), second)
    assert not fakes[0].controls() and not fakes[1].controls()


def test_a_server_that_is_down_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.*is the server running"):
        connect(config(tmp_path), ["http://127.0.0.1:9"])
    state = inspect(config(tmp_path), "http://127.0.0.1:9")
    assert state.problem and not state.drafter_version


def test_status_tells_a_stock_server_from_one_with_the_plugin(
    fakes: list[FakeSGLang], tmp_path: Path
) -> None:
    found = inspect(config(tmp_path), fakes[0].url)
    assert (found.drafter_version, found.problem) == ("first", "")
    fakes[1].plugin = {"missing_hooks": ["a.b"]}
    assert "a.b" in inspect(config(tmp_path), fakes[1].url).problem
    stock = FakeSGLang()
    with serving(stock):
        assert inspect(config(tmp_path), stock.url).problem == "no draftsmith plugin"
        checks = examine_server(stock.url)
    assert checks[-1].blocking and "pip install --no-deps draftsmith" in checks[-1].follows


def test_an_address_off_this_machine_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_ADMIN_KEY", raising=False)
    with pytest.raises(UserError, match="SGLANG_ADMIN_KEY"):
        connect(config(tmp_path), ["http://10.1.2.3:30000"])


def test_the_plugins_status_becomes_findings() -> None:
    status: dict[str, Any] = {
        "plugin_version": "1",
        "sglang_version": "0.5.99",
        "tested_with": "0.5.23",
        "hooks": 9,
        "missing_hooks": [],
        "drafter": {"drafter_version": "v", "swaps": 1, "last_problem": "no room"},
        "records": {"written": 3, "dropped": 2, "last_error": "disk full"},
        "log": "/spool",
        "verify": "static",
        "sampling_verified": False,
    }
    found = {check.name: check for check in plugin_checks(status)}
    assert {name for name, check in found.items() if check.status != "ok"} == {
        "version",
        "records",
        "verification",
        "sampling",
    }
    assert "disk full" in found["records"].follows and "no room" in found["drafter"].follows
    whole = plugin_checks({**status, "missing_hooks": ["x.y"]})
    assert whole[0].blocking and "x.y" in whole[0].found


def test_a_launch_follows_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ADMIN_KEY", "secret")
    settings = config(tmp_path, launch={"preset": "cpu", "port": 31000, "algorithm": "DFLASH"}, log_share=0.5)
    launch = launch_of(settings, tmp_path / "d", "model")
    assert launch.settings.log == str(tmp_path / "spool")
    assert launch.settings.swap_root == str(tmp_path / "drafters")
    assert launch.settings.log_share == 0.5
    words = launch.arguments()
    assert words[words.index("--port") + 1] == "31000"
    assert words[words.index("--admin-api-key") + 1] == "secret"
    assert "secret" not in launch.shown()


def test_a_drafter_is_launched_by_an_algorithm_of_its_family(tmp_path: Path) -> None:
    drafter = tmp_path / "d"
    drafter.mkdir()
    for family, algorithm, other in (("d3d", "D3D", "ADAFLASH"), ("dflash", "DFLASH", "D3D")):
        (drafter / "manifest.json").write_text(json.dumps({"family": family}))
        fitting = config(tmp_path, launch={"algorithm": algorithm})
        assert launch_of(fitting, drafter, "model").algorithm == algorithm
        with pytest.raises(UserError, match=rf"{other} does not serve drafters of family {family}"):
            launch_of(config(tmp_path, launch={"algorithm": other}), drafter, "model")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, 2),
        ("models:/m@champion", 2),
        ("models:/m@previous-champion", 1),
        ("models:/m/1", 1),
        ("models:/other@champion", "registered as m"),
        ("models:/m@nobody", "no alias"),
        ("models:/m", "write models:/"),
    ],
)
def test_registered_drafters_go_by_alias_or_number(name: str | None, expected: int | str) -> None:
    versions = [
        RegisteredVersion(1, ("previous-champion",), {}, None, 0),
        RegisteredVersion(2, ("champion",), {}, None, 0),
    ]
    registry: Any = SimpleNamespace(
        model_name="m",
        champion=lambda: versions[1],
        get=lambda number: versions[number - 1],
        list_versions=lambda: versions,
    )
    if isinstance(expected, int):
        assert registered_version(registry, name).version == expected
    else:
        with pytest.raises(UserError, match=expected):
            registered_version(registry, name)


def test_two_trainers_do_not_share_an_output(tmp_path: Path) -> None:
    with (
        trainer_lock(tmp_path / "online"),
        pytest.raises(UserError, match="another online trainer"),
        trainer_lock(tmp_path / "online"),
    ):
        pass
    with trainer_lock(tmp_path / "online"):
        pass


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["quickstart"], ["register", "quickstart"]),
        (["quickstart", "--to", "http://x"], ["swap", "quickstart", "--to", "http://x"]),
        (["quickstart", "--launch", "--print"], ["launch", "quickstart", "--print"]),
        (["status", "quickstart"], ["status", "quickstart"]),
        (["--help"], ["--help"]),
    ],
)
def test_deploy_means_register_unless_told_otherwise(args: list[str], expected: list[str]) -> None:
    group: Any = typer.main.get_command(deploy_app)
    assert group.with_command(args) == expected


@pytest.mark.parametrize("name", ["survival", "throughput"])
def test_policies_that_the_plugin_lacks_are_not_launched(tmp_path: Path, name: str) -> None:
    settings = config(tmp_path)
    settings = settings.model_copy(update={"policy": settings.policy.model_copy(update={"name": name})})
    with pytest.raises(UserError, match=rf"^policy\.name: {name} is served by the embedded engine only"):
        launch_of(settings, tmp_path / "d", "model")

"""`draftsmith registry` on SQLite, and on a real MLflow server with SQLite or PostgreSQL behind it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli import app, main
from pipeline.lineage import DataWindow, DomainSums, Lineage
from pipeline.registry import CHALLENGER, CHAMPION, PREVIOUS_CHAMPION, Registry, model_name_for
from pipeline.result import hash_config, hash_path
from pipeline.tracking import Tracking, open_client
from tests.pipeline.mlflow_server import free_port, mlflow_server, postgres, why_no_postgres
from tests.pipeline.test_registry import TARGET, drafter_directory

MODEL = model_name_for(TARGET.target_id, "dflash")
CONFIGS: list[dict[str, Any]] = [
    {
        "name": "nightly",
        "online": {"trigger": 128, "loss": {"alpha": 0.8}},
        "data": {"train": [{"path": "a"}]},
        "schedule": {"store": "postgresql://me:hunter2@db/jobs"},
    },
    {
        "name": "nightly",
        "online": {"trigger": 256, "loss": {"alpha": 0.8}},
        "data": {"train": [{"path": "a"}]},
        "schedule": {"store": "postgresql://me:hunter3@other/jobs"},
    },
]
NO_POSTGRES = why_no_postgres()


def lineage(number: int, config: dict[str, Any]) -> Lineage:
    return Lineage(
        stage="online" if number else "deploy",
        parent=number or None,
        config_hash=hash_config(config),
        git_commit=f"{number}" * 40,
        git_dirty=number == 1,
        data=DataWindow(f"online round {number}", {"math": 10, "c|ode": 5 + number}, 1.7e9, 1.7e9 + 3600),
        baseline={"math": DomainSums(4, 30 + number, 10), "c|ode": DomainSums(3, 20, 10)},
    )


def fill(uri: str, directory: Path) -> None:
    """Two versions with lineage, and one as an older release registered it; version 1 is champion, 2 refused."""
    tracking = Tracking(uri, "test")
    registry = Registry(uri, MODEL)
    for number, config in enumerate(CONFIGS):
        with tracking.run(f"run-{number}") as run:
            run.log_config(config)
            registry.register(
                drafter_directory(directory / f"d{number}", bytes([number])),
                run_id=run.run_id,
                metrics={"tau": 3.0 + number / 10, "tau_math": 3.0, "tau_code": 2.0 + number},
                lineage=lineage(number, config),
            )
    registry.promote(1, reason="first champion")
    registry.set_challenger(2)
    registry.refuse(2, "acceptance length 1.9 vs champion 2.0")
    with tracking.run("old") as run:
        registry.register(drafter_directory(directory / "d2", b"old"), run_id=run.run_id)


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param("server", marks=pytest.mark.slow),
        pytest.param(
            "server on postgres",
            marks=[pytest.mark.slow, pytest.mark.skipif(NO_POSTGRES is not None, reason=NO_POSTGRES or "")],
        ),
    ],
)
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, migrated_database: Path
) -> Iterator[tuple[str, Path]]:
    """Address of a filled store, and the directory with what was registered."""
    directory = tmp_path_factory.mktemp("registry")
    if request.param == "sqlite":
        shutil.copyfile(migrated_database, directory / "mlflow.db")
        uri = f"sqlite:///{directory / 'mlflow.db'}"
        fill(uri, directory)
        yield uri, directory
    elif request.param == "server":
        with mlflow_server(directory) as uri:
            fill(uri, directory)
            yield uri, directory
    else:
        with postgres() as database, mlflow_server(directory, database) as uri:
            fill(uri, directory)
            yield uri, directory


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["registry", *words])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_versions_are_listed_with_what_made_them(store: tuple[str, Path]) -> None:
    uri, _ = store
    found = json.loads(call("list", uri, "--json"))
    assert found["model"] == MODEL
    newest, second, first = found["versions"]
    assert (first["version"], first["aliases"], first["tau"]) == (1, [CHAMPION], 3.0)
    assert first["parent_version"] is None and second["parent_version"] == "1"
    assert second["config_hash"] == hash_config(CONFIGS[1])
    assert second["git_commit"] == "1" * 40 + "-dirty"
    assert second["data_window"] == (
        "online round 1: 16 documents, 2023-11-14 22:13 UTC to 2023-11-14 23:13 UTC"
    )
    assert second["decision"] == "refused: acceptance length 1.9 vs champion 2.0"
    assert newest["tau"] is None and newest["config_hash"] is None and newest["decision"] == "not judged"
    table = call("list", uri)
    lines = [line for line in table.splitlines() if re.match(r"\W*[123] ", line)]
    assert [re.sub(r"\W+", " ", line).split()[0] for line in lines] == ["3", "2", "1"]
    assert "champion" in lines[2] and "3.000" in lines[2] and hash_config(CONFIGS[0])[:8] in lines[2]
    assert "11111111-dirty" in lines[1] and "refused" in lines[1]


def test_card_is_shown_and_kept_as_artifact_and_description(store: tuple[str, Path], tmp_path: Path) -> None:
    uri, _ = store
    card = call("show", uri, "2")
    for text in (
        f"# {MODEL}, version 2",
        "| decision | refused: acceptance length 1.9 vs champion 2.0 |",
        "| parent version | 1 |",
        "| math | 3.100 | 4 | 10 |",
        "| c\\|ode | 2.000 | 3 | 10 |",
        "| math | 10 | 62.5% |",
        TARGET.target_id,
    ):
        assert text in card
    client = open_client(uri)
    version = client.get_model_version(MODEL, "2")
    assert version.description == card
    kept = client.download_artifacts(version.run_id, f"{version.tags['papers']}/card.md", str(tmp_path))
    assert Path(kept).read_text() == card
    content = json.loads(call("show", uri, "2", "--json"))
    assert Lineage.from_json(content["lineage"]) == lineage(1, CONFIGS[1])
    old = call("show", uri, "3")
    assert "not measured" in old and "| data | unknown |" in old


def test_comparison_names_configuration_data_and_metrics(store: tuple[str, Path]) -> None:
    uri, _ = store
    found = json.loads(call("diff", uri, "1", "2", "--json"))
    assert found["config"] == [
        {"name": "online.trigger", "first": 128, "second": 256},
        {
            "name": "schedule.store",
            "first": "postgresql://me:***@db/jobs",
            "second": "postgresql://me:***@other/jobs",
        },
    ]
    assert found["data"] == [{"name": "c|ode", "first": 5, "second": 6}]
    assert {d["name"]: (d["first"], d["second"]) for d in found["metrics"]} == {
        "tau": (3.0, 3.1),
        "tau_code": (2.0, 3.0),
    }
    assert {d["name"] for d in found["origin"]} == {
        "stage",
        "parent_version",
        "data_window",
        "config_hash",
        "git_commit",
    }
    assert found["problems"] == []
    text = call("diff", uri, "1", "2")
    assert re.search(r"online\.trigger\W+128\W+256", text) and "+1.000" in text
    assert "hunter" not in text and "me:***@other" in text
    assert "no difference" in call("diff", uri, "1", "@champion")
    old = json.loads(call("diff", uri, "1", "3", "--json"))
    assert any("version 3 has no record of its data" in problem for problem in old["problems"])
    assert any("config.yaml" in problem for problem in old["problems"])


def test_promotion_and_rollback_by_hand(store: tuple[str, Path], tmp_path: Path) -> None:
    uri, directory = store
    assert "version 2 is champion, version 1 previous champion" in call(
        "promote", uri, "2", "--reason", "looked at it"
    )
    registry = Registry(uri, MODEL)
    assert registry.get(2).aliases == (CHAMPION,) and registry.get(1).aliases == (PREVIOUS_CHAMPION,)
    assert "accepted: by hand: looked at it" in call("show", uri, "champion")
    got = registry.download(CHAMPION, tmp_path / "got")
    assert hash_path(got) == hash_path(directory / "d1")
    assert "version 1 is champion again, version 2 was rolled back" in call(
        "rollback", uri, "--reason", "slow on code"
    )
    assert registry.get(1).aliases == (CHAMPION,)
    assert "| decision | rolled back: slow on code |" in call("show", uri, "2")
    assert "| aliases | champion |" in call("show", uri, "1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["show", "STORE", "99"], "no version 99"),
        (["show", "STORE", CHALLENGER], f"no alias '{CHALLENGER}'"),
        (["diff", "STORE", "1", "nobody"], "no alias 'nobody'"),
        (["promote", "STORE", "99", "--reason", "r"], "no version 99"),
        (["list", "STORE", "--model", "absent"], f"there is {MODEL}"),
        (["list", "STORE", "--model", "a/b"], "no model 'a/b'"),
    ],
)
def test_what_is_not_there_is_named(
    store: tuple[str, Path], words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    refused([store[0] if word == "STORE" else word for word in words], named, capsys)


def refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["registry", *words])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and named in message and message.count("\n") == 1


def test_stores_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    refused(["list", away], away, capsys)
    absent = tmp_path / "absent.db"
    refused(["list", f"sqlite:///{absent}"], str(absent), capsys)
    assert not absent.exists()
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"no database" * 1000)
    refused(["list", f"sqlite:///{garbage}"], "garbage.db", capsys)
    refused(["list", "file:///tmp/mlruns"], "tracking.uri", capsys)
    refused(["list", str(tmp_path / "absent.yaml")], "absent.yaml", capsys)


def test_store_without_or_with_several_models_asks_for_one(
    tracking: Tracking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = tracking.tracking_uri
    refused(["list", uri], "draftsmith deploy", capsys)
    open_client(uri).create_registered_model("somebody-elses")
    for name in ("one", "two"):
        with tracking.run(name) as run:
            Registry(uri, name).register(drafter_directory(tmp_path / name, name.encode()), run_id=run.run_id)
    refused(["list", uri], "name one: one, two", capsys)
    refused(["rollback", uri, "--model", "two", "--reason", "r"], "no previous champion", capsys)
    assert json.loads(call("list", uri, "--model", "two", "--json"))["model"] == "two"


def test_card_that_cannot_be_written_holds_no_promotion_up(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tracking.tracking_uri, MODEL)
    with tracking.run("r") as run:
        registry.register(
            drafter_directory(tmp_path / "d", b"w"), run_id=run.run_id, lineage=lineage(0, CONFIGS[0])
        )

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("the artifact store is full")

    monkeypatch.setattr(registry._client, "log_text", fails)
    registry.promote(1)
    assert registry.get(1).aliases == (CHAMPION,)


@pytest.mark.slow
def test_configuration_of_a_run_leads_to_its_registry(run: Path) -> None:
    found = json.loads(call("list", "tiny.yaml", "--json"))
    named = json.loads(Path("out/result.json").read_text())["metrics"]["registry"]
    assert found["model"] == named["model_name"]
    by_alias = {alias: v for v in found["versions"] for alias in v["aliases"]}
    assert by_alias[CHAMPION]["version"] == named["champion_version"]
    for version in found["versions"]:
        assert version["config_hash"] and version["data_window"] and version["stage"]
    drill = next(v for v in found["versions"] if "gate drill" in v["data_window"])
    assert drill["decision"].startswith("refused")


def test_promotion_of_what_the_gate_refused_or_never_saw_is_warned_of(
    tracking: Tracking, tmp_path: Path
) -> None:
    registry = Registry(tracking.tracking_uri, MODEL)
    with tracking.run("r") as run:
        for number in range(3):
            directory = drafter_directory(tmp_path / f"d{number}", bytes([number]))
            registry.register(directory, run_id=run.run_id)
    registry.refuse(2, "worse on code")
    registry.accept(3, "better")
    for version, warning in (("1", "never judged"), ("2", "was refused: worse on code"), ("3", "")):
        result = CliRunner().invoke(
            app, ["registry", "promote", tracking.tracking_uri, version, "--reason", "r"]
        )
        assert result.exit_code == 0 and f"version {version} is champion" in result.stdout
        assert warning in result.stderr and bool(warning) == bool(result.stderr)

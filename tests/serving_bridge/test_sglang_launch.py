"""The command that starts SGLang: what it holds, and what is never shown."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from serving_bridge.sglang_cpu import ENABLE_VARIABLE, KERNELS
from serving_bridge.sglang_launch import IMAGE, Launch
from serving_bridge.sglang_plugin.settings import (
    SETTINGS_VARIABLE,
    LengthSettings,
    PluginSettings,
    load_settings,
)

SETTINGS = PluginSettings(log="/data/spool", swap_root="/data/drafters", length=LengthSettings(gamma=1.5))


def launch(**changes: Any) -> Launch:
    fields: dict[str, Any] = {
        "python": "/venv/bin/python",
        "model": "/models/target",
        "drafter": Path("/models/drafter v1"),
        "settings": SETTINGS,
    }
    return Launch(**(fields | changes))


def options(words: list[str]) -> dict[str, str | None]:
    """Options with their values; None for one that stands alone."""
    found: dict[str, str | None] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if following.startswith("--") else following
    return found


def pasted(text: str) -> list[str]:
    """Words as a shell reads them."""
    return shlex.split(text.replace("\\\n", " "))


def test_the_command_starts_the_server_with_target_and_drafter() -> None:
    words = launch(port=1234).arguments()
    assert words[:3] == ["/venv/bin/python", "-m", "sglang.launch_server"]
    assert options(words) == {
        "--model-path": "/models/target",
        "--speculative-algorithm": "ADAFLASH",
        "--speculative-draft-model-path": "/models/drafter v1",
        "--host": "127.0.0.1",
        "--port": "1234",
    }


def test_capacity_and_keys_are_given_where_set() -> None:
    words = launch(
        algorithm="DFLASH", max_total_tokens=5, max_running=6, context_length=7, api_key="a", admin_key="b"
    ).arguments()
    found = options(words)
    assert [found[n] for n in ("--max-total-tokens", "--max-running-requests", "--context-length")] == [
        "5", "6", "7",
    ]  # fmt: skip
    assert (found["--speculative-algorithm"], found["--api-key"], found["--admin-api-key"]) == (
        "DFLASH",
        "a",
        "b",
    )


def test_further_arguments_come_last() -> None:
    extra = ("--enable-metrics", "--log-level", "info")
    for preset in ("cuda", "cpu"):
        assert tuple(launch(preset=preset, extra=extra).arguments()[-3:]) == extra


def test_on_the_cpu_capacity_is_always_bounded() -> None:
    found = options(launch(preset="cpu").arguments())
    assert (found["--device"], found["--attention-backend"]) == ("cpu", "torch_native")
    for name in ("--max-total-tokens", "--max-running-requests", "--context-length"):
        value = found[name]
        assert value is not None
        assert int(value) > 0
    assert options(launch(preset="cpu", max_running=3).arguments())["--max-running-requests"] == "3"


def test_the_plugin_reads_the_same_settings_back() -> None:
    assert load_settings(launch().variables()[SETTINGS_VARIABLE]) == SETTINGS


def test_a_gpu_server_gets_the_settings_only() -> None:
    assert set(launch().variables()) == {SETTINGS_VARIABLE}


@pytest.mark.parametrize("there", [None, "/mine:/yours"])
def test_the_cpu_preset_keeps_the_python_path(monkeypatch: pytest.MonkeyPatch, there: str | None) -> None:
    if there is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", there)
    variables = launch(preset="cpu", threads=3).variables()
    assert variables["PYTHONPATH"] == (str(KERNELS) if there is None else f"{KERNELS}{os.pathsep}{there}")
    assert (variables["OMP_NUM_THREADS"], variables[ENABLE_VARIABLE]) == ("3", "1")
    assert KERNELS.is_dir()


def test_the_environment_holds_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "kept")
    environment = launch().environment()
    assert environment["SOME_VARIABLE"] == "kept"
    assert SETTINGS_VARIABLE in environment


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "serving.example"])
def test_a_server_for_other_machines_needs_a_key(host: str) -> None:
    for keys in ({}, {"api_key": "k"}):
        # an API key is every user's
        with pytest.raises(ValueError, match="give an admin key"):
            launch(host=host, **keys)
    assert launch(host=host, admin_key="k").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_server_for_this_machine_needs_none(host: str) -> None:
    assert options(launch(host=host).arguments())["--host"] == host


# what is shown


@pytest.mark.parametrize("preset", ["cuda", "cpu"])
def test_what_is_shown_can_be_pasted(preset: str) -> None:
    started = launch(preset=preset, extra=("--chat-template", "it's here"))
    variables = [f"{name}={value}" for name, value in sorted(started.variables().items())]
    assert pasted(started.shown()) == [*variables, *started.arguments()]


def test_what_is_shown_can_be_pasted_whatever_the_arguments_hold() -> None:
    started = launch(extra=("--note", "first --second"))
    assert pasted(started.shown())[-1] == "first --second"
    assert "first --second" in started.shown()


def test_keys_are_not_shown() -> None:
    started = launch(api_key="s3cret-a", admin_key="s3cret-b")
    assert "s3cret" not in started.shown()
    found = options(pasted(started.shown()))
    assert (found["--api-key"], found["--admin-api-key"]) == ("$API_KEY", "$ADMIN_API_KEY")
    assert "s3cret-b" in started.arguments()


def test_keys_are_not_shown_in_the_images_line() -> None:
    assert "s3cret" not in launch(api_key="s3cret-a", admin_key="s3cret-b").image_line()


def test_the_logs_password_is_not_shown() -> None:
    settings = PluginSettings(log="redis://user:s3cret@10.0.0.5:6379/0?stream=records")
    started = launch(settings=settings)
    assert "s3cret" not in started.shown()
    assert "s3cret" not in started.image_line()
    assert load_settings(started.variables()[SETTINGS_VARIABLE]) == settings


# the image


def mounts(line: str) -> list[str]:
    words = shlex.split(line)
    return [words[index + 1] for index, word in enumerate(words) if word == "-v"]


def test_the_image_sees_what_the_server_needs() -> None:
    line = launch().image_line()
    places = ("/models/drafter v1", "/data/spool", "/data/drafters", "/models/target")
    assert sorted(mounts(line)) == sorted(f"{place}:{place}" for place in places)
    words = shlex.split(line)
    assert words[:2] == ["docker", "run"]
    assert IMAGE in words
    variable = words[words.index("-e") + 1]
    assert load_settings(variable.removeprefix(f"{SETTINGS_VARIABLE}=")) == SETTINGS


def test_the_image_runs_the_same_arguments() -> None:
    started = launch(max_running=4)
    script = shlex.split(started.image_line())[-1]
    install, _, command = script.partition(" && exec ")
    assert install == "pip install --no-deps draftsmith"
    assert shlex.split(command) == ["python3", *started.arguments()[1:]]


def test_a_hub_name_and_a_broker_are_not_mounted() -> None:
    settings = PluginSettings(log="redis://10.0.0.5:6379/0?stream=records")
    assert mounts(launch(model="owner/target", settings=settings).image_line()) == [
        "/models/drafter v1:/models/drafter v1"
    ]


def test_a_spool_is_mounted_however_it_is_written() -> None:
    line = launch(settings=PluginSettings(log="spool:/data/spool")).image_line()
    assert "/data/spool:/data/spool" in mounts(line)


def test_mounts_are_absolute_and_given_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = PluginSettings(log="/data", swap_root="/data")
    found = mounts(launch(drafter=Path("drafter"), settings=settings).image_line())
    assert all(mount.startswith("/") for mount in found)
    assert len(set(found)) == len(found)

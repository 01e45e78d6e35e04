"""The plugin's settings: one error that names the field or the file, and nothing hooked without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import serving_bridge.sglang_plugin
from serving_bridge.sglang_plugin import register
from serving_bridge.sglang_plugin.settings import (
    SETTINGS_VARIABLE,
    LengthSettings,
    PluginSettings,
    SettingsError,
    load_settings,
)

HOOKS = "serving_bridge.sglang_plugin.hooks"


class Hooks(ModuleType):
    """Stands in for the module that needs SGLang, and notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(HOOKS)
        self.installed: list[PluginSettings] = []
        self.refusals: list[str] = []
        self.failure: Exception | None = None

    def install(self, settings: PluginSettings) -> None:
        if self.failure is not None:
            raise self.failure
        self.installed.append(settings)

    def refuse_start(self, reason: str) -> None:
        self.refusals.append(reason)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    module = Hooks()
    monkeypatch.setitem(sys.modules, HOOKS, module)
    monkeypatch.setattr(serving_bridge.sglang_plugin, "refuse_start", module.refuse_start)
    return module


def refusal(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(text)
    return str(caught.value)


def test_settings_come_from_json_or_from_a_file(tmp_path: Path) -> None:
    said = {"log": "/spool", "log_share": 0.5, "length": {"gamma": 1.5, "gamma_by_load": {"8": 0.5}}}
    expected = PluginSettings(
        log="/spool", log_share=0.5, length=LengthSettings(gamma=1.5, gamma_by_load={"8": 0.5})
    )
    path = tmp_path / "plugin.json"
    path.write_text(json.dumps(said))
    assert load_settings(json.dumps(said)) == expected
    assert load_settings(str(path)) == expected


def test_leading_space_does_not_make_json_a_file_name() -> None:
    assert load_settings('\n  {"buffer_records": 3}').buffer_records == 3


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"lgo": "/spool"}, "lgo"),
        ({"length": {"gama": 1.0}}, "gama"),
        ({"log": 5}, "$.log"),
        ({"log_share": 1.5}, "$.log_share"),
        ({"log_share": -0.1}, "$.log_share"),
        ({"log_by_default": "yes"}, "$.log_by_default"),
        ({"target_top_k": 65}, "$.target_top_k"),
        ({"target_top_k": -1}, "$.target_top_k"),
        ({"buffer_records": 0}, "$.buffer_records"),
        ({"spool_max_age_s": 0}, "$.spool_max_age_s"),
        ({"max_drafter_bytes": 0}, "$.max_drafter_bytes"),
        ({"admission_beta": 0}, "$.admission_beta"),
        ({"admission_beta": 1}, "$.admission_beta"),
        ({"length": {"gamma": 0}}, "$.length.gamma"),
        ({"length": {"off_below_load": -1}}, "$.length.off_below_load"),
        ({"length": {"verify": "sometimes"}}, "$.length.verify"),
        ({"length": {"gamma_by_load": {"many": 1.0}}}, "length.gamma_by_load"),
        ({"length": {"gamma_by_load": {"-1": 1.0}}}, "length.gamma_by_load"),
        ({"length": {"gamma_by_load": {"8": 0.0}}}, "length.gamma_by_load"),
        ({"swap_root": "drafters"}, "swap_root"),
    ],
)
def test_a_wrong_field_is_named(said: dict[str, Any], field: str) -> None:
    message = refusal(json.dumps(said))
    assert message.startswith(SETTINGS_VARIABLE)
    assert field in message


def test_a_load_must_be_a_number_that_can_be_read() -> None:
    assert "length.gamma_by_load" in refusal(json.dumps({"length": {"gamma_by_load": {"²": 1.0}}}))


@pytest.mark.parametrize("text", ["{", '{"log": }', '{"log": "a"} more'])
def test_bad_json_is_named_by_its_source(text: str, tmp_path: Path) -> None:
    assert refusal(text).startswith(SETTINGS_VARIABLE)
    path = tmp_path / "plugin.json"
    path.write_text(text)
    assert str(path) in refusal(str(path))


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plugin.json"
    path.write_text("[]")
    assert str(path) in refusal(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    message = refusal(str(tmp_path / "absent.json"))
    assert SETTINGS_VARIABLE in message
    assert "absent.json" in message


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plugin.json"
    path.write_bytes(b'{"log": "\xff"}')
    assert "plugin.json" in refusal(str(path))


def test_defaults_log_nothing_and_forbid_swaps() -> None:
    settings = load_settings("{}")
    assert (settings.log, settings.swap_root, settings.redact, settings.admission_beta) == ("", "", "", None)


@pytest.mark.parametrize("value", [None, ""])
def test_register_hooks_nothing_without_settings(
    monkeypatch: pytest.MonkeyPatch, hooks: Hooks, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv(SETTINGS_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(SETTINGS_VARIABLE, value)
    register()
    assert (hooks.installed, hooks.refusals) == ([], [])


def test_register_installs_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"log": "/spool"}')
    register()
    assert hooks.installed == [PluginSettings(log="/spool")]
    assert hooks.refusals == []


def test_bad_settings_keep_the_server_from_starting(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, '{"lgo": "/spool"}')
    with pytest.raises(SettingsError, match="lgo"):
        register()
    assert hooks.installed == []
    assert len(hooks.refusals) == 1
    assert "lgo" in hooks.refusals[0]


def test_failed_hooks_keep_the_server_from_starting(monkeypatch: pytest.MonkeyPatch, hooks: Hooks) -> None:
    monkeypatch.setenv(SETTINGS_VARIABLE, "{}")
    hooks.failure = ImportError("no such module")
    with pytest.raises(ImportError):
        register()
    assert "no such module" in hooks.refusals[0]

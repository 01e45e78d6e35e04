"""The configuration schema: shipped presets, overrides, defaults, messages that name the key, and its printed forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import configs
from drafters.errors import UserError
from pipeline.cli import main
from pipeline.config import Config, load_config
from pipeline.config_docs import json_schema, key_rows, markdown_reference

SHIPPED = sorted(Path(str(configs.__file__)).parent.glob("*.yaml"))
MINIMAL = {"target": {"model": "tiny:llama"}, "data": {"train": [{"path": "prompts.jsonl"}]}}


def write(path: Path, **sections: Any) -> Path:
    """A configuration file: the minimum, and what is given."""
    path.write_text(yaml.safe_dump(MINIMAL | sections))
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """The smallest valid configuration."""
    return write(tmp_path / "mini.yaml")


def call(*arguments: str) -> int:
    """Run the command line in this process; its exit code."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_config_works_from_any_directory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = load_config(Path(path.stem))
    assert by_name == load_config(path)
    for source in [*by_name.data.train, *by_name.data.heldout, *by_name.traffic.sources]:
        assert source.path is None or source.path.is_file()


@pytest.mark.parametrize(
    ("sections", "dotted"),
    [
        ({"trian": {"steps": 3}}, "trian"),
        ({"train": {"stpes": 3}}, "train.stpes"),
        ({"online": {"replay_buffer": {"shares": 0.1}}}, "online.replay_buffer.shares"),
        ({"data": {"train": [{"path": "a"}, {"path": "b", "wieght": 1}]}}, "data.train.1.wieght"),
        ({"drafter": {"block_size": 1}}, "drafter.block_size"),
        ({"train": {"loss": {"objective": "mse"}}}, "train.loss.objective"),
        ({"train": {"steps": "many"}}, "train.steps"),
        ({"data": {"train": []}}, "data.train"),
        ({"data": {"train": [{"path": "a", "dataset": "b"}]}}, "data.train.0"),
        ({"train": None}, "train"),
        ({"target": {}}, "target.model"),
    ],
)
def test_wrong_values_are_named_by_their_dotted_key(
    sections: dict[str, Any], dotted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "wrong.yaml", **sections)
    assert call("config", "validate", str(path)) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {path}: {dotted}: ")
    assert message.count("\n") == 1


def test_all_errors_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "wrong.yaml", train={"stpes": 3}, gate={"confidence": 2})
    with pytest.raises(UserError) as error:
        load_config(path)
    assert "train.stpes" in str(error.value)
    assert "gate.confidence" in str(error.value)


def test_rule_between_two_keys_names_both(tmp_path: Path) -> None:
    path = write(tmp_path / "wrong.yaml", policy={"length": 9}, drafter={"block_size": 8})
    with pytest.raises(UserError, match=r"policy\.length 9 .*drafter\.block_size 8"):
        load_config(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a mapping"),
        (b"- a\n- b\n", "expected a mapping"),
        (b"train: {steps: [\n", "not valid YAML"),
        (b"name: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        (b"name: \xff\n", "cannot be read"),
    ],
)
def test_files_that_are_no_config(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    assert call("config", "show", str(path)) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error
    assert error.count("\n") == 1


def test_missing_file_and_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", "show", str(tmp_path / "absent.yaml")) == 2
    assert "absent.yaml: no such config file" in capsys.readouterr().err
    assert call("config", "show", str(tmp_path)) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1e-4", "0.0001", "1.0e-4"])
def test_exponents_are_floats(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mini.yaml"
    path.write_text(yaml.safe_dump(MINIMAL) + f"train: {{optim: {{lr: {text}}}}}\n")
    assert load_config(path).train.optim.lr == 1e-4
    assert load_config(path, [f"distill.optim.lr={text}"]).distill.optim.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("train.steps=3", lambda c: c.train.steps, 3),
        ("data.train.0.limit=5", lambda c: c.data.train[0].limit, 5),
        ("train.optim.lr=0.5", lambda c: c.train.optim.lr, 0.5),
        ("drafter.target_layer_ids=[1, 2]", lambda c: c.drafter.target_layer_ids, [1, 2]),
        ("train.max_minutes=null", lambda c: c.train.max_minutes, None),
        ("policy.gamma_by_load.4=0.5", lambda c: c.policy.gamma_by_load, {4: 0.5}),
        ("name=a=b", lambda c: c.name, "a=b"),
        ("data.heldout=[{dataset: a/b}]", lambda c: c.data.heldout[0].dataset, "a/b"),
    ],
)
def test_overrides(override: str, read: Any, expected: Any, config_file: Path) -> None:
    assert read(load_config(config_file, [override])) == expected


def test_later_override_wins(config_file: Path) -> None:
    assert load_config(config_file, ["train.steps=3", "train.steps=4"]).train.steps == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("train.steps=[", "not valid YAML"),
        ("data.train.1.limit=5", "data.train.1"),
        ("data.train.x=5", "data.train.x"),
        ("target.model.name=x", "target.model holds a value"),
        ("train.stpes=3", "train.stpes"),
        ("nowhere.at.all=3", "nowhere"),
    ],
)
def test_bad_overrides(
    override: str, message: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("config", "show", str(config_file), "--set", override) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_section_given_in_part_keeps_its_own_defaults(tmp_path: Path) -> None:
    """Not those of its class: `distill.steps` alone must not turn distillation into cross-entropy."""
    path = write(tmp_path / "part.yaml", distill={"steps": 5}, online={"loss": {"alpha": 0.9}})
    config = load_config(path, ["length_head.width=4", "distill.loss.delta=0.5"])
    assert config.distill.steps == 5
    assert config.distill.loss.objective == "opd"
    assert config.distill.loss.delta == 0.5
    assert config.distill.anchor_source == "rounds"
    assert config.online.loss.objective == "opd"
    assert config.online.loss.alpha == 0.9
    assert config.length_head.anchor_source == "rounds"
    assert config.length_head.steps == 200


def test_show_prints_what_loads_again(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", "show", str(config_file), "--set", "train.optim.lr=1e-4", "--output", "42") == 0
    shown = config_file.with_name("shown.yaml")
    shown.write_text(capsys.readouterr().out)
    expected = load_config(config_file, ["train.optim.lr=1e-4"]).model_copy(update={"output": Path("42")})
    assert load_config(shown) == expected


def test_validate_reports_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a.yaml"), write(tmp_path / "c.yaml")
    wrong, absent = write(tmp_path / "b.yaml", sed=1), tmp_path / "d.yaml"
    assert call("config", "validate", *map(str, (first, wrong, second, absent))) == 2
    captured = capsys.readouterr()
    assert captured.out == f"ok  {first}\nok  {second}\n"
    assert f"{wrong}: sed: " in captured.err
    assert f"{absent}: no such config file" in captured.err
    assert call("config", "validate", str(first)) == 0


def test_printed_schema_accepts_a_resolved_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", "schema") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json_schema()) == Config.model_json_schema()
    assert printed["additionalProperties"] is False
    assert set(Config.model_validate(MINIMAL).dump()) == set(printed["properties"])


def test_reference_lists_every_key_with_its_true_default() -> None:
    rows = {row.key: row for row in key_rows()}
    plain = Config.model_validate(MINIMAL).dump()

    def leaves(node: Any, key: str) -> dict[str, Any]:
        if not isinstance(node, dict) or not node:
            return {key: node}
        return {k: v for name, item in node.items() for k, v in leaves(item, f"{key}.{name}").items()}

    values = {k.removeprefix("."): v for k, v in leaves(plain, "").items()}
    assert set(values) == {key for key in rows if ".N." not in key}
    for key, value in values.items():
        default = rows[key].default
        assert default is None or json.loads(default) == value, key
    assert {key for key, row in rows.items() if row.default is None} == {"target.model", "data.train"}
    assert rows["distill.loss.objective"].default == '"opd"'
    assert rows["train.loss.objective"].default == '"ce"'
    assert rows["drafter.block_size"].type == "integer ≥ 2 and ≤ 64"
    assert rows["data.heldout.N.limit"].type == "integer ≥ 1 or null"


def test_reference_is_well_formed_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("config", "schema", "--markdown") == 0
    printed = capsys.readouterr().out
    assert printed.rstrip() == markdown_reference().rstrip()
    tables = [line for line in printed.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 5 for line in tables)
    assert sum(line.startswith("| `") for line in tables) == len(key_rows())


def test_a_bare_off_is_a_mode_of_drafting_ahead() -> None:
    changes = ["policy.name=throughput", "lookahead.mode=off"]
    assert load_config(Path(str(configs.__file__)).with_name("d3d.yaml"), changes).lookahead.mode == "off"

"""The command line: help, light imports, what stages are called with, plans, and exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from drafters.errors import UserError
from pipeline.cli import app, main

HEAVY = ("torch", "mlflow", "lightning", "transformers", "datasets", "numpy", "matplotlib")


def leaf_commands() -> dict[str, Any]:
    """Every command by its full name."""

    def walk(node: Any, name: str) -> Iterator[tuple[str, Any]]:
        for child, item in getattr(node, "commands", {}).items():
            yield from walk(item, f"{name} {child}".strip())
        if not hasattr(node, "commands"):
            yield name, node

    return dict(walk(get_command(app), ""))


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small valid configuration in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["Hi"]}\n\n{"turns": ["Bye"]}\n')
    path = tmp_path / "mini.yaml"
    path.write_text("target: {model: 'tiny:llama'}\ndata: {train: [{path: prompts.jsonl}]}\noutput: out\n")
    return path


def call(*arguments: str) -> int:
    """Run the command line in this process; its exit code."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def write_drafter(directory: Path, age: float = 0.0) -> Path:
    """What looks like a drafter directory from outside, written `age` seconds ago."""
    directory.mkdir(parents=True)
    manifest = directory / "manifest.json"
    manifest.write_text(json.dumps({"drafter_version": "3", "block_size": 8, "files": {}}))
    written = manifest.stat().st_mtime - age
    os.utime(manifest, (written, written))
    return directory


@pytest.fixture
def fake_stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Put a stage in place that notes what it is called with, and then does as told."""

    def install(module: str, function: str, act: Callable[[], None] | None = None) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def stage(config: Any, **arguments: Any) -> Path:
            calls.append({"config": config, **arguments})
            if act is not None:
                act()
            return Path("written/here")

        fake = ModuleType(f"pipeline.stages.{module}")
        setattr(fake, function, stage)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        return calls

    return install


@pytest.mark.parametrize("name", sorted(leaf_commands()))
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(app, [*name.split(), "--help"])
    assert result.exit_code == 0
    assert f"Example: draftsmith {name}" in " ".join(result.output.split())


@pytest.mark.parametrize("name", sorted(leaf_commands()))
def test_examples_use_options_that_exist(name: str) -> None:
    item = leaf_commands()[name]
    examples = re.findall(r"^Example: draftsmith (.*)$", item.help, flags=re.MULTILINE)
    known = {option for parameter in item.params for option in parameter.opts}
    assert examples
    for example in examples:
        used = {word for word in shlex.split(example) if word.startswith("--")}
        assert used <= known


def test_help_lists_the_loop_in_its_order() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    names = (
        "data",
        "train",
        "prune",
        "distill",
        "fit-length-head",
        "evaluate",
        "deploy",
        "retrain",
        "run",
        "compare",
        "plan",
        "tune-policy",
        "simulate",
        "registry",
        "config",
        "doctor",
    )
    places = [re.search(rf"^\W*{name} ", output, flags=re.MULTILINE) for name in names]
    starts = [place.start() for place in places if place is not None]
    assert len(starts) == len(names)
    assert starts == sorted(starts)
    assert set(names) == set(get_command(app).commands)  # type: ignore[attr-defined]


def test_help_imports_nothing_heavy() -> None:
    script = f"""
import sys
import pipeline.cli
print([m for m in {HEAVY} if m in sys.modules])
for words in (["--help"], ["train", "--help"], ["--version"]):
    try:
        pipeline.cli.main(words)
    except SystemExit as stop:
        assert not stop.code
print([m for m in {HEAVY} if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == "[]"


def test_bare_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 2
    captured = capsys.readouterr()
    assert "fit-length-head" in captured.out + captured.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert re.fullmatch(r"draftsmith \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    script = "from pipeline.cli import main; main()"
    command = [sys.executable, "-c", script, "train", str(tmp_path / "absent.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "absent.yaml" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "module", "function", "expected"),
    [
        (["data", "regenerate"], "regenerate", "regenerate_responses", {}),
        (["train"], "train", "train_drafter", {"resume": False, "warm_start": None}),
        (
            ["train", "--resume", "--warm-start", "other"],
            "train",
            "train_drafter",
            {"resume": True, "warm_start": Path("other")},
        ),
        (["distill"], "distill", "distill_offline", {"drafter": Path("out/train/drafter"), "resume": False}),
        (
            ["distill", "--drafter", "other", "--resume"],
            "distill",
            "distill_offline",
            {"drafter": Path("other"), "resume": True},
        ),
        (
            ["distill", "--online", "--spool", "records"],
            "online",
            "distill_online",
            {"log": "records", "drafter": None, "resume": False},
        ),
        (
            ["distill", "--online", "--spool", "records", "--drafter", "other", "--resume"],
            "online",
            "distill_online",
            {"log": "records", "drafter": Path("other"), "resume": True},
        ),
        (
            ["fit-length-head", "--resume"],
            "length_head",
            "fit_length_head",
            {"drafter": Path("out/train/drafter"), "resume": True},
        ),
        (["evaluate"], "evaluate", "evaluate_drafter", {"drafter": Path("out/train/drafter")}),
        (["deploy", "--drafter", "other"], "deploy", "deploy_drafter", {"drafter": Path("other")}),
        (["run"], "whole", "run_whole", {}),
    ],
)
def test_command_calls_its_stage(
    words: list[str],
    module: str,
    function: str,
    expected: dict[str, Any],
    config_file: Path,
    fake_stage: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_drafter(Path("out/train/drafter"))
    write_drafter(Path("other"))
    calls = fake_stage(module, function)
    assert call(*words, str(config_file), "--set", "seed=7") == 0
    (arguments,) = calls
    assert arguments.pop("config").seed == 7
    if "servers" in arguments:
        assert arguments.pop("servers")(None) == []
    assert arguments == expected
    assert capsys.readouterr().out == "written/here\n"


@pytest.mark.parametrize(
    ("words", "made", "taken"),
    [
        (["distill"], ["train", "distill", "length_head"], "train"),
        (["fit-length-head"], ["train", "distill", "length_head"], "distill"),
        (["fit-length-head"], ["train"], "train"),
        (["evaluate"], ["train", "distill", "length_head"], "length_head"),
        (["evaluate"], ["train", "distill"], "distill"),
        (["deploy"], ["train"], "train"),
    ],
)
def test_latest_stage_gives_the_drafter(
    words: list[str], made: list[str], taken: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for age, stage in enumerate(reversed(made)):
        write_drafter(Path("out") / stage / "drafter", age=age)
    Path("out/responses").mkdir()
    Path("out/responses/rows.jsonl").write_text("{}\n")
    assert call(*words, str(config_file), "--dry-run") == 0
    captured = capsys.readouterr()
    assert captured.err == f"drafter: out/{taken}/drafter\n"
    assert re.search(rf"drafter +out/{taken}/drafter \(version 3, block size 8", captured.out)


def test_repeated_earlier_stage_is_pointed_out(
    config_file: Path,
    fake_stage: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_drafter(Path("out/distill/drafter"), age=100)
    write_drafter(Path("out/train/drafter"))
    fake_stage("evaluate", "evaluate_drafter")
    assert call("evaluate", str(config_file)) == 0
    assert "out/train/drafter is newer" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prune", "distill", "fit-length-head", "evaluate", "deploy"])
def test_without_a_drafter_the_message_names_the_command_to_run(
    command: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out/train/drafter").mkdir(parents=True)  # a folder alone is no drafter
    assert call(command, str(config_file)) == 2
    message = capsys.readouterr().err
    assert "draftsmith train" in message
    assert "out/train/drafter" in message


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["distill", "--drafter", "absent"], "--drafter absent"),
        (["train", "--warm-start", "absent"], "--warm-start absent"),
        (["distill", "--online"], "--spool DIR"),
        (["distill", "--online", "--spool", "s", "--drafter", "absent"], "--drafter absent"),
        (["distill", "--spool", "s"], "--online"),
    ],
)
def test_options_that_do_not_fit(
    words: list[str], named: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words, str(config_file)) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert named in message


def test_next_command_keeps_the_overrides(
    config_file: Path,
    fake_stage: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = fake_stage("train", "train_drafter")
    words = ["train", "mini.yaml", "--set", "name='a b'", "--output", "123"]
    assert call(*words) == 0
    assert calls[0]["config"].output == Path("123")
    suggestion = capsys.readouterr().err.removeprefix("next: draftsmith ")
    assert shlex.split(suggestion) == ["distill", *words[1:]]


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupt_as_lightning_does() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.exit(1)


def terminate_as_lightning_does() -> None:
    raise SystemExit


def refuse() -> None:
    raise UserError("target.model: broken\n  and more")


def stop_with_3() -> None:
    sys.exit(3)


@pytest.mark.parametrize(
    ("act", "code", "message"),
    [
        (refuse, 2, "error: target.model: broken and more\n"),
        (interrupt, 130, ""),
        (interrupt_as_lightning_does, 130, ""),
        (terminate_as_lightning_does, 143, ""),
        (stop_with_3, 3, ""),
    ],
)
def test_exit_codes(
    act: Callable[[], None],
    code: int,
    message: str,
    config_file: Path,
    fake_stage: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_stage("train", "train_drafter", act)
    assert call("train", str(config_file)) == code
    captured = capsys.readouterr()
    assert captured.err.endswith(message)
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_defects_keep_their_traceback(
    config_file: Path, fake_stage: Callable[..., list[dict[str, Any]]]
) -> None:
    def break_down() -> None:
        raise ZeroDivisionError("a defect")

    fake_stage("train", "train_drafter", break_down)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        main(["train", str(config_file)])


def test_dry_run_names_inputs_outputs_and_sizes_and_writes_nothing(
    config_file: Path,
    fake_stage: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = fake_stage("whole", "run_whole")
    assert call("run", str(config_file), "--dry-run", "--set", "train.steps=3") == 0
    output = capsys.readouterr().out
    assert re.search(r"data\.train\.0 +prompts\.jsonl \(2 rows, ", output)
    assert re.search(r"target +tiny:llama", output)
    assert "out/length_head" in output
    assert re.search(r"train +3 × 1 rows of 2,048 tokens = 6,144 tokens at most", output)
    assert calls == []
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["data", "regenerate", "--set", "data.train.0.path=gone.jsonl"], "data.train.0.path: gone.jsonl"),
        (["run", "--set", "target.model=package:no_such_package"], "package:no_such_package"),
        (["train"], "draftsmith data regenerate"),
    ],
)
def test_dry_run_fails_where_the_stage_would(
    words: list[str], named: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words, str(config_file), "--dry-run") == 2
    captured = capsys.readouterr()
    assert "(missing)" in captured.out
    assert named in captured.err


def test_dry_run_describes_a_local_target(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shape = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps(shape))
    (model / "model.safetensors").write_bytes(bytes(2048))
    assert call("run", str(config_file), "--dry-run", "--set", f"target.model={model}") == 0
    assert "(llama, 3 layers, hidden 64, weights 2.0 KiB)" in capsys.readouterr().out

"""Documentation that can go stale: the generated reference, links, commands, examples, names of files."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from datamodules.prompts import parse_row
from pipeline.cli import app
from pipeline.config import Config, apply_override, find_preset
from pipeline.config_docs import key_rows

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PRESETS = {path.stem for path in (ROOT / "configs").glob("*.yaml")}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """Fenced blocks of these languages."""
    for language, body in re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text(), flags=re.M | re.S):
        if language in languages:
            yield body


def commands() -> list[tuple[str, str]]:
    """Every `draftsmith …` line of the shell blocks, continued lines joined, with its page."""
    found = []
    for page in PAGES:
        for body in blocks(page, "sh", "bash"):
            for line in body.replace("\\\n", " ").splitlines():
                if line.split()[:1] == ["draftsmith"]:
                    found.append((page.name, line.strip()))
    return found


def anchor(heading: str) -> str:
    """A heading's link target as GitHub makes it: a hyphen for each space, punctuation left out."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_config_reference_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(app, ["config", "schema", "--markdown"])
    assert printed.exit_code == 0
    assert (ROOT / "docs" / "config.md").read_text() == printed.output, (
        "run `draftsmith config schema --markdown > docs/config.md`"
    )


def test_every_key_is_described_in_one_line() -> None:
    assert [row.key for row in key_rows() if not row.description or "\n" in row.description] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if fragment:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.M)
            assert fragment in {anchor(heading) for heading in headings}, link


def test_readme_shows_the_commands_of_the_loop() -> None:
    shown = " ".join(line for name, line in commands() if name == "README.md")
    for name in (
        "data regenerate",
        "train",
        "prune",
        "distill",
        "fit-length-head",
        "evaluate",
        "deploy",
        "doctor",
    ):
        assert f"draftsmith {name}" in shown
    assert "--online --spool" in shown


@pytest.mark.parametrize("line", sorted({line for _, line in commands()}))
def test_commands_parse(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    for operator in (">", "|"):
        if operator in words:
            words = words[: words.index(operator)]
    # options are parsed before help answers, so that this fails for one that does not exist
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    options = parse(words)
    overrides = options.get("assignments") or []
    given = options.get("configs") or [options.get("config")]
    for source in [str(config) for config in given if config is not None]:
        if source in PRESETS:
            data: dict[str, Any] = yaml.safe_load(find_preset(Path(source)).read_text())
            for override in overrides:
                apply_override(data, override)
            Config.model_validate(data)


def parse(words: list[str]) -> dict[str, Any]:
    """Arguments and options of a command line, as the command would be called."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        words = getattr(command, "with_command", list)(words)
        command, words = command.commands[words[0]], words[1:]
    context = command.make_context(command.name, list(words))
    assert not context.args
    return dict(context.params)


def test_ci_finds_the_test_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme.count("<!-- test-command -->") == 1
    assert re.search(r"^<!-- test-command -->\n```\w*\nmake test\n```$", readme, flags=re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_valid(page: Path) -> None:
    for body in blocks(page, "yaml"):
        Config.model_validate(yaml.safe_load(body))
    for body in blocks(page, "jsonl"):
        for line in body.splitlines():
            conversation = parse_row(json.loads(line), page.name, domain=None, source="example")
            assert conversation.messages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_import_what_exists(page: Path) -> None:
    rooms = ("pipeline", "lightning_modules", "datamodules", "serving_bridge", "drafters")
    for body in blocks(page, "python"):
        compile(body, page.name, "exec")
        for module, names in re.findall(r"^from (\S+) import (.+)$", body, flags=re.M):
            if module.partition(".")[0] in rooms:
                loaded = importlib.import_module(module)
                for name in names.split(","):
                    assert hasattr(loaded, name.strip()), f"{module}.{name.strip()}"


def test_named_files_exist() -> None:
    tree = next(blocks(ROOT / "README.md", "text"))
    folder = ROOT
    for line in tree.splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else ROOT / name
        assert (folder / name if line.startswith(" ") else folder).exists(), line
    rooms = "pipeline|lightning_modules|datamodules|serving_bridge|drafters|configs|tests|docs"
    for page in PAGES:
        for name in re.findall(rf"`((?:{rooms})/[\w./-]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_named_settings_exist() -> None:
    """A dotted key in code type, such as `online.trigger`, is a key of the configuration."""
    known = {row.key for row in key_rows()}
    sections = {key.partition(".")[0] for key in known if "." in key}
    for page in PAGES:
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", page.read_text()):
            if name.rpartition(".")[2] in {"json", "safetensors", "db"}:
                continue
            # `loss.alpha` and `optim.lr` stand for that key of every section that has one
            if name.partition(".")[0] in {*sections, "loss", "optim"}:
                assert any(key == name or key.endswith(f".{name}") for key in known), f"{page.name}: {name}"

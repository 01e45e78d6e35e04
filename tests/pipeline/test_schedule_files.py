"""The CronJob manifest and the SLURM script: what they say is legal there, and what they call exists here.

The schema in `cronjob.schema.json` is a hand-written subset of batch/v1 CronJob, stricter than Kubernetes: it allows only
fields that it knows, and demands the ones that keep two runs apart.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import configs
from pipeline.stages.retrain import Outcome
from tests.pipeline.test_docs import parse

FOLDER = Path(str(configs.__file__)).parent / "schedule"
MANIFEST: dict[str, Any] = yaml.safe_load((FOLDER / "cronjob.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("cronjob.schema.json").read_text())
SCRIPT = FOLDER / "retrain.sbatch"
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def violations(schema: dict[str, Any], value: Any, where: str = "") -> Iterator[str]:
    """What a value breaks of a schema; a keyword that is not implemented here is an error of the schema."""
    if "$ref" in schema:
        yield from violations(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], value, where)
        return
    unknown = schema.keys() - {
        "$comment", "$defs", "type", "enum", "pattern", "minimum", "minItems", "items", "required", "properties",
        "additionalProperties",
    }  # fmt: skip
    assert not unknown, unknown
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is not one of {schema['enum']}"
    expected = schema.get("type")
    if expected is not None:
        wrong = not isinstance(value, TYPES[expected])
        if wrong or (expected == "integer" and isinstance(value, bool)):
            yield f"{where}: not a {expected}"
            return
    if "pattern" in schema and re.search(schema["pattern"], value) is None:
        yield f"{where}: {value!r} does not match {schema['pattern']}"
    if "minimum" in schema and value < schema["minimum"]:
        yield f"{where}: {value} is below {schema['minimum']}"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{where}: too few items"
        for index, item in enumerate(value):
            yield from violations(schema.get("items", {}), item, f"{where}[{index}]")
    if isinstance(value, dict):
        yield from (f"{where}: {name} is missing" for name in schema.get("required", []) if name not in value)
        rest = schema.get("additionalProperties", True)
        for name, item in value.items():
            known = schema.get("properties", {}).get(name, rest)
            if known is False:
                yield f"{where}.{name}: unknown"
            elif isinstance(known, dict):
                yield from violations(known, item, f"{where}.{name}")


def changed(path: str, value: Any) -> dict[str, Any]:
    """The manifest with one thing set, or left out (None)."""
    manifest = copy.deepcopy(MANIFEST)
    node: Any = manifest
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    for key in parents:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return manifest


POD = "spec.jobTemplate.spec.template.spec"
WRONG = {
    "spec.concurrencyPolicy": "Allow",
    "spec.schedule": "every night",
    "spec.startingDeadlineSeconds": 0,
    "spec.jobTemplate.spec.backoffLimit": "0",
    f"{POD}.restartPolicy": "Always",  # not legal in a Job
    f"{POD}.containers": [],
    f"{POD}.containers.0.image": "drafts mith",
    f"{POD}.containers.0.args.0": 7,
    f"{POD}.containers.0.env.0.valueFrom": "secret",
    f"{POD}.containers.0.resources.limits.memory": "64 GB",
    f"{POD}.containers.0.volumeMounts.0.mountPath": "config",
    f"{POD}.containers.0.volumeMount": [],
    "metadata.name": "Draftsmith_Retrain",
    "kind": "Cronjob",
}


def test_manifest_is_legal() -> None:
    assert list(violations(SCHEMA, MANIFEST)) == []


@pytest.mark.parametrize("path", WRONG)
def test_schema_finds_what_is_wrong(path: str) -> None:
    assert len(list(violations(SCHEMA, changed(path, WRONG[path])))) == 1


@pytest.mark.parametrize(
    "path",
    ["spec.concurrencyPolicy", "spec.startingDeadlineSeconds", f"{POD}.restartPolicy", f"{POD}.containers"],
)
def test_schema_finds_what_is_missing(path: str) -> None:
    assert len(list(violations(SCHEMA, changed(path, None)))) == 1


@pytest.mark.skipif(importlib.util.find_spec("jsonschema") is None, reason="jsonschema is not installed")
def test_jsonschema_agrees_with_the_validator_here() -> None:
    import jsonschema

    validator = jsonschema.Draft202012Validator(SCHEMA)
    for manifest in [MANIFEST, *(changed(path, value) for path, value in WRONG.items())]:
        ours = bool(list(violations(SCHEMA, manifest)))
        assert ours is bool(list(validator.iter_errors(manifest)))


def test_mounts_have_their_volumes() -> None:
    pod = MANIFEST["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_container_calls_a_command_that_exists() -> None:
    (container,) = MANIFEST["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["draftsmith"]
    options = parse(container["args"])
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert options["failures_only"] is True and options["serve"]
    for path in (options["config"], options["output"], options["spool"]):
        assert any(str(path).startswith(f"{mount}/") for mount in mounts)


def test_slurm_script_becomes_the_command_it_names(tmp_path: Path) -> None:
    """It is run with a stand-in for draftsmith; exec keeps the process id, so that SLURM's signals arrive."""
    stand_in = tmp_path / "draftsmith"
    stand_in.write_text('#!/usr/bin/env bash\necho "$$"\nprintf "%s\\n" "$@"\nexit 6\n')
    stand_in.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CONFIG": "my config.yaml",
        "SPOOL": "/var/my spool",
    }
    process = subprocess.Popen(["bash", str(SCRIPT)], env=environment, stdout=subprocess.PIPE, text=True)
    output, _ = process.communicate(timeout=60)
    number, *words = output.splitlines()
    assert int(number) == process.pid
    assert process.returncode == int(Outcome.SWAP_FAILED)
    options = parse(words)
    assert str(options["config"]) == "my config.yaml" and options["spool"] == "/var/my spool"
    assert options["failures_only"] is True


def test_slurm_directives_keep_runs_apart_and_warn_before_the_time_is_up() -> None:
    text = SCRIPT.read_text()
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    directives = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH --")
    )
    assert directives["dependency"] == "singleton" and directives["job-name"]
    # under scrontab the script itself would lose them
    (line,) = (line for line in text.splitlines() if re.match(r"#\s+30 3 ", line))
    assert line.split()[6] == "sbatch"
    assert re.fullmatch(r"B:TERM@\d+", directives["signal"])
    first_command = next(i for i, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    last_directive = max(i for i, line in enumerate(text.splitlines()) if line.startswith("#SBATCH"))
    assert last_directive < first_command  # SLURM reads none after the first command
    assert os.access(SCRIPT, os.X_OK)
    assert shlex.split(text.splitlines()[-1])[0] == "exec"

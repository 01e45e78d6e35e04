"""Bad input, through the command line: one clear line, exit code 2, and what earlier stages left stays as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from drafters.checkpoint import file_sha256
from pipeline.cli import main
from pipeline.tiny_target import write_tiny_target
from tests.pipeline.tiny_run import snapshot


@pytest.fixture
def refused(run: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused; returns its message."""

    def call(*words: str, ignore: Sequence[str] = ()) -> str:
        before = kept(run, ignore)
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([*words])
        printed = capfd.readouterr()
        assert stop.value.code == 2
        assert "Traceback" not in printed.out + printed.err
        errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and printed.err.endswith(errors[0] + "\n")
        assert kept(run, ignore) == before
        return errors[0]

    return call


def kept(run: Path, ignore: Sequence[str]) -> dict[str, str]:
    """The run's files but those under a prefix to ignore."""
    files = snapshot(run / "out")
    return {name: digest for name, digest in files.items() if not name.startswith(tuple(ignore))}


def spoil_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rehash(drafter: Path) -> None:
    files = json.loads((drafter / "manifest.json").read_text())["files"]
    spoil_json(drafter / "manifest.json", files={name: file_sha256(drafter / name) for name in files})


def change_tensors(drafter: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """A checkpoint whose weights are not what they were, though every checksum is right."""
    tensors = load_file(drafter / "model.safetensors")
    change(tensors)
    save_file(tensors, drafter / "model.safetensors", metadata={"format": "pt"})
    rehash(drafter)


def other_identity(drafter: Path, **changes: str) -> None:
    manifest = json.loads((drafter / "manifest.json").read_text())
    spoil_json(drafter / "manifest.json", target=manifest["target"] | changes)


def test_missing_prompt_file(run: Path, refused: Callable[..., str]) -> None:
    (run / "math.jsonl").unlink()
    for command in (["data", "regenerate"], ["train"]):
        message = refused(*command, "tiny.yaml")
        assert "math.jsonl" in message and "cannot read the file" in message


def test_empty_prompt_file(run: Path, refused: Callable[..., str]) -> None:
    (run / "chat.jsonl").write_text("\n\n")
    assert "chat.jsonl: no conversations" in refused("data", "regenerate", "tiny.yaml")


def test_malformed_prompt_row(run: Path, refused: Callable[..., str]) -> None:
    with (run / "chat.jsonl").open("a") as stream:
        stream.write('{"turns": "not a list"}\n')
    assert "chat.jsonl:11: field `turns`" in refused("data", "regenerate", "tiny.yaml")


def test_prompts_longer_than_the_cap(run: Path, refused: Callable[..., str]) -> None:
    elsewhere = ["tiny.yaml", "--output", "fresh", "--set", "tracking.uri=sqlite:///out/mlflow.db"]
    message = refused("data", "regenerate", *elsewhere, "--set", "data.max_prompt_tokens=5")
    assert "all 20 prompts are longer than 5 tokens; raise data.max_prompt_tokens" in message
    assert "fresh/responses/train: no usable responses" in refused("train", *elsewhere)


def test_unknown_key(run: Path, refused: Callable[..., str]) -> None:
    assert "train.stepz" in refused("train", "tiny.yaml", "--set", "train.stepz=5")
    settings = yaml.safe_load((run / "tiny.yaml").read_text()) | {"tarin": {}}
    (run / "tiny.yaml").write_text(yaml.safe_dump(settings))
    assert "tiny.yaml: tarin" in refused("train", "tiny.yaml")


def test_responses_of_another_target(run: Path, refused: Callable[..., str]) -> None:
    write_tiny_target(run / "out" / "target", "qwen3", seed=9)
    assert "out/responses/train: made for target qwen3@" in refused("train", "tiny.yaml")
    assert "refuses to mix" in refused("data", "regenerate", "tiny.yaml")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda d: other_identity(d, tokenizer_hash="f" * 64), "made with another tokenizer"),
        (lambda d: other_identity(d, revision="000000000000"), "made for target qwen3@000000000000"),
        (lambda d: change_tensors(d, lambda t: t.pop("fc.weight")), "missing tensors ['fc.weight']"),
        (lambda d: change_tensors(d, lambda t: t.update(x=torch.ones(1))), "unexpected tensors ['x']"),
        (
            lambda d: change_tensors(d, lambda t: t.update({"fc.weight": t["fc.weight"][:1].clone()})),
            "fc.weight has shape",
        ),
        (lambda d: change_tensors(d, lambda t: t["fc.weight"][0].fill_(float("nan"))), "not finite"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x"), "checksum"),
        (lambda d: (d / "config.json").unlink(), "config.json: listed in the manifest but missing"),
        (lambda d: (d / "manifest.json").write_text("{"), "unreadable manifest"),
    ],
)
def test_damaged_or_foreign_drafter(
    spoil: Callable[[Path], object], named: str, run: Path, refused: Callable[..., str]
) -> None:
    drafter = shutil.copytree(run / "out" / "length_head" / "drafter", run / "bad")
    spoil(drafter)
    for command in ("distill", "evaluate"):
        message = refused(command, "tiny.yaml", "--drafter", "bad")
        assert named in message and "bad" in message


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["deploy", "--drafter", "bad"], "checksum"),
        (["fit-length-head", "--drafter", "bad"], "checksum"),
        (["train", "--warm-start", "bad"], "checksum"),
    ],
)
def test_damaged_drafter_in_every_other_command(
    words: list[str], named: str, run: Path, refused: Callable[..., str]
) -> None:
    drafter = shutil.copytree(run / "out" / "length_head" / "drafter", run / "bad")
    (drafter / "model.safetensors").write_bytes(b"x")
    message = refused(*words, "tiny.yaml")
    assert named in message and "bad/model.safetensors" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("drafter.block_size", 6), ("drafter.num_layers", 2), ("drafter.num_context_layers", 3)],
)
def test_warm_start_of_another_shape(key: str, value: int, run: Path, refused: Callable[..., str]) -> None:
    message = refused("train", "tiny.yaml", "--warm-start", "out/train/drafter", "--set", f"{key}={value}")
    named = (
        "drafter.target_layer_ids" if key.endswith("context_layers") else f"{key}: the config says {value}"
    )
    assert named in message and "out/train/drafter" in message


@pytest.mark.parametrize("stage", ["train", "distill"])
def test_loss_that_is_not_finite(stage: str, run: Path, refused: Callable[..., str]) -> None:
    """Also when a drafter beyond repair was the best one of this run so far."""
    wild = {"optim.lr": "1e30", "optim.warmup_steps": "0", "validate_every": "1"}
    words = [word for key, value in wild.items() for word in ("--set", f"{stage}.{key}={value}")]
    (run / "out" / stage / "last.ckpt").unlink(missing_ok=True)  # a new run puts its own in place
    message = refused(stage, "tiny.yaml", *words, ignore=[f"{stage}/.drafter.best/"])
    assert "training stopped at step 1" in message and "optim.lr" in message
    assert "nothing to resume" in refused(stage, "tiny.yaml", "--resume", ignore=[f"{stage}/.drafter.best/"])


def test_tracking_server_that_does_not_answer(run: Path, refused: Callable[..., str]) -> None:
    message = refused("train", "tiny.yaml", "--set", "tracking.uri=http://127.0.0.1:9")
    assert "tracking.uri" in message and "http://127.0.0.1:9" in message


@pytest.mark.parametrize("command", ["train", "distill", "fit-length-head"])
def test_resuming_without_a_checkpoint(command: str, run: Path, refused: Callable[..., str]) -> None:
    folder = command.removeprefix("fit-").replace("-", "_")
    (run / "out" / folder / "last.ckpt").unlink(missing_ok=True)
    message = refused(command, "tiny.yaml", "--resume")
    assert f"out/{folder}/last.ckpt: nothing to resume" in message


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "spoil", [cut_off, lambda path: path.write_bytes(b""), lambda path: path.write_text("nonsense")]
)
def test_resuming_from_a_damaged_checkpoint(
    spoil: Callable[[Path], object], run: Path, refused: Callable[..., str]
) -> None:
    spoil(run / "out" / "train" / "last.ckpt")
    message = refused("train", "tiny.yaml", "--resume")
    assert "out/train/last.ckpt: not a readable checkpoint" in message and "without --resume" in message


def test_resuming_with_another_shape(run: Path, refused: Callable[..., str]) -> None:
    message = refused("train", "tiny.yaml", "--resume", "--set", "drafter.num_layers=2")
    assert "out/train/last.ckpt: does not fit this config" in message


def online(run: Path) -> list[str]:
    """Words that start online learning anew."""
    shutil.rmtree(run / "out" / "online")
    return ["distill", "tiny.yaml", "--online", "--set", "online.idle_timeout_s=0.2", "--spool"]


def test_spool_whose_registered_cursor_is_unreadable(run: Path, refused: Callable[..., str]) -> None:
    words = online(run)
    (run / "out" / "spool" / "readers" / "trainer.json").write_text("nonsense")
    assert "readers/trainer.json: not a reader's cursor" in refused(*words, "out/spool")


def test_spool_that_has_lost_segments(run: Path, refused: Callable[..., str]) -> None:
    words = online(run)
    shutil.copytree(run / "out" / "spool", run / "spool")
    (run / "spool" / "readers" / "trainer.json").unlink()
    # a gap after the first, however many segments the run's pace has left
    first, *later = sorted((run / "spool" / "segments").iterdir())
    for segment in reversed(later or [first]):
        number = int(segment.stem) + (1 if later else 2)
        shutil.copyfile(segment, segment.with_name(f"{number:012d}{segment.suffix}"))
    if later:
        later[0].unlink()
    # no round before the gap, however many records the first segment holds
    message = refused(*words, "spool", "--set", "online.trigger=100000")
    assert "segment" in message and "gone" in message


def test_spool_that_is_a_file(run: Path, refused: Callable[..., str]) -> None:
    words = online(run)
    (run / "spool").write_text("")
    assert "--spool spool: cannot be used" in refused(*words, "spool")


def test_online_learning_over_an_earlier_one(run: Path, refused: Callable[..., str]) -> None:
    message = refused("distill", "tiny.yaml", "--online", "--spool", "out/spool")
    assert "out/online/last.ckpt: an earlier online run stands here; add --resume" in message


def test_resuming_online_from_a_damaged_checkpoint(run: Path, refused: Callable[..., str]) -> None:
    cut_off(run / "out" / "online" / "last.ckpt")
    message = refused("distill", "tiny.yaml", "--online", "--spool", "out/spool", "--resume")
    assert "out/online/last.ckpt: not a readable checkpoint" in message


def test_online_learning_without_a_champion(run: Path, refused: Callable[..., str]) -> None:
    words = online(run)
    message = refused(*words, "out/spool", "--set", "tracking.model_name=another")
    assert "no champion yet; run `draftsmith deploy` first" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"traffic.sources": "[]"}, "traffic.sources"),
        ({"data.heldout": "[]"}, "data.heldout"),
        ({"traffic.domain": "poetry"}, "traffic.domain: no held-out prompt has the domain 'poetry'"),
    ],
)
def test_a_whole_run_that_could_not_end_does_not_begin(
    changes: dict[str, str], named: str, run: Path, refused: Callable[..., str]
) -> None:
    shutil.rmtree(run / "out")
    (run / "out").mkdir()
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert named in refused("run", "tiny.yaml", *words)


def test_evaluating_without_heldout_prompts(run: Path, refused: Callable[..., str]) -> None:
    assert "data.heldout: no held-out prompts" in refused("evaluate", "tiny.yaml", "--set", "data.heldout=[]")


def test_damaged_target(run: Path, refused: Callable[..., str]) -> None:
    cut_off(run / "out" / "target" / "model.safetensors")
    assert "target.model: tiny:qwen3 cannot be loaded" in refused("train", "tiny.yaml")

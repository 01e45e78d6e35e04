"""A D3D drafter through the commands: trained, evaluated, registered, pruned; what it cannot do yet is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafters.checkpoint import drafter_digest, load_drafter
from drafters.d3d import D3DDrafter
from drafters.fill import Drafter
from drafters.layers import layers_of, mlp_output, remove_layer
from drafters.repair import Repair
from drafters.replay import replay, total_acceptance_length
from lightning_modules.callbacks.finite_guard import FiniteGuard
from pipeline.cli import main
from pipeline.config import load_config
from pipeline.corpus import train_and_validation
from pipeline.models import load_drafter_for, load_target, read_identity
from pipeline.stages import prune as prune_stage
from pipeline.stages.context import registry_for
from pipeline.stages.whole import serve_and_learn

D3D = ["tiny.yaml", "--set", "drafter.family=d3d", "--set", "drafter.init=target"]
RECOVERY = {
    "steps": 6,
    "validate_every": 3,
    "checkpoint_every": 2,
    "anchors_per_document": 16,
    "precision": "32-true",
    "retention": 0,
    "layers": 1,
    "optim.lr": 3e-3,
}
PRUNE = [word for key, value in RECOVERY.items() for word in ("--set", f"prune.{key}={value}")]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return int(stop.value.code or 0)


def result(run: Path, stage: str) -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads((run / "out" / stage / "result.json").read_text())["metrics"]
    return metrics


@pytest.fixture
def trained(run: Path) -> Path:
    # nor what the other family left: local copies of its versions
    for stage in ("train", "distill", "length_head", "evaluate", "deploy", "versions"):
        shutil.rmtree(run / "out" / stage)
    assert call("train", *D3D) == 0
    return run


def depth_of(directory: Path) -> int:
    return int(load_drafter(directory).drafter.config.num_hidden_layers)


def test_weights_are_not_continued_under_the_other_meaning_of_a_row(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [*D3D, "--set", "drafter.shift=false"]
    drafter = trained / "out" / "train" / "drafter"
    assert json.loads((drafter / "config.json").read_text())["d3d_config"]["shift"] is True
    kept = shutil.copytree(drafter, trained / "kept")
    before = drafter_digest(drafter)
    for words in (["--resume"], ["--warm-start", str(kept)]):
        capsys.readouterr()
        assert call("train", *other, *words) == 2
        assert "drafter.shift" in capsys.readouterr().err
    assert drafter_digest(drafter) == before


def test_train_evaluate_and_deploy(trained: Path) -> None:
    drafter = load_drafter(trained / "out" / "train" / "drafter").drafter
    assert isinstance(drafter, D3DDrafter) and drafter.block_size == 4
    assert result(trained, "train")["acceptance_length"] > 1
    assert call("evaluate", *D3D) == 0
    assert result(trained, "evaluate")["lossless"] is True
    assert call("deploy", *D3D) == 0
    config = load_config(trained / "tiny.yaml", ["drafter.family=d3d"])
    champion = registry_for(config, read_identity(config).target_id).champion()
    assert champion is not None and champion.tags["family"] == "d3d"


def test_benchmarks_decode_in_turn_and_ahead(trained: Path) -> None:
    words = ["--limit", "4", "--max-new-tokens", "12", "--set", "lookahead.fan_out=3"]
    assert call("evaluate", *D3D, *words, "--benchmark", "heldout") == 0
    cells = json.loads((trained / "out/benchmark/report/report.json").read_text())["cells"]
    assert [cell["method"] for cell in cells] == ["ar", "d3d-sync", "d3d-async"]
    assert cells[1]["prepared_rate"] is None and 0 < cells[2]["prepared_rate"] < 1
    texts = {
        tuple(map(tuple, (json.loads(line)["output_ids"] for line in place.read_text().splitlines())))
        for place in (trained / "out/benchmark/cells").glob("*/answers.jsonl")
    }
    assert len(texts) == 1


def test_prune_keeps_every_depth_and_never_makes_it_worse_by_recovering(trained: Path) -> None:
    whole = depth_of(trained / "out" / "train" / "drafter")
    assert call("prune", *D3D, *PRUNE) == 0
    metrics = result(trained, "prune")
    assert metrics["layers"] == 1
    assert [step["layers"] for step in metrics["steps"]] == list(range(whole - 1, 0, -1))
    for step in metrics["steps"]:
        removal = step["removal"]
        assert removal["measured"] == list(range(step["layers"] + 1))
        assert removal["importance"][removal["removed"]] == max(removal["importance"])
        assert removal["tau_start"] == max(*removal["importance"], removal["tau_unrecovered"])
        # validation's τ is a float32
        assert step["tau"] >= removal["tau_start"] * (1 - 1e-6)
        plain = AutoModelForCausalLM.from_pretrained(
            trained / "out" / "prune" / f"layers-{step['layers']:03d}" / "drafter"
        )
        assert len(plain.model.layers) == step["layers"]
    assert depth_of(trained / "out" / "prune" / "drafter") == 1
    assert (trained / "out" / "prune" / "prune.png").stat().st_size > 1000
    config = load_config(trained / "tiny.yaml", ["drafter.family=d3d"])
    versions = registry_for(config, read_identity(config).target_id).list_versions()
    assert sum("-prune-" in v.tags["drafter_version"] for v in versions) == whole - 1


def test_a_pruning_that_was_cut_off_ends_where_an_uninterrupted_one_does(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("prune", *D3D, *PRUNE) == 0
    finished = drafter_digest(trained / "out" / "prune" / "drafter")
    check = FiniteGuard.on_before_backward
    for crash in (3, 6 + 1, 6 + 5):
        shutil.rmtree(trained / "out" / "prune")
        steps = iter(range(crash))

        def check_or_break(self: FiniteGuard, *rest: Any, left: Any = steps) -> None:
            if next(left, None) is None:
                raise ConnectionError("the machine is gone")
            check(self, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(FiniteGuard, "on_before_backward", check_or_break)
            with pytest.raises(ConnectionError):
                main(["prune", *D3D, *PRUNE])
        assert call("prune", *D3D, *PRUNE, "--resume") == 0
        assert drafter_digest(trained / "out" / "prune" / "drafter") == finished, crash


def test_pruning_is_not_resumed_with_another_drafter_or_other_settings(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*PRUNE, "--set", "prune.layers=4"]
    assert call("prune", *D3D, *words) == 0
    assert call("prune", *D3D, *words, "--set", "prune.label_share=0.5", "--resume") == 2
    assert "other settings" in capsys.readouterr().err
    other = str(trained / "out" / "prune" / "drafter")
    assert call("prune", *D3D, *words, "--set", "prune.layers=3", "--drafter", other, "--resume") == 2
    assert "another drafter" in capsys.readouterr().err
    # but further than was asked for first
    assert call("prune", *D3D, *words, "--set", "prune.layers=3", "--resume") == 0
    assert result(trained, "prune")["layers"] == 3


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = load_drafter(directory).drafter.state_dict()
    return weights


def test_what_recovery_starts_from_is_as_good_as_measured(trained: Path) -> None:
    assert call("prune", *D3D, *PRUNE, "--set", "prune.candidates=2") == 0
    config = load_config(trained / "tiny.yaml", ["drafter.family=d3d"])
    bundle = load_target(config)
    _, validation = train_and_validation(config, bundle.target.identity)
    for step in result(trained, "prune")["steps"]:
        removal = step["removal"]
        assert len(removal["measured"]) == len(removal["importance"]) == min(2, step["layers"])
        assert removal["removed"] in removal["measured"] and 0 not in removal["measured"]
        start = trained / "out" / "prune" / f"layers-{step['layers']:03d}" / "start"
        drafter = load_drafter_for(start, bundle, dtype=bundle.target.dtype).drafter
        assert total_acceptance_length(replay(drafter, bundle.target, validation)) == removal["tau_start"]


def test_without_repair_recovery_starts_from_the_bare_removal(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = [*PRUNE, "--set", "prune.repair=false"]
    assert call("prune", *D3D, *bare, "--set", "prune.candidates=2") == 2
    assert "candidates are ranked by their repairs" in capsys.readouterr().err
    assert call("prune", *D3D, *bare) == 0
    (first, *_) = result(trained, "prune")["steps"]
    removal = first["removal"]
    assert removal["tau_start"] == removal["tau_unrecovered"] == max(removal["importance"])
    whole = load_drafter(trained / "out" / "train" / "drafter").drafter
    remove_layer(whole, removal["removed"])
    start = weights_of(trained / "out" / "prune" / f"layers-{first['layers']:03d}" / "start")
    assert all(torch.equal(tensor, start[name]) for name, tensor in whole.state_dict().items())


def test_a_repair_that_does_harm_is_left_out(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def harmful(drafter: Drafter, *_: Any) -> dict[int, Repair]:
        layers = layers_of(drafter)
        weights = [mlp_output(layer).weight for layer in layers]
        return {i: Repair(-30 * weights[i - 1], 0.0, 1) for i in range(1, len(layers))}

    monkeypatch.setattr(prune_stage, "fit_repairs", harmful)
    one_less = depth_of(trained / "out" / "train" / "drafter") - 1
    words = ["--set", f"prune.layers={one_less}", "--set", "prune.candidates=2"]
    assert call("prune", *D3D, *PRUNE, *words) == 0
    (step,) = result(trained, "prune")["steps"]
    removal = step["removal"]
    assert removal["tau_unrecovered"] > max(removal["importance"])
    assert removal["tau_start"] == removal["tau_unrecovered"] <= step["tau"] * (1 + 1e-6)


def test_a_state_of_another_version_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("prune", *D3D, *PRUNE) == 0
    path = trained / "out" / "prune" / "state.json"
    state = json.loads(path.read_text())
    del state["steps"][0]["removal"]["tau_unrecovered"]
    path.write_text(json.dumps(state))
    assert call("prune", *D3D, *PRUNE, "--resume") == 2
    assert "of another version of draftsmith" in capsys.readouterr().err


def test_a_floor_that_nothing_meets_keeps_the_whole_drafter(trained: Path) -> None:
    words = [
        *PRUNE,
        "--set",
        "prune.layers=null",
        "--set",
        "prune.retention=1",
        "--set",
        "prune.optim.lr=1e-9",
    ]
    assert call("prune", *D3D, *words) == 0
    metrics = result(trained, "prune")
    kept = metrics["layers"]
    assert metrics["tau"] >= metrics["tau_whole"]
    assert depth_of(trained / "out" / "prune" / "drafter") == kept


def test_pruning_a_dflash_drafter(run: Path) -> None:
    settings = ["tiny.yaml", "--set", "drafter.num_layers=2", "--set", "train.steps=6"]
    assert call("train", *settings) == 0
    assert call("prune", *settings, *PRUNE) == 0
    assert depth_of(run / "out" / "prune" / "drafter") == 1


def test_distillation_a_length_head_and_online_rounds(trained: Path) -> None:
    """What AdaFlash does to a DFlash drafter, done to a D3D one."""
    words = [*D3D, "--set", "distill.steps=6", "--set", "distill.optim.lr=1e-3"]
    assert call("distill", *words) == 0
    assert result(trained, "distill")["acceptance_length"] >= result(trained, "train")["acceptance_length"]
    assert call("fit-length-head", *words) == 0
    loaded = load_drafter(trained / "out" / "length_head" / "drafter")
    assert isinstance(loaded.drafter, D3DDrafter) and loaded.length_head is not None
    assert result(trained, "length_head")["blocks"] > 10
    policy = ["--set", "policy.name=adaflash", "--set", "policy.gamma=1.5", "--set", "lookahead.mode=fixed"]
    assert call("evaluate", *words, *policy) == 0
    evaluated = result(trained, "evaluate")
    assert evaluated["lossless"] is True and {"adaflash", "lookahead"} <= set(evaluated["lossless_prompts"])

    shutil.rmtree(trained / "out" / "online")
    shutil.rmtree(trained / "out" / "spool")
    assert call("deploy", *words, "--drafter", str(trained / "out" / "length_head" / "drafter")) == 0
    config = load_config(trained / "tiny.yaml", ["drafter.family=d3d", "drafter.init=target"])
    serve_and_learn(config)
    online = result(trained, "online")
    assert online["rounds"] >= 1
    assert set(online["outcomes"]) <= {"champion", "refused", "rolled_back"}
    versions = registry_for(config, read_identity(config).target_id).list_versions()
    learnt = [v for v in versions if "-r1-" in v.tags["drafter_version"]]
    assert len(learnt) == 1 and learnt[0].tags["family"] == "d3d"


def test_what_a_d3d_drafter_cannot_be_trained_by_is_said(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for changes, command, said in (
        (["train.vocabulary=32"], "train", "train.vocabulary"),
        (["distill.vocabulary=32"], "distill", "distill.vocabulary"),
        (["prune.layers=9"], "prune", "prune.layers"),
    ):
        assert call(command, *D3D, *(w for c in changes for w in ("--set", c))) == 2
        assert said in capsys.readouterr().err
    assert call("prune", *D3D, "--resume") == 2
    assert "run without --resume" in capsys.readouterr().err

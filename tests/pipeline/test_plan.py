"""The command `plan`: what must hold between its figures, what does not fit, and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafters.block_loss import LOGITS_BYTES
from drafters.errors import UserError
from pipeline.cli import main
from pipeline.config import Config
from pipeline.plan.activations import dflash_activations
from pipeline.plan.advice import USABLE
from pipeline.plan.devices import GPUS
from pipeline.plan.loss_memory import chunk_rows
from pipeline.plan.memory import memory_of
from pipeline.plan.models import models_of
from pipeline.plan.planner import Outcome, Plan, make_plan
from pipeline.plan.report import network_rate
from pipeline.plan.strategy import Strategy
from pipeline.plan.time import exchange_bytes, received_bytes, target_moved

QWEN_8B = "Qwen/Qwen3-8B"


def config(**sections: Any) -> Config:
    """A run on Qwen3-8B with documents of 1,280 tokens, two of which fit into a row."""
    plain: dict[str, Any] = {
        "target": {"model": QWEN_8B},
        "drafter": {"num_layers": 5, "block_size": 16},
        "data": {"train": [{"path": "p.jsonl"}], "row_tokens": 2560},
        "train": {"anchors_per_document": 128},
    }
    return Config.model_validate({**plain, **sections})


def outcome(plan: Plan, strategy: str) -> Outcome:
    return next(o for o in plan.outcomes if o.strategy.name == strategy)


def single(settings: Config, **options: Any) -> Outcome:
    return outcome(make_plan(settings, **options), "single")


def test_the_batch_is_what_the_configuration_lets_in() -> None:
    step = make_plan(config()).step
    assert (step.documents, step.document_tokens, step.response_tokens) == (2, 1280, 256)
    assert (step.blocks, step.slots) == (256, 4096)
    assert make_plan(config(), document_tokens=320).step.documents == 8
    online = make_plan(config(), stage="online").step
    assert (online.documents, online.accumulate, online.objective) == (1, 2, "opd")


def test_few_response_tokens_have_few_anchors() -> None:
    assert make_plan(config(regenerate={"max_new_tokens": 20})).step.anchors == 19


def test_states_of_the_drafter_are_twelve_bytes_a_parameter_beside_four_of_weights() -> None:
    plan = make_plan(config())
    memory = plan.outcomes[0].memory
    parameters = plan.models.drafter.total
    assert memory.master_weights == memory.gradients == 4 * parameters
    assert memory.moments == 8 * parameters
    assert memory.target_weights == 2 * plan.models.target_size.total


def test_frozen_mlps_have_no_gradients() -> None:
    frozen = make_plan(config(drafter={"num_layers": 5, "block_size": 16, "freeze_mlp": True}))
    memory = frozen.outcomes[0].memory
    assert memory.gradients == 4 * (frozen.models.drafter.total - 5 * 3 * 4096 * 12288)
    assert memory.activations < single(config()).memory.activations


@pytest.mark.parametrize("family", ["dflash", "d3d"])
@pytest.mark.parametrize("objective", ["ce", "opd", "osd"])
def test_more_anchors_take_more_memory_and_time(family: str, objective: str) -> None:
    def at(anchors: int) -> Outcome:
        train = {"anchors_per_document": anchors, "loss": {"objective": objective}}
        return single(config(drafter={"family": family, "block_size": 16}, train=train))

    few, many = at(64), at(128)
    assert many.memory.activations > few.memory.activations
    assert many.memory.peak > few.memory.peak
    assert many.seconds > few.seconds


def test_logits_do_not_grow_with_slots_times_vocabulary() -> None:
    step = make_plan(config()).step
    row_bytes = step.target_bytes * step.loss_vocabulary
    for times in (1, 2, 8):
        grown = replace(step, anchors=times * step.anchors)
        assert chunk_rows(grown) * row_bytes <= LOGITS_BYTES
        assert chunk_rows(grown) > LOGITS_BYTES / row_bytes / 2


def test_distillation_needs_the_teachers_head() -> None:
    ce, opd = (single(config(train={"loss": {"objective": o}})) for o in ("ce", "opd"))
    assert opd.memory.loss > ce.memory.loss
    flops = [next(c.flops for c in o.time if c.name == "loss head") for o in (ce, opd)]
    assert flops[1] > flops[0]


def test_accumulation_repeats_batches_but_not_the_optimizer() -> None:
    once, twice = (single(config(train={"accumulate": n, "anchors_per_document": 64})) for n in (1, 2))
    for a, b in zip(once.time, twice.time, strict=True):
        assert b.seconds == pytest.approx(a.seconds * (1 if a.name == "optimizer" else 2))
    assert twice.memory.peak >= once.memory.peak


def test_fsdp_halves_states_on_two_gpus() -> None:
    plan = make_plan(config(), gpus=2)
    ddp, fsdp = outcome(plan, "DDP").memory, outcome(plan, "FSDP2").memory
    for name in ("master_weights", "gradients", "moments", "target_weights"):
        assert getattr(fsdp, name) * 2 == pytest.approx(getattr(ddp, name), abs=2)
    assert fsdp.activations == ddp.activations
    assert fsdp.peak < ddp.peak


def test_gpus_exchange_what_their_strategy_divides() -> None:
    plan = make_plan(config(), gpus=4)
    trained = plan.models.drafter.total
    ddp, fsdp = (outcome(plan, name).strategy for name in ("DDP", "FSDP2"))
    assert exchange_bytes(plan.step, plan.models, ddp) == 2 * 3 / 4 * 4 * trained
    weights = 2 * 2 * trained + 2 * plan.models.target_size.total
    assert exchange_bytes(plan.step, plan.models, fsdp) == 3 / 4 * (weights + 4 * trained)
    assert exchange_bytes(plan.step, plan.models, Strategy("single", 1)) == 0


def test_a_feature_server_keeps_the_target_away_and_sends_its_states() -> None:
    plan = make_plan(config())
    here, away = plan.outcomes
    assert away.memory.target_weights == 2 * 2 * 151936 * 4096
    assert away.memory.peak < here.memory.peak
    assert received_bytes(plan.step, plan.models, away.strategy) == 2560 * 5 * 4096 * 2
    with_teacher = make_plan(config(), stage="distill")
    assert received_bytes(with_teacher.step, with_teacher.models, away.strategy) == 2560 * 6 * 4096 * 2
    assert network_rate(plan, away) > 0
    assert network_rate(plan, here) == 0


def test_a_d3d_drafter_trained_on_hard_labels_receives_nothing() -> None:
    plan = make_plan(config(drafter={"family": "d3d"}))
    assert received_bytes(plan.step, plan.models, plan.outcomes[1].strategy) == 0
    assert plan.outcomes[1].memory.target_weights == 0
    assert "target forward" not in [c.name for c in plan.outcomes[0].time]


def test_few_tokens_do_not_read_all_experts() -> None:
    sparse = config(target={"model": "Qwen/Qwen3-Coder-30B-A3B-Instruct"})
    plan = make_plan(sparse)
    size = plan.models.target_size
    one = replace(plan.step, documents=1, document_tokens=1)
    assert target_moved(one, plan.models) == pytest.approx(2 * (size.matrices - size.idle_matrices), rel=0.01)
    assert target_moved(plan.step, plan.models) > 2 * size.matrices
    assert any("qwen3_moe" in note for note in plan.notes)


def test_what_does_not_fit_says_so_and_what_would_help() -> None:
    plan = make_plan(config(target={"model": "Qwen/Qwen3-32B"}), device="a100")
    here, away = plan.outcomes
    assert not here.fits
    assert here.memory.peak > USABLE * GPUS["a100"].memory_bytes
    assert away.fits
    assert away.advice == []
    assert any("feature server" in text for text in here.advice)
    shard = next(text for text in here.advice if "FSDP2" in text)
    gpus = int(shard.split()[2])
    assert outcome(
        make_plan(config(target={"model": "Qwen/Qwen3-32B"}), device="a100", gpus=gpus), "FSDP2"
    ).fits


def test_advice_to_lower_anchors_is_followed_by_a_plan_that_fits() -> None:
    long = config(train={"anchors_per_document": 255}, data={"train": [{"path": "p"}], "row_tokens": 32768})
    (here, _) = make_plan(long, device="a100").outcomes
    assert not here.fits
    advised = {
        text.split("=")[0]: int(text.split("=")[1].split(":")[0])
        for text in here.advice
        if "=" in text and "mlp" not in text
    }
    fewer = config(
        train={"anchors_per_document": advised["train.anchors_per_document"]}, data=long.data.model_dump()
    )
    assert single(fewer, device="a100").fits
    shorter = long.model_copy(
        update={"data": long.data.model_copy(update={"row_tokens": advised["data.row_tokens"]})}
    )
    assert single(shorter, device="a100").fits


def test_hopeless_plans_say_that_no_single_change_helps() -> None:
    huge = config(
        drafter={"family": "d3d", "model": "Qwen/Qwen3-32B", "block_size": 64},
        target={"model": "Qwen/Qwen3-32B"},
        data={"train": [{"path": "p"}], "row_tokens": 65536},
        train={"anchors_per_document": 255},
    )
    assert any("no single change" in text for text in single(huge).advice)


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        (QWEN_8B, 1),
        ("Qwen/Qwen3-32B", 8),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 1),
        ("Qwen/Qwen3.5-9B", 1),
    ],
)
def test_real_sizes_fit_an_h200(name: str, gpus: int) -> None:
    plan = make_plan(config(target={"model": name}), device="h200", gpus=gpus)
    assert any(o.fits for o in plan.outcomes)


def test_phases_of_the_peak_are_not_added_up() -> None:
    plan = make_plan(config())
    memory = plan.outcomes[0].memory
    assert memory.resident < memory.peak < sum(memory.components().values())
    step = replace(plan.step, accumulate=2)
    stays = memory_of(step, plan.models, plan.outcomes[0].strategy)
    assert stays.peak == pytest.approx(
        stays.resident
        + stays.features
        + stays.weight_casts
        + stays.activations
        + max(stays.loss, stays.drafter_backward)
    )


def test_activations_in_fp32_are_larger() -> None:
    plan = make_plan(config())
    shape = {"layers": 5, "context_layers": 5}
    wide = dflash_activations(replace(plan.step, mixed=False), plan.models.target, **shape)
    assert wide > dflash_activations(plan.step, plan.models.target, **shape)


def test_models_follow_the_layer_ids() -> None:
    chosen = models_of(config(drafter={"target_layer_ids": [3, 9, 20]}))
    assert chosen.context_layers == 3
    with pytest.raises(UserError, match=r"drafter\.target_layer_ids"):
        models_of(config(drafter={"target_layer_ids": [3, 99]}))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration as a file in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(config().dump()))
    return path


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_command_prints_tables_and_writes_json(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("mine.yaml", "--gpus", "2", "--device", "a100", "--json", "plan.json") == 0
    printed = capsys.readouterr().out
    assert "target weights" in printed
    assert "drafter backward" in printed
    made = json.loads(Path("plan.json").read_text())
    assert made["target"]["parameters"] == 8_190_735_360
    strategies = {s["strategy"]: s for s in made["strategies"]}
    assert set(strategies) == {"DDP", "FSDP2", "DDP, feature server", "FSDP2, feature server"}
    for strategy in strategies.values():
        assert strategy["seconds"] == pytest.approx(sum(c["seconds"] for c in strategy["time"]))
        assert strategy["peak_bytes"] >= strategy["resident_bytes"]


def test_command_measures_this_cpu(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        call(
            "mine.yaml",
            "--set",
            "target.model=tiny:llama",
            "--set",
            "drafter.num_layers=2",
            "--device",
            "cpu",
        )
        == 0
    )
    assert "fits" in capsys.readouterr().out


def test_a_directory_gives_its_own_sizes(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("model").mkdir()
    (Path("model") / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert call("mine.yaml", "--set", "target.model=model") == 2
    assert "config.json has no num_hidden_layers" in capsys.readouterr().err
    (Path("model") / "config.json").write_text('{"model_type": "gpt2"}')
    assert call("mine.yaml", "--set", "target.model=model") == 2
    assert "gpt2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--set", "target.model=some/model"], "target.model"),
        (["--set", "target.model=package:absent_package"], "target.model"),
        (["--set", "drafter.family=d3d", "--set", "drafter.model=some/model"], "drafter.model"),
        (
            ["--set", "drafter.family=d3d", "--set", "drafter.model=HuggingFaceTB/SmolLM2-135M-Instruct"],
            "drafter.model",
        ),
        (
            ["--set", "drafter.family=d3d", "--set", "target.model=Qwen/Qwen3-Coder-30B-A3B-Instruct"],
            "drafter.model",
        ),
        (["--set", "drafter.family=d3d", "--set", "train.vocabulary=100"], "train.vocabulary"),
        (["--set", "drafter.num_context_layers=60"], "drafter.num_context_layers"),
        (["--set", "train.loss.objective=best"], "train.loss.objective"),
        (["--device", "tpu"], "--device"),
        (["--device", "cpu", "--gpus", "2"], "--gpus"),
        (["--gpus", "0"], "--gpus"),
        (["--stage", "deploy"], "--stage"),
        (["--document-tokens", "1"], "--document-tokens"),
        (["--document-tokens", "99999"], "--document-tokens"),
        (["--json", "absent/plan.json"], "--json"),
    ],
)
def test_bad_input_is_one_line_with_the_key_and_exit_code_2(
    words: list[str], named: str, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("mine.yaml", *words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert named in message
    assert message.count("\n") == 1

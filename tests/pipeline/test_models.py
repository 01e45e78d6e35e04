"""Targets from where the config says, drafters that belong to them, and the length policies of a config."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.acceptance_head import AcceptanceHead
from drafters.checkpoint import LoadedDrafter, load_drafter, save_drafter
from drafters.errors import UserError
from drafters.length_head import LengthHead
from drafters.packing import Document
from drafters.policies import AdaFlashPolicy, FixedPolicy, Load
from drafters.survival_policy import SurvivalPolicy
from drafters.throughput_policy import ThroughputPolicy
from pipeline.config import Config, PolicyConfig
from pipeline.models import (
    fingerprint,
    load_drafter_for,
    load_target,
    new_drafter,
    prepare_training,
    target_directory,
    target_name,
)
from pipeline.policies import make_policy, policy_factory


def config_for(output: Path, model: str = "tiny:llama", **changes: Any) -> Config:
    return Config.model_validate(
        {
            "target": {"model": model, "dtype": "float32"},
            "drafter": {"num_layers": 1, "block_size": 4, "num_context_layers": 2},
            "data": {"train": [{"path": "unused.jsonl"}]},
            "output": output,
            "threads": 1,
        }
        | changes
    )


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny Llama-shaped target has been written."""
    directory = tmp_path_factory.mktemp("models") / "out"
    directory.mkdir()
    target_directory(config_for(directory))
    return directory


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tiny_target_is_an_ordinary_model_directory(kind: str, tmp_path: Path) -> None:
    config = config_for(tmp_path, f"tiny:{kind}")
    bundle = load_target(config)
    assert bundle.target.config.model_type == kind
    assert target_name(config) == kind == bundle.target.identity.name
    assert bundle.target.dtype == torch.float32 and len(bundle.target.layer_ids) == 2
    again = load_target(config_for(tmp_path / "elsewhere", str(tmp_path / "target")))
    assert again.target.identity.revision == bundle.target.identity.revision
    assert again.target.identity.tokenizer_hash == bundle.target.identity.tokenizer_hash


def test_tiny_target_depends_on_the_seed_alone(tmp_path: Path) -> None:
    prints = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        prints.append(fingerprint(Path(target_directory(config_for(tmp_path / name, seed=seed)))))
    assert prints[0] == prints[1] != prints[2]


def test_a_target_once_written_is_used_again(output: Path) -> None:
    written = (output / "target" / "model.safetensors").stat().st_mtime_ns
    load_target(config_for(output), dtype="bfloat16")
    assert (output / "target" / "model.safetensors").stat().st_mtime_ns == written
    assert not list(output.glob("*partial*"))


def test_another_target_does_not_pass_for_the_one_that_was_written(output: Path) -> None:
    with pytest.raises(UserError, match="target was made from tiny:llama with seed 0, not tiny:qwen3"):
        target_directory(config_for(output, "tiny:qwen3"))
    with pytest.raises(UserError, match="not tiny:llama with seed 5"):
        target_directory(config_for(output, seed=5))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("tiny:gpt", "tiny:gpt is unknown; use tiny:llama or tiny:qwen3"),
        ("package:no_such_model", "'no_such_model' is not installed.*pip install.*no-such-model"),
        ("package:typer", "one GGUF file.*found 0"),
        ("/no/such/directory", "/no/such/directory cannot be loaded"),
    ],
)
def test_a_target_that_is_not_there_is_named(model: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"target.model: .*{named}"):
        load_target(config_for(tmp_path, model))
    assert not (tmp_path / "target").exists()


def test_fingerprint_sees_weights_and_config_but_not_the_place(output: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(output / "target", tmp_path / "copy")
    expected = fingerprint(output / "target")
    assert fingerprint(copy) == expected and len(expected) == 12
    (copy / "README.md").write_text("words")
    assert fingerprint(copy) == expected
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    changed = fingerprint(copy)
    assert changed != expected
    (copy / "config.json").write_text("{}")
    assert fingerprint(copy) not in {expected, changed}


def test_responses_end_at_the_tokens_of_model_and_tokenizer(output: Path, tmp_path: Path) -> None:
    tokenizer_end = load_target(config_for(output)).tokenizer.eos_token_id
    assert load_target(config_for(output)).eos_ids == [tokenizer_end]
    copy = shutil.copytree(output / "target", tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    assert sorted(load_target(config_for(tmp_path, str(copy))).eos_ids) == sorted({0, 7, tokenizer_end})


def test_drafter_of_another_target_or_other_layers_is_refused(output: Path, tmp_path: Path) -> None:
    config = config_for(output)
    bundle = load_target(config)
    place = save_drafter(
        tmp_path / "drafter",
        new_drafter(config, bundle),
        identity=bundle.target.identity,
        drafter_version="v1",
    )
    loaded = load_drafter_for(place, bundle, dtype=torch.float32)
    assert loaded.drafter.block_size == 4
    other_layers = load_target(config_for(output, drafter={"target_layer_ids": [0, 2]}))
    with pytest.raises(UserError, match=r"reads target layers .* drafter\.target_layer_ids"):
        load_drafter_for(place, other_layers)
    other_target = load_target(config_for(tmp_path, "tiny:qwen3"))
    with pytest.raises(UserError, match="made for target llama@"):
        load_drafter_for(place, other_target)


def test_a_new_drafter_depends_on_the_seed_alone(output: Path) -> None:
    bundle = load_target(config_for(output))
    weights = [
        torch.cat([p.flatten() for p in new_drafter(config_for(output, seed=seed), bundle).parameters()])
        for seed in (1, 1, 2)
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert weights[0].dtype == torch.float32


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_mlps_are_the_only_weights_that_do_not_train(output: Path, frozen: bool) -> None:
    bundle = load_target(config_for(output))
    drafter = new_drafter(config_for(output), bundle)
    document = Document([1, 2, 3, 4, 5], [False, False, True, True, True], "d")
    prepare_training(drafter, bundle, [document], freeze_mlp=frozen)
    still = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    mlps = {name for name, _ in drafter.named_parameters() if ".mlp." in name}
    assert mlps and still == (mlps if frozen else set())


def test_policies_of_a_config(output: Path, tmp_path: Path) -> None:
    config = config_for(output)
    bundle = load_target(config)
    drafter = new_drafter(config, bundle)
    identity = bundle.target.identity
    hidden_NBH = torch.randn(5, 4, bundle.target.config.hidden_size)
    save_drafter(tmp_path / "plain", drafter, identity=identity, drafter_version="v1")
    head = LengthHead(bundle.target.config.hidden_size, 8)
    save_drafter(tmp_path / "head", drafter, identity=identity, drafter_version="v1", length_head=head)
    plain, with_head = load_drafter(tmp_path / "plain"), load_drafter(tmp_path / "head")

    fixed = make_policy(PolicyConfig(name="fixed", length=3), with_head)
    assert isinstance(fixed, FixedPolicy)
    assert fixed.verify_len(hidden_NBH, hidden_NBH, Load()).tolist() == [3] * 5
    without = make_policy(PolicyConfig(name="adaflash"), plain)
    assert without.verify_len(hidden_NBH, hidden_NBH, Load()).tolist() == [4] * 5

    settings = PolicyConfig(name="adaflash", gamma=1.5, gamma_by_load={4: 0.5}, off_below_load=2)
    policy = make_policy(settings, with_head)
    assert isinstance(policy, AdaFlashPolicy) and policy.name == "adaflash"
    assert policy.gamma_at(Load(3)) == 1.5 and policy.gamma_at(Load(4)) == 0.5
    assert policy.verify_len(hidden_NBH, hidden_NBH, Load(1)).tolist() == [4] * 5
    predicted_N = head(hidden_NBH)
    expected = (predicted_N * 1.5 * 4).floor().clamp(1, 4).long().tolist()
    assert policy.verify_len(hidden_NBH, hidden_NBH, Load(2)).tolist() == expected


def saved_without_and_with_head(output: Path, directory: Path) -> tuple[LoadedDrafter, LoadedDrafter]:
    """v1 without an acceptance head, v2 with one."""
    config = config_for(output)
    bundle = load_target(config)
    drafter = new_drafter(config, bundle)
    identity = bundle.target.identity
    save_drafter(directory / "plain", drafter, identity=identity, drafter_version="v1")
    head = AcceptanceHead(bundle.target.config.hidden_size, drafter.block_size, 8)
    save_drafter(directory / "head", drafter, identity=identity, drafter_version="v2", acceptance_head=head)
    return load_drafter(directory / "plain"), load_drafter(directory / "head")


def test_policies_that_need_an_acceptance_head(output: Path, tmp_path: Path) -> None:
    plain, with_head = saved_without_and_with_head(output, tmp_path)
    for name in ("survival", "throughput"):
        with pytest.raises(UserError, match=rf"^policy\.name: {name} needs an acceptance head.*v1 has none"):
            make_policy(PolicyConfig(name=name), plain)
    survival = make_policy(
        PolicyConfig(name="survival", threshold=0.2, threshold_by_load={8: 0.6}), with_head
    )
    assert isinstance(survival, SurvivalPolicy) and survival.name == "survival"
    assert (survival.threshold_at(Load(7)), survival.threshold_at(Load(8))) == (0.2, 0.6)
    factory = policy_factory(PolicyConfig(name="throughput", probe_every=9))
    first = factory(with_head)
    assert isinstance(first, ThroughputPolicy)
    assert first.name == "throughput" and first.probe_every == 9
    first.costs.observe_verify(4, 1, 2.0)
    first.costs.observe_draft(1, 0.5)
    second = factory(with_head)
    assert isinstance(second, ThroughputPolicy) and second.costs is not first.costs
    assert second.costs.verify_s([4], 1).tolist() == [2.0], "the target is the same"
    assert second.costs.draft_s(1) == 0.0, "the drafter is another"
    other = make_policy(PolicyConfig(name="throughput"), with_head)
    assert isinstance(other, ThroughputPolicy) and other.costs.observed == 0


@pytest.mark.parametrize("name", ["survival", "throughput"])
def test_a_swap_to_a_drafter_without_the_head_verifies_whole_blocks(
    name: Any, output: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or a rollback to a champion from before the head would leave the challenger serving."""
    plain, with_head = saved_without_and_with_head(output, tmp_path)
    factory = policy_factory(PolicyConfig(name=name))
    with pytest.raises(UserError, match="v1 has none"):
        factory(plain)
    assert factory(with_head).name == name
    assert factory(plain) == FixedPolicy()
    assert f"policy {name}: drafter v1 has no acceptance head" in caplog.text
    assert factory(with_head).name == name

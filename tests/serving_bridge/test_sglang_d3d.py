"""What the plugin decides about D3D without a server: what is refused, what goes into the draft model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from drafters.checkpoint import save_drafter
from drafters.d3d import D3DDrafter
from drafters.errors import UserError
from serving_bridge.sglang_plugin.d3d import (
    after_capture,
    after_draft_config,
    check_target,
    checked_block_size,
)
from serving_bridge.sglang_plugin.drafter_store import DrafterStore, engine_weights, read_served
from tests.serving_bridge.swap_samples import IDENTITY, order

D3D_CONFIG = {"block_size": 4, "mask_token_id": 31}


def hf_config(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "d3d_config": D3D_CONFIG,
        "vocab_size": 32,
        "architectures": ["LlamaForCausalLM"],
    }
    return SimpleNamespace(**(fields | changes))


def arguments(**given: Any) -> Any:
    names = (
        "speculative_num_draft_tokens",
        "speculative_dflash_block_size",
        "speculative_draft_window_size",
    )
    return SimpleNamespace(**(dict.fromkeys(names) | given))


def draft_of(algorithm: str, config: Any, *, is_draft_model: bool = True) -> Any:
    return SimpleNamespace(
        speculative_algorithm=algorithm,
        is_draft_model=is_draft_model,
        hf_config=config,
        model_path="/drafters/v1",
    )


def test_the_block_size_is_the_checkpoints() -> None:
    assert checked_block_size(arguments(), hf_config()) == 4
    assert checked_block_size(arguments(speculative_num_draft_tokens=4), hf_config()) == 4


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"speculative_num_draft_tokens": 8}, "--speculative-num-draft-tokens 8"),
        ({"speculative_dflash_block_size": 2}, "--speculative-dflash-block-size 2"),
        ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size"),
    ],
)
def test_settings_that_a_drafter_cannot_follow_are_refused(given: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        checked_block_size(arguments(**given), hf_config())


def test_a_checkpoint_without_d3d_config_is_no_d3d_drafter() -> None:
    plain = hf_config(d3d_config=None)
    with pytest.raises(UserError, match="not a D3D drafter"):
        checked_block_size(arguments(), plain)
    with pytest.raises(UserError, match="not a D3D drafter"):
        after_draft_config(None, draft_of("D3D", plain))


@pytest.mark.parametrize("algorithm", ["DFLASH", "ADAFLASH"])
def test_dflash_does_not_run_a_d3d_drafter(algorithm: str) -> None:
    with pytest.raises(ValueError, match=r"/drafters/v1: a D3D drafter; start with .* D3D"):
        after_draft_config(None, draft_of(algorithm, hf_config()))


@pytest.mark.parametrize(
    "untouched",
    [
        draft_of("D3D", hf_config(), is_draft_model=False),
        draft_of("STANDALONE", hf_config()),
        draft_of("DFLASH", hf_config(d3d_config=None)),
    ],
)
def test_other_models_are_left_alone(untouched: Any) -> None:
    before = dict(vars(untouched.hf_config))
    after_draft_config(None, untouched)
    assert vars(untouched.hf_config) == before


@pytest.mark.parametrize(
    ("target", "word"),
    [
        (SimpleNamespace(vocab_size=64, is_multimodal=False), "32 rows of vocabulary, the target 64"),
        (SimpleNamespace(vocab_size=32, is_multimodal=True), "images"),
    ],
)
def test_a_target_that_the_drafter_cannot_read_is_refused(target: Any, word: str) -> None:
    check_target(SimpleNamespace(vocab_size=32, is_multimodal=False), SimpleNamespace(vocab_size=32))
    with pytest.raises(ValueError, match=word):
        check_target(target, SimpleNamespace(vocab_size=32))


def test_nothing_of_the_target_is_captured() -> None:
    for name, captures in (("D3D", False), ("DFLASH", True)):
        config = SimpleNamespace(dflash_use_aux_hidden_state=True, dflash_target_layer_ids=[0])
        after_capture(None, config=config, spec_algorithm=SimpleNamespace(name=name), is_draft_worker=False)
        assert config.dflash_use_aux_hidden_state is captures


def tiny_d3d(tied: bool) -> D3DDrafter:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    config.d3d_config = D3D_CONFIG
    return D3DDrafter(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_gets_the_weights_by_their_names_in_the_checkpoint(tied: bool, tmp_path: Path) -> None:
    drafter = tiny_d3d(tied)
    place = save_drafter(
        tmp_path / "v1", drafter, identity=IDENTITY, drafter_version="v1", dtype=torch.float32
    )
    weights, saved = dict(engine_weights(drafter)), load_file(place / "model.safetensors")
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in saved.items())


def test_a_head_of_its_own_is_not_loaded_into_a_model_that_ties_it(tmp_path: Path) -> None:
    for name, tied in (("tied", True), ("untied", False)):
        save_drafter(tmp_path / name, tiny_d3d(tied), identity=IDENTITY, drafter_version=name)
    for served, other in (("tied", "untied"), ("untied", "tied")):
        store = DrafterStore(
            tiny_d3d(served == "tied").lm,
            read_served(str(tmp_path / served), ""),
            swap_root=str(tmp_path),
            max_bytes=2**20,
        )
        assert store.handle(order("stage", tmp_path / other))[0]
        store.wait_staged()
        done, reason = store.handle(order("commit", tmp_path / other))
        assert not done and "tie_word_embeddings" in reason

"""The drafter's config, and the rule for the mask token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from drafters.dflash_config import DFlashSpec, choose_mask_token, drafter_config
from drafters.errors import UserError
from drafters.target import Target

WORDS = ["a", "b", "c", "d"]


def make_tokenizer(special: list[str], template: str | None = None, **roles: Any) -> PreTrainedTokenizerFast:
    """Ids: the words 0..3, then `special` in order."""
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **roles)
    tokenizer.chat_template = template
    return tokenizer


def config(vocab_size: int = 16) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocab_size, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)


def test_a_configured_mask_token_wins() -> None:
    tokenizer = make_tokenizer(["<eos>", "<mask>"], eos_token="<eos>", mask_token="<mask>")
    assert choose_mask_token(tokenizer, config(), 2) == 2
    assert choose_mask_token(tokenizer, config(), None) == 5
    for bad in (-1, 16):
        with pytest.raises(UserError, match=r"target\.mask_token_id"):
            choose_mask_token(tokenizer, config(), bad)


def test_reserved_tokens_come_before_other_special_ones() -> None:
    special = ["<eos>", "<tool>", "<|reserved_0|>", "<|reserved_1|>"]
    assert choose_mask_token(make_tokenizer(special, eos_token="<eos>"), config(), None) == 6


def test_tokens_that_the_chat_template_writes_are_in_use() -> None:
    special = ["<bos>", "<eos>", "<|turn|>", "<|tool|>"]
    tokenizer = make_tokenizer(
        special, "{{ '<|turn|>' + messages[0]['content'] }}", bos_token="<bos>", eos_token="<eos>"
    )
    assert choose_mask_token(tokenizer, config(), None) == 7


def test_a_reserved_token_listed_as_additional_is_still_unused() -> None:
    tokenizer = make_tokenizer(
        ["<eos>", "<|reserved_0|>"], eos_token="<eos>", extra_special_tokens=["<|reserved_0|>"]
    )
    assert choose_mask_token(tokenizer, config(), None) == 5


def test_without_a_candidate_the_key_to_set_is_named() -> None:
    for tokenizer, size in (
        (make_tokenizer(["<eos>"], eos_token="<eos>"), 16),
        (make_tokenizer(["<eos>", "<|reserved_0|>"], eos_token="<eos>"), 5),  # id 5 has no embedding row
    ):
        with pytest.raises(UserError, match=r"target\.mask_token_id"):
            choose_mask_token(tokenizer, config(size), None)


def make(target_config: Any, **changes: Any) -> Qwen3Config:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "block_size": 4,
        "mask_token_id": 5,
        "target_layer_ids": [0, 2],
    }
    return drafter_config(target_config, **{**fields, **changes})


def test_the_drafter_takes_the_targets_widths(kind: str, make_target: Callable[..., Target]) -> None:
    target = make_target(kind).config
    drafter = make(target)
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_parameters",
    ):  # fmt: skip
        assert getattr(drafter, name) == getattr(target, name), name
    assert drafter.num_hidden_layers == 2
    assert DFlashSpec.from_config(drafter) == DFlashSpec(4, 5, [0, 2], target.num_hidden_layers)


def test_rotary_settings_are_carried_over_or_refused() -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    target = config()
    target.rope_parameters = rope
    assert make(target).rope_parameters == rope
    target.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(UserError, match="partial rotary"):
        make(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": 16}, "mask_token_id"),
        ({"target_layer_ids": [0, 4]}, "target_layer_ids"),
    ],
)
def test_impossible_drafters_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(config(), **changes)


def test_a_config_of_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="not a DFlash drafter"):
        DFlashSpec.from_config(Qwen3Config())
    nested = make(config())
    nested.block_size = None
    nested.dflash_config["block_size"] = 7
    assert DFlashSpec.from_config(nested).block_size == 7

"""Which target a drafter belongs to."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from drafters.errors import UserError
from drafters.identity import TargetIdentity, require_same_target, tokenizer_hash


def make_tokenizer(special: list[str], template: str, eos_token: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos_token)
    tokenizer.chat_template = template
    return tokenizer


def test_the_tokenizer_hash_follows_what_decides_token_ids() -> None:
    base = tokenizer_hash(make_tokenizer(["<eos>", "<x>"], "T", "<eos>"))
    assert base == tokenizer_hash(make_tokenizer(["<eos>", "<x>"], "T", "<eos>"))
    for other in (
        make_tokenizer(["<x>", "<eos>"], "T", "<eos>"),
        make_tokenizer(["<eos>", "<x>"], "U", "<eos>"),
        make_tokenizer(["<eos>", "<x>"], "T", "<x>"),
    ):
        assert tokenizer_hash(other) != base


def test_another_target_is_refused_by_name() -> None:
    mine = TargetIdentity("m", "r", "h" * 64)
    require_same_target(mine, TargetIdentity("m", "r", "h" * 64), "drafter x")
    with pytest.raises(UserError, match=r"drafter x.*tokenizer"):
        require_same_target(mine, TargetIdentity("m", "r", "i" * 64), "drafter x")
    for other in (TargetIdentity("n", "r", "h" * 64), TargetIdentity("m", "s", "h" * 64)):
        with pytest.raises(UserError, match="drafter x"):
            require_same_target(mine, other, "drafter x")
    assert TargetIdentity.from_json(mine.to_json()) == mine
    assert mine.target_id == "m@r#" + "h" * 12
    with pytest.raises(UserError, match="revision"):
        TargetIdentity.from_json({"name": "m", "tokenizer_hash": "h"})

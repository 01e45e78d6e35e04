"""Configuration of a DFlash drafter: an ordinary `Qwen3Config` with the fields that serving engines read.

The drafter's own layers are always Qwen3-shaped (with query/key norms) because that is what the serving layout can
express, whether the target is Llama or Qwen3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

from drafters.errors import UserError
from drafters.layer_ids import check_layer_ids

ARCHITECTURE = "DFlashDraftModel"


@dataclass(frozen=True)
class DFlashSpec:
    """What makes a Qwen3 config a DFlash drafter's."""

    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    num_target_layers: int

    @classmethod
    def from_config(cls, config: Any) -> DFlashSpec:
        """Read and check the fields.

        Raises:
            UserError: naming the missing or impossible field.
        """
        dflash = getattr(config, "dflash_config", None) or {}
        try:
            spec = cls(
                block_size=int(getattr(config, "block_size", 0) or dflash["block_size"]),
                mask_token_id=int(dflash["mask_token_id"]),
                target_layer_ids=[int(i) for i in dflash["target_layer_ids"]],
                num_target_layers=int(config.num_target_layers),
            )
        except (KeyError, AttributeError) as missing:
            raise UserError(f"config.json: not a DFlash drafter, {missing} is missing") from None
        if spec.block_size < 2:
            raise UserError(f"drafter.block_size: {spec.block_size} leaves nothing to draft; use at least 2")
        if not 0 <= spec.mask_token_id < config.vocab_size:
            raise UserError(
                f"dflash_config.mask_token_id: {spec.mask_token_id} is outside the vocabulary "
                f"of {config.vocab_size}"
            )
        check_layer_ids(spec.target_layer_ids, spec.num_target_layers)
        return spec


def drafter_config(
    target_config: Any,
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: list[int],
) -> Any:
    """The config of a drafter for a Llama- or Qwen3-shaped target: the target's widths, `num_layers` layers.

    Raises:
        UserError: for rotary settings that the serving engines would not reproduce.
    """
    rope = dict(target_config.rope_parameters or {})
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("target.model: partial rotary embeddings cannot be expressed in the drafter layout")
    heads = target_config.num_attention_heads
    config: Any = Qwen3Config(
        vocab_size=target_config.vocab_size,
        hidden_size=target_config.hidden_size,
        intermediate_size=target_config.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=target_config.num_key_value_heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        hidden_act=target_config.hidden_act,
        max_position_embeddings=target_config.max_position_embeddings,
        rms_norm_eps=target_config.rms_norm_eps,
        rope_parameters=rope,
        attention_bias=False,
        tie_word_embeddings=False,
        bos_token_id=target_config.bos_token_id,
        eos_token_id=target_config.eos_token_id,
        layer_types=["full_attention"] * num_layers,
        architectures=[ARCHITECTURE],
    )
    config.block_size = block_size
    config.num_target_layers = target_config.num_hidden_layers
    config.dflash_config = {"mask_token_id": mask_token_id, "target_layer_ids": target_layer_ids}
    DFlashSpec.from_config(config)
    return config


def choose_mask_token(tokenizer: Any, target_config: Any, configured: int | None) -> int:
    """The mask token id.

    Rule: the configured id; else the tokenizer's own mask token; else the first special token (by id) that looks reserved
    (its text holds "reserved", "unused", "extra" or "filler"); else the first special token that is not used as
    bos, eos, pad or unk and does not occur in the chat template. Its embedding row stays as the target has it.

    Raises:
        UserError: when no token qualifies, naming the key to set.
    """
    if configured is not None:
        if not 0 <= configured < target_config.vocab_size:
            raise UserError(
                f"target.mask_token_id: {configured} is outside the vocabulary of {target_config.vocab_size}"
            )
        return configured
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    template = str(tokenizer.chat_template or "")
    # not `all_special_ids`: that lists every additional special token, used or not
    in_use = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
    }
    special = [
        (token_id, str(token))
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token_id not in in_use and str(token) not in template
    ]
    reserved = [
        i for i, text in special if any(w in text.lower() for w in ("reserved", "unused", "extra", "filler"))
    ]
    candidates = [i for i in [*reserved, *(i for i, _ in special)] if i < target_config.vocab_size]
    if not candidates:
        raise UserError("target.mask_token_id: the tokenizer has no unused special token; set an id")
    return candidates[0]

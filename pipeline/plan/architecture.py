"""The sizes of a causal LM as its Hugging Face `config.json` states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drafters.errors import UserError

KNOWN_MODEL_TYPES = ("llama", "qwen3", "qwen3_moe", "qwen3_5_text")


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of a Gated DeltaNet layer: heads, head sizes, and taps of its convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_width(self) -> int:
        """Elements of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def projection_width(self) -> int:
        """Outputs of all input projections: queries, keys, values, output gate, and two rates for each value head."""
        return 2 * self.key_width + 2 * self.value_width + 2 * self.value_heads


@dataclass(frozen=True)
class Experts:
    """A sparse MLP: experts held, experts that a token passes through, width of one."""

    held: int
    active: int
    intermediate: int


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with gated MLPs and RMSNorm; all sizes in elements.

    `full_attention` and `sparse` say of every layer whether its attention is softmax attention (otherwise `linear`) and
    whether its MLP is made of `experts`. `gated_attention`: the query projection also gives an output gate.
    """

    model_type: str
    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    gated_attention: bool
    full_attention: tuple[bool, ...]
    sparse: tuple[bool, ...]
    linear: LinearAttention | None = None
    experts: Experts | None = None

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.full_attention)

    @property
    def query_width(self) -> int:
        """Elements of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all keys of a token, and of all values."""
        return self.kv_heads * self.head_dim


def from_hf(fields: Mapping[str, Any], source: str) -> Architecture:
    """Read the fields of a `config.json`; of a multimodal model, those of its text part.

    Args:
        fields: the parsed file.
        source: key and place, for errors.

    Raises:
        UserError: naming the architecture that is not known here, or the field that is missing or no size.
    """
    fields = fields.get("text_config", fields)
    model_type = str(fields.get("model_type"))
    if model_type not in KNOWN_MODEL_TYPES:
        raise UserError(
            f"{source}: sizes of architecture {model_type!r} are not known; those of {', '.join(KNOWN_MODEL_TYPES)} are"
        )
    try:
        return _read(fields, model_type)
    except KeyError as missing:
        raise UserError(f"{source}: config.json has no {missing.args[0]}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{source}: config.json holds something that is no size ({error})") from None


def _read(fields: Mapping[str, Any], model_type: str) -> Architecture:
    layers, heads = int(fields["num_hidden_layers"]), int(fields["num_attention_heads"])
    hidden = int(fields["hidden_size"])
    full = [True] * layers
    linear = None
    if model_type == "qwen3_5_text":
        interval = int(fields.get("full_attention_interval", 4))
        kinds = fields.get("layer_types")
        full = (
            [kind == "full_attention" for kind in kinds]
            if kinds
            else [(layer + 1) % interval == 0 for layer in range(layers)]
        )
        linear = LinearAttention(
            key_heads=int(fields["linear_num_key_heads"]),
            value_heads=int(fields["linear_num_value_heads"]),
            key_dim=int(fields["linear_key_head_dim"]),
            value_dim=int(fields["linear_value_head_dim"]),
            kernel=int(fields["linear_conv_kernel_dim"]),
        )
    sparse = [False] * layers
    experts = None
    if model_type == "qwen3_moe":
        # transformers writes the one name, checkpoints of Qwen the other
        held = fields["num_local_experts"] if "num_local_experts" in fields else fields["num_experts"]
        experts = Experts(int(held), int(fields["num_experts_per_tok"]), int(fields["moe_intermediate_size"]))
        step, dense = int(fields.get("decoder_sparse_step", 1)), set(fields.get("mlp_only_layers") or ())
        sparse = [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]
    return Architecture(
        model_type=model_type,
        vocab=int(fields["vocab_size"]),
        hidden=hidden,
        intermediate=int(fields["intermediate_size"]),
        heads=heads,
        kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or hidden // heads),
        tied=bool(fields.get("tie_word_embeddings", False)),
        qk_norm=model_type != "llama",
        attention_bias=bool(fields.get("attention_bias", False)),
        mlp_bias=bool(fields.get("mlp_bias", False)),
        gated_attention=model_type == "qwen3_5_text",
        full_attention=tuple(full),
        sparse=tuple(sparse),
        linear=linear,
        experts=experts,
    )

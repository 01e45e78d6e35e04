"""The DFlash drafter: a few Qwen3-style layers that fill a block of masks in one forward pass.

The target's chosen hidden states are concatenated, projected by `fc`, normalised, and enter every layer through its own
key/value projections; they are never transformed further. Block slots are embedded by the frozen target embedding and
attend to the context and to their own block, without causality. Parameter names are those of the serving layout
(z-lab, SGLang), so a checkpoint is the module's own state dict.

Shapes: N blocks, B block size, R = N·B block slots, T flat context tokens, H hidden, C feature width, K/G
attention/key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from drafters.blocks import AttentionGroup
from drafters.dflash_config import DFlashSpec

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""Keys (rotated) and values of one layer, each [T, G, D]."""


def _rotate(x_RKD: torch.Tensor, cos_RD: torch.Tensor, sin_RD: torch.Tensor) -> torch.Tensor:
    return x_RKD * cos_RD[:, None] + rotate_half(x_RKD) * sin_RD[:, None]


class DFlashAttention(nn.Module):
    """Attention of block slots over [context | own block]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def key_value(self, x_TH: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> KeyValue:
        """Rotated keys and values [T, G, D] of context features or block slots."""
        shape = (x_TH.shape[0], self.num_kv_heads, self.head_dim)
        keys = self.k_norm(self.k_proj(x_TH).view(shape))
        return _rotate(keys, cos_TD, sin_TD), self.v_proj(x_TH).view(shape)

    def forward(
        self,
        x_RH: torch.Tensor,
        cos_RD: torch.Tensor,
        sin_RD: torch.Tensor,
        context: KeyValue,
        groups: Sequence[AttentionGroup],
        block_size: int,
    ) -> torch.Tensor:
        queries = self.q_norm(self.q_proj(x_RH).view(-1, self.num_heads, self.head_dim))
        queries = _rotate(queries, cos_RD, sin_RD)
        own_keys, own_values = self.key_value(x_RH, cos_RD, sin_RD)
        context_keys, context_values = context
        outputs = []
        for group in groups:
            rows = slice(group.blocks.start * block_size, group.blocks.stop * block_size)
            keys = torch.cat([context_keys[group.context], own_keys[rows]])
            values = torch.cat([context_values[group.context], own_values[rows]])
            outputs.append(self._attend(queries[rows], keys, values, group.mask))
        # without anchors (responses of one token) there are no groups and no rows
        attended = torch.cat(outputs) if outputs else queries
        return self.o_proj(attended.flatten(1))

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        repeat = self.num_heads // self.num_kv_heads
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        # autocast casts the projections but not norms and rotations: bring the three to one dtype
        q, k = q.to(v.dtype), k.to(v.dtype)
        # the query heads that share keys become further rows of one head: keys and values need no copies for each
        rows = queries.shape[0]
        q = q.reshape(1, self.num_kv_heads, repeat * rows, self.head_dim)
        if mask is not None and repeat > 1:
            mask = mask.repeat(repeat, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.reshape(self.num_heads, rows, self.head_dim).transpose(0, 1)


class DFlashLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; only block slots pass through it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def context_key_value(
        self, context_TH: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
    ) -> KeyValue:
        """Keys and values of the context, which enters every layer as it is."""
        return self.self_attn.key_value(context_TH, cos_TD, sin_TD)

    def forward(
        self,
        x_RH: torch.Tensor,
        cos_RD: torch.Tensor,
        sin_RD: torch.Tensor,
        context: KeyValue,
        groups: Sequence[AttentionGroup],
        block_size: int,
    ) -> torch.Tensor:
        normed = self.input_layernorm(x_RH)
        x_RH = x_RH + self.self_attn(normed, cos_RD, sin_RD, context, groups, block_size)
        return x_RH + self.mlp(self.post_attention_layernorm(x_RH))


@dataclass
class ContextCache:
    """Per-layer context keys and values of one request, grown as tokens are committed.

    Valid for one drafter version only: after a hot swap it must be rebuilt from the raw features.
    """

    layers: list[KeyValue] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[0] if self.layers else 0

    def append(self, new: list[KeyValue]) -> None:
        if not self.layers:
            self.layers = new
            return
        self.layers = [
            (torch.cat([keys, new_keys]), torch.cat([values, new_values]))
            for (keys, values), (new_keys, new_values) in zip(self.layers, new, strict=True)
        ]

    @staticmethod
    def cat(caches: Sequence[ContextCache]) -> list[KeyValue]:
        """Context of several requests laid end to end, per layer."""
        if len(caches) == 1:
            return caches[0].layers
        return [
            (torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer]))
            for layer in zip(*(cache.layers for cache in caches), strict=True)
        ]


class DFlashDrafter(nn.Module):
    """A DFlash drafter; embedding and head are the target's and not part of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.spec = DFlashSpec.from_config(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(self.spec.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        frequencies = self.rotary_emb.inv_freq
        if frequencies.dtype != torch.float32:
            # a cast rounds the frequencies, which turns far positions by radians: make them anew
            self.rotary_emb = Qwen3RotaryEmbedding(self.config).to(frequencies.device)
        return self

    def _rope(self, x: torch.Tensor, positions_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary_emb(x[None], positions_R[None])
        return cos[0], sin[0]

    def context_key_values(self, features_TC: torch.Tensor, positions_T: torch.Tensor) -> list[KeyValue]:
        """Context keys and values of every layer from the target's raw features [T, C]."""
        context_TH = self.hidden_norm(self.fc(features_TC.to(self.dtype)))
        cos, sin = self._rope(context_TH, positions_T)
        return [cast(DFlashLayer, layer).context_key_value(context_TH, cos, sin) for layer in self.layers]

    def forward(
        self,
        embeddings_NBH: torch.Tensor,
        positions_NB: torch.Tensor,
        context: list[KeyValue],
        groups: Sequence[AttentionGroup],
    ) -> torch.Tensor:
        """Fill blocks.

        Args:
            embeddings_NBH: target embeddings of [anchor, mask, …, mask].
            positions_NB: true positions, int64.
            context: from `context_key_values`.
            groups: which blocks see which context (`drafters.blocks.attention_groups`).

        Returns:
            hidden_NBH after the final norm, to be multiplied by the target's head; slot j predicts the
            token at anchor+j (slot 0 is meaningless).
        """
        shape = embeddings_NBH.shape
        x_RH = embeddings_NBH.reshape(-1, shape[-1]).to(self.dtype)
        cos, sin = self._rope(x_RH, positions_NB.reshape(-1))
        for layer, key_value in zip(self.layers, context, strict=True):
            x_RH = layer(x_RH, cos, sin, key_value, groups, shape[1])
        return self.norm(x_RH).view(shape)

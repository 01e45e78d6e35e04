"""Attention of HF models where several things share one row: requests that decode together, documents with their blocks.

Registered with HF as an attention implementation, so that the model itself stays HF's. Three cases differ from HF's own SDPA.

- *Ragged rows.* The new tokens of several requests lie end to end in one row, as many of each as its verify_len asks for;
  linear layers see them together, attention runs request by request on its own cache. Nothing is padded. New tokens are
  causal, unless a mask says which of them see each other (a D3D drafter that fills blocks).
- *Packed rows.* Documents lie end to end, and behind them blocks anchored in them (a D3D drafter that learns). Documents are
  causal; a block sees its document strictly before its anchor, and itself in both directions.
- *A few new tokens on a long cache with a mask* (HF's `generate` on a padded batch). With grouped-query attention HF copies
  every cached key and value once per query head, at every step. The heads of a group see the same keys, so
  they can stand as further query rows of one head instead.

Shapes: R rows of a batch, K query heads, G key-value heads, S new tokens, T cached and new tokens, D head size; in packed rows
T document tokens, N blocks, B block size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from drafters.blocks import AttentionGroup

NAME = "sdpa_batched"
"""Name in HF's attention registry."""

MAX_FOLDED_TOKENS = 16
"""Longer queries of a padded batch (prefill) take HF's own path, whose kernels suit them better."""


@dataclass(frozen=True)
class RaggedRows:
    """Which slice of a flat row belongs to which cache; passed through the model to every layer.

    `own_masks`, bool [S, S] of each slice, True = visible: which new tokens see which; None for causal. Cached tokens are
    visible to all.
    """

    lengths: Sequence[int]
    caches: Sequence[DynamicCache]
    own_masks: Sequence[torch.Tensor] | None = None
    # of each slice, as all layers use them; made by the first
    _folded_masks: dict[int, torch.Tensor] = field(default_factory=dict, compare=False)

    def folded_mask(self, number: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """bool [1, 1, (K/G)·S, T] for `_folded`: everything cached, and of the new tokens what may be seen."""
        new_tokens, all_tokens = query.shape[2], key.shape[2]
        if new_tokens == 1:
            return None
        if number not in self._folded_masks:
            seen = torch.ones(new_tokens, all_tokens, dtype=torch.bool, device=query.device)
            if self.own_masks is None:
                seen = seen.tril(all_tokens - new_tokens)
            else:
                seen[:, all_tokens - new_tokens :] = self.own_masks[number]
            self._folded_masks[number] = seen.repeat(query.shape[1] // key.shape[1], 1)[None, None]
        return self._folded_masks[number]


@dataclass(frozen=True)
class PackedRows:
    """A row of T document tokens and N·B block slots.

    `document_lengths` add up to T; `groups` say which blocks see which slice of the documents.
    """

    document_lengths: Sequence[int]
    groups: Sequence[AttentionGroup]
    block_size: int


def runs_batched(model: Any) -> bool:
    """Whether a HF model decodes by this module's attention now."""
    return bool(model.config._attn_implementation == NAME)


def install(model: Any) -> None:
    """Make a HF model on SDPA attention use this module's. Others, and models with sliding windows, are left alone."""
    windows = "sliding_attention" in (getattr(model.config, "layer_types", None) or ())
    if model.config._attn_implementation != "sdpa" or windows:
        return
    AttentionInterface.register(NAME, batched_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    # after the prefill of a batch the head gets a strided view of the last positions, for which `linear` would
    # copy the whole head weight once per row
    model.get_output_embeddings().register_forward_pre_hook(lambda _module, inputs: (inputs[0].contiguous(),))


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """HF's own SDPA attention for a while: references must not be made by what they are to prove."""
    if not runs_batched(model):
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)


def batched_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    ragged: RaggedRows | None = None,
    packed: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """HF's attention interface: query [R, K, S, D], key and value [R, G, T, D] → [R, S, K, D]."""
    if packed is not None:
        # autocast leaves rotated queries and keys in fp32
        return _packed(query.to(value.dtype), key.to(value.dtype), value, scaling, packed), None
    if ragged is not None:
        return _ragged(module, query, key, value, scaling, ragged), None
    new_tokens = query.shape[2]
    # no mask over several tokens means causal, which folded rows would get wrong
    unmasked = attention_mask is None and new_tokens > 1
    if new_tokens > MAX_FOLDED_TOKENS or unmasked or dropout or query.shape[1] == key.shape[1]:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return output, None
    if attention_mask is not None:
        attention_mask = attention_mask.repeat(1, 1, query.shape[1] // key.shape[1], 1)
    return _folded(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def _ragged(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    ragged: RaggedRows,
) -> torch.Tensor:
    lengths = list(ragged.lengths)
    outputs: list[torch.Tensor] = []
    for number, (q, new_keys, new_values, cache) in enumerate(
        zip(
            query.split(lengths, dim=2),
            key.split(lengths, dim=2),
            value.split(lengths, dim=2),
            ragged.caches,
            strict=True,
        )
    ):
        k, v = cache.update(new_keys, new_values, module.layer_idx)
        if k.shape[2] == q.shape[2] and ragged.own_masks is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            out = _folded(q, k, v, ragged.folded_mask(number, q, k), scaling)
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    packed: PackedRows,
) -> torch.Tensor:
    outputs: list[torch.Tensor] = []
    start = 0
    for length in packed.document_lengths:
        rows = slice(start, start + length)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, rows],
                key[:, :, rows],
                value[:, :, rows],
                is_causal=True,
                scale=scaling,
                enable_gqa=True,
            )
        )
        start += length
    for group in packed.groups:
        first, last = group.blocks.start * packed.block_size, group.blocks.stop * packed.block_size
        rows = slice(start + first, start + last)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, rows],
                torch.cat([key[:, :, group.context], key[:, :, rows]], dim=2),
                torch.cat([value[:, :, group.context], value[:, :, rows]], dim=2),
                attn_mask=group.mask,
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _folded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """[R, K, S, D] of attention in which the K/G query heads of a group are further rows of one head, in the mask too."""
    rows, heads, new_tokens, head_dim = query.shape
    groups = key.shape[1]
    output = F.scaled_dot_product_attention(
        query.reshape(rows, groups, -1, head_dim), key, value, attn_mask=mask, scale=scaling
    )
    return output.reshape(rows, heads, new_tokens, head_dim)

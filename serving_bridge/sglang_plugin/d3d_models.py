"""SGLang's Llama and Qwen3 as D3D drafters: causal over committed text, bidirectional inside a block.

Imported only in a process that loads such a drafter; the rest of the plugin does without SGLang at import.

Shapes: L rows of a pass, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.speculative.dflash_info import DFlashVerifyInput


@dataclass
class CommittedRows(DFlashVerifyInput):
    """Marks a pass of B rows per request as text to be read, where the same pass without it is a block to be filled."""


class BlockDrafter:
    """What SGLang's DFLASH worker asks of a draft model, for a causal LM with an embedding and a head of its own."""

    candidate_selector = None
    lilicorr = None
    supports_fused_context_kv = False

    config: Any
    model: Any

    def set_block_size(self, block_size: int) -> None:
        """Nothing in the model depends on it."""

    @property
    def layers(self) -> Any:
        return self.model.layers

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors: Any = None,
    ) -> LogitsProcessorOutput:
        """Final hidden states [L, H], of a block such that slot j predicts the token at anchor+j; the worker applies the head
        where it needs it."""
        fills_blocks = forward_batch.forward_mode.is_target_verify() and not isinstance(
            forward_batch.spec_info, CommittedRows
        )
        attention = AttentionType.ENCODER_ONLY if fills_blocks else AttentionType.DECODER
        for layer in self.layers:
            layer.self_attn.attn.attn_type = attention
        hidden_LH = self.model(input_ids, positions, forward_batch, input_embeds)
        if fills_blocks and self.config.d3d_config.get("shift"):
            # slot 0, which predicts nothing, gets a row of the block before
            hidden_LH = hidden_LH.roll(1, dims=0)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden_LH)


class D3DLlamaForCausalLM(BlockDrafter, LlamaForCausalLM):
    """A Llama that drafts blocks."""


class D3DQwen3ForCausalLM(BlockDrafter, Qwen3ForCausalLM):
    """A Qwen3 that drafts blocks."""


DRAFT_MODELS = {"LlamaForCausalLM": D3DLlamaForCausalLM, "Qwen3ForCausalLM": D3DQwen3ForCausalLM}
"""By the architecture that an ordinary checkpoint names."""

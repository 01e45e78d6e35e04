"""The D3D drafter: a causal language model of its own that also fills a block of masks in one forward pass.

It reads no hidden states of the target, only text, so it can draft while the target verifies. The model is an ordinary HF causal
LM; what makes it a drafter is `d3d_config` in its configuration (block size, mask token) and its training. One pass over a
packed batch computes every document once, causally, and the blocks behind it: a block sees its document strictly before its
anchor and itself in both directions. The documents' part serves L_AR, the blocks' part L_diff (D3D eq. 5-7).

Shapes: T flat tokens, N blocks, B block size, C new committed tokens of a request, L slots of a block that are verified, K
branches of a request, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from drafters.batched_attention import PackedRows, RaggedRows, install, runs_batched
from drafters.blocks import BlockLayout, attention_groups, build_blocks
from drafters.errors import UserError
from drafters.packing import PackedBatch

SUPPORTED_MODEL_TYPES = ("llama", "qwen3")


@dataclass(frozen=True)
class D3DSpec:
    """What makes a causal LM's config a D3D drafter's.

    `shift`: a slot's row predicts the token after it, as all rows of a causal LM do, and the anchor's the first draft; so a
    drafter made from a causal LM starts with one that is right wherever the LM is. Otherwise a row predicts its slot's own
    token, and the anchor's nothing. Checkpoints that do not say are not shifted.
    """

    block_size: int
    mask_token_id: int
    shift: bool = False

    @classmethod
    def from_config(cls, config: Any) -> D3DSpec:
        """Read and check `d3d_config`.

        Raises:
            UserError: naming the missing or impossible field.
        """
        fields = getattr(config, "d3d_config", None) or {}
        try:
            spec = cls(
                block_size=int(fields["block_size"]),
                mask_token_id=int(fields["mask_token_id"]),
                shift=fields.get("shift", False),
            )
        except KeyError as missing:
            raise UserError(
                f"config.json: not a D3D drafter, d3d_config.{missing.args[0]} is missing"
            ) from None
        if not isinstance(spec.shift, bool):
            raise UserError(f"d3d_config.shift: {spec.shift!r} is neither true nor false")
        if spec.block_size < 2:
            raise UserError(f"drafter.block_size: {spec.block_size} leaves nothing to draft; use at least 2")
        limit = getattr(config, "max_position_embeddings", None)
        if limit is not None and spec.block_size >= limit:
            raise UserError(
                f"drafter.block_size: {spec.block_size} does not fit into the drafter's context of {limit}"
            )
        if not 0 <= spec.mask_token_id < config.vocab_size:
            raise UserError(
                f"d3d_config.mask_token_id: {spec.mask_token_id} is outside the vocabulary of {config.vocab_size}"
            )
        return spec


@dataclass(frozen=True)
class D3DOutput:
    """Final hidden states: `hidden_TH` of the documents (row t predicts token t+1), `hidden_NBH` of the blocks (slot j
    predicts the token at anchor+j; slot 0 is meaningless), and the blocks' `layout`."""

    hidden_TH: torch.Tensor
    hidden_NBH: torch.Tensor
    layout: BlockLayout


@dataclass(frozen=True)
class AheadRows:
    """What one request's drafter computes while the target verifies.

    block_ids: int64 [L], the anchor and the drafts under verification.
    start: absolute position of the anchor = tokens in `cache`.
    depths: of each branch, how many slots of the block precede it (1..L): its anchor stands at `start + depth`.
    anchors: the branches' anchor tokens.
    cache: the drafter's own; holds the block as well afterwards.
    """

    block_ids: torch.Tensor
    start: int
    depths: Sequence[int]
    anchors: Sequence[int]
    cache: DynamicCache


class D3DDrafter(nn.Module):
    """A causal LM that drafts blocks.

    Args:
        lm: HF causal LM with `d3d_config` in its configuration; embedding and head are its own, and trained.

    Raises:
        UserError: for an architecture whose attention this module would get wrong, or without a usable `d3d_config`.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        if lm.config.model_type not in SUPPORTED_MODEL_TYPES:
            raise UserError(
                f"drafter.model: architecture {lm.config.model_type!r} is not supported; use one of "
                f"{', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        self.lm = lm
        self.spec = D3DSpec.from_config(lm.config)
        install(lm)
        if not runs_batched(lm):
            raise UserError(
                "drafter.model: block attention needs SDPA and layers without sliding windows, found "
                f"{lm.config._attn_implementation}"
            )

    @property
    def config(self) -> Any:
        return self.lm.config

    @property
    def block_size(self) -> int:
        return self.spec.block_size

    @property
    def dtype(self) -> torch.dtype:
        return self.head_VH.dtype

    @property
    def device(self) -> torch.device:
        return self.head_VH.device

    @property
    def head_VH(self) -> torch.Tensor:
        """The drafter's own output head, tied to its embedding if the model ties them."""
        weight: torch.Tensor = self.lm.get_output_embeddings().weight
        return weight

    def forward(self, batch: PackedBatch, embeddings_LH: torch.Tensor | None = None) -> D3DOutput:
        """Documents and the blocks at their anchors, in one pass.

        `embeddings_LH` of the L = T + N·B rows replace the model's own (pruning starts in the middle of it).
        """
        layout = build_blocks(batch, self.block_size, self.spec.mask_token_id)
        rows = PackedRows(batch.document_lengths(), attention_groups(batch, self.block_size), self.block_size)
        if embeddings_LH is None:
            embeddings_LH = self.embed(torch.cat([batch.input_ids_T, layout.block_ids_NB.flatten()]))
        hidden_LH = self._run(
            embeddings_LH, torch.cat([batch.position_ids_T, layout.positions_NB.flatten()]), packed=rows
        )
        return D3DOutput(
            hidden_LH[: batch.num_tokens],
            self._by_slot(hidden_LH[batch.num_tokens :].view(*layout.block_ids_NB.shape, -1)),
            layout,
        )

    @torch.no_grad()
    def draft(
        self, committed: Sequence[torch.Tensor], starts: Sequence[int], caches: Sequence[DynamicCache]
    ) -> torch.Tensor:
        """Fill one block for each request, whose caches then hold everything before its anchor.

        Args:
            committed: int64 [C+1] of each request: tokens since the last call, of which the last is the anchor.
            starts: absolute position of the first of them = tokens in its cache.
            caches: one per request, updated in place.

        Returns:
            hidden_NBH; slot j predicts the token at anchor+j.
        """
        committed, starts = self._read_long(committed, starts, caches)
        masks = committed[0].new_full((self.block_size - 1,), self.spec.mask_token_id)
        rows = [torch.cat([tokens, masks]) for tokens in committed]
        positions = [
            torch.arange(start, start + len(row), device=row.device)
            for start, row in zip(starts, rows, strict=True)
        ]
        lengths = [len(row) for row in rows]
        own_masks = []
        for length in lengths:
            seen = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
            seen[-self.block_size :, -self.block_size :] = True
            own_masks.append(seen)
        hidden_LH = self._run(
            self.embed(torch.cat(rows)), torch.cat(positions), ragged=RaggedRows(lengths, caches, own_masks)
        )
        for cache in caches:
            # the block's own keys know of masks; the anchor's are made anew when it has become context
            cache.crop(-self.block_size)
        return self._by_slot(torch.stack([part[-self.block_size :] for part in hidden_LH.split(lengths)]))

    def _read_long(
        self, committed: Sequence[torch.Tensor], starts: Sequence[int], caches: Sequence[DynamicCache]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Put long texts (prompts) into their caches up to the anchor: causal attention needs no mask, a block behind would."""
        long = [i for i, tokens in enumerate(committed) if len(tokens) > self.block_size]
        left, after = list(committed), list(starts)
        if not long:
            return left, after
        lengths = [len(committed[i]) - 1 for i in long]
        positions = [
            torch.arange(starts[i], starts[i] + length, device=self.device)
            for i, length in zip(long, lengths, strict=True)
        ]
        self._run(
            self.embed(torch.cat([committed[i][:-1] for i in long])),
            torch.cat(positions),
            ragged=RaggedRows(lengths, [caches[i] for i in long]),
        )
        for i, length in zip(long, lengths, strict=True):
            left[i], after[i] = committed[i][-1:], starts[i] + length
        return left, after

    @torch.no_grad()
    def draft_ahead(self, requests: Sequence[AheadRows]) -> list[torch.Tensor]:
        """Read the blocks under verification, causally, and fill the blocks that may follow, in one pass.

        A branch sees what is cached, the slots of the block before it, and itself: the very rows that `draft` would compute
        once its tokens were committed (D3D's packed pass; B[(C-1)F+2] slots for a budget of C and F).

        Returns:
            hidden [K, B, H] of each request's branches.
        """
        ids, positions, lengths, own_masks = [], [], [], []
        for request in requests:
            depths_K = torch.tensor(request.depths, dtype=torch.long, device=self.device)
            anchors_K = torch.tensor(request.anchors, dtype=torch.long, device=self.device)
            block_L = request.block_ids.to(self.device)
            branches_KB = block_L.new_full((len(anchors_K), self.block_size), self.spec.mask_token_id)
            branches_KB[:, 0] = anchors_K
            offsets_B = torch.arange(self.block_size, device=self.device)
            ids.append(torch.cat([block_L, branches_KB.flatten()]))
            positions.append(
                request.start
                + torch.cat(
                    [
                        torch.arange(len(block_L), device=self.device),
                        (depths_K[:, None] + offsets_B).flatten(),
                    ]
                )
            )
            lengths.append(len(ids[-1]))
            own_masks.append(_branch_mask(len(block_L), depths_K, self.block_size))
        hidden = self._run(
            self.embed(torch.cat(ids)),
            torch.cat(positions),
            ragged=RaggedRows(lengths, [request.cache for request in requests], own_masks),
        )
        parts = []
        for request, part in zip(requests, hidden.split(lengths), strict=True):
            block_length, branches = len(request.block_ids), len(request.anchors)
            if branches:
                request.cache.crop(-branches * self.block_size)
            parts.append(self._by_slot(part[block_length:].view(branches, self.block_size, -1)))
        return parts

    def _by_slot(self, rows_NBH: torch.Tensor) -> torch.Tensor:
        """A block's rows in the order of what they predict; slot 0 gets what predicts nothing of the block."""
        return rows_NBH.roll(1, dims=1) if self.spec.shift else rows_NBH

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The drafter's own input embeddings of token ids of any shape."""
        embedded: torch.Tensor = self.lm.get_input_embeddings()(token_ids.to(self.device))
        return embedded

    def _run(self, embeddings_LH: torch.Tensor, position_ids: torch.Tensor, **rows: Any) -> torch.Tensor:
        output = self.lm.model(
            inputs_embeds=embeddings_LH[None],
            position_ids=position_ids[None].to(self.device),
            # a mask of four dimensions is handed on as it is; the attention ignores it
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=embeddings_LH.device),
            use_cache=False,
            **rows,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


def _branch_mask(block_length: int, depths_K: torch.Tensor, block_size: int) -> torch.Tensor:
    """bool [S, S] of S = L + K·B rows: the block causal; branch k sees its first `depths_K[k]` slots, and itself."""
    num_branches = len(depths_K)
    owner = torch.arange(num_branches, device=depths_K.device).repeat_interleave(block_size)
    slots_L = torch.arange(block_length, device=depths_K.device)
    block = torch.cat(
        [
            slots_L[:, None] >= slots_L[None, :],
            torch.zeros(block_length, len(owner), dtype=torch.bool, device=depths_K.device),
        ],
        dim=1,
    )
    branches = torch.cat(
        [slots_L[None, :] < depths_K[owner][:, None], owner[:, None] == owner[None, :]], dim=1
    )
    return torch.cat([block, branches])

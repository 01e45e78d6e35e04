"""The frozen target model as the drafter sees it.

Wraps a HF causal LM (Llama- or Qwen3-shaped) and gives what training, replay and decoding need: input embeddings, the head
weight, features of the chosen layers, and final hidden states. Features are captured by forward hooks on the
decoder layers, so ids up to the last layer mean the layer's own output (HF's last `hidden_states` entry is
after the final norm).

Shapes: T flat tokens, S tokens of one call, H hidden size, V vocabulary, C = number of layer ids · H.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from drafters.batched_attention import RaggedRows, install, runs_batched
from drafters.errors import UserError
from drafters.identity import TargetIdentity
from drafters.layer_ids import check_layer_ids
from drafters.teacher import TeacherMoments

SUPPORTED_MODEL_TYPES = ("llama", "qwen3")


@dataclass(frozen=True)
class TargetOutput:
    """`hidden_TH` after the final norm (head input) and `features_TC` of the chosen layers, both detached.

    `moments` of its predictions are there when whoever ran the target asked for them.
    """

    hidden_TH: torch.Tensor
    features_TC: torch.Tensor
    moments: TeacherMoments | None = None

    @staticmethod
    def cat(outputs: list[TargetOutput]) -> TargetOutput:
        """Outputs of several documents laid end to end; with moments if all have them."""
        if len(outputs) == 1:
            return outputs[0]
        moments = [output.moments for output in outputs if output.moments is not None]
        return TargetOutput(
            torch.cat([output.hidden_TH for output in outputs]),
            torch.cat([output.features_TC for output in outputs]),
            TeacherMoments.cat(moments) if len(moments) == len(outputs) else None,
        )

    @property
    def nbytes(self) -> int:
        moments = self.moments.nbytes if self.moments is not None else 0
        return self.hidden_TH.nbytes + self.features_TC.nbytes + moments


class Target:
    """A frozen target with feature capture.

    Args:
        model: a HF causal LM. Its parameters are frozen here.
        identity: carried into checkpoints and records.
        layer_ids: layer id k = output of decoder layer k.

    Raises:
        UserError: for an architecture whose head or positions this wrapper would get wrong.
    """

    def __init__(self, model: Any, identity: TargetIdentity, layer_ids: list[int]) -> None:
        config = model.config
        if config.model_type not in SUPPORTED_MODEL_TYPES:
            raise UserError(
                f"target.model: architecture {config.model_type!r} is not supported; "
                f"use one of {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        self.model = model.eval().requires_grad_(False)
        install(model)
        self.identity = identity
        self.layer_ids = check_layer_ids(list(layer_ids), config.num_hidden_layers)
        # per thread: training and serving may share one target
        self._local = threading.local()
        for layer_id in self.layer_ids:
            model.model.layers[layer_id].register_forward_hook(self._hook(layer_id))

    def _hook(self, layer_id: int) -> Any:
        def capture(_module: nn.Module, _inputs: Any, output: Any) -> None:
            captured = getattr(self._local, "captured", None)
            if captured is not None:
                captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return capture

    @contextmanager
    def _capture(self) -> Iterator[dict[int, torch.Tensor]]:
        captured: dict[int, torch.Tensor] = {}
        self._local.captured = captured
        try:
            yield captured
        finally:
            self._local.captured = None

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def head_VH(self) -> torch.Tensor:
        """Frozen output head weight [V, H], shared by the drafter."""
        return self.model.get_output_embeddings().weight

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of token ids of any shape, in the target's dtype."""
        return self.model.get_input_embeddings()(token_ids)

    @torch.no_grad()
    def forward_packed(self, input_ids_T: torch.Tensor, position_ids_T: torch.Tensor) -> TargetOutput:
        """One forward over documents laid end to end; `position_ids_T` restart at 0 for each.

        HF derives the block-diagonal causal mask from the restarts when no attention mask and no cache are given.
        """
        with self._capture() as captured:
            output = self.model.model(
                input_ids=input_ids_T[None],
                position_ids=position_ids_T[None],
                use_cache=False,
            )
        return TargetOutput(output.last_hidden_state[0], self._features(captured))

    @torch.no_grad()
    def forward_cached(
        self, new_ids: Sequence[torch.Tensor], starts: Sequence[int], caches: Sequence[DynamicCache]
    ) -> list[TargetOutput]:
        """Extend several sequences in one forward, each by as many tokens as it wants.

        Args:
            new_ids: int64 [S] of each sequence, at least one token.
            starts: absolute position of its first new token = tokens in its cache.
            caches: one per sequence, updated in place.

        Returns:
            The output over the new tokens of each sequence.
        """
        if not runs_batched(self.model):
            return [self._forward_one(*sequence) for sequence in zip(new_ids, starts, caches, strict=True)]
        lengths = [ids.numel() for ids in new_ids]
        positions = [
            torch.arange(start, start + length, device=self.device)
            for start, length in zip(starts, lengths, strict=True)
        ]
        with self._capture() as captured:
            output = self.model.model(
                input_ids=torch.cat(list(new_ids))[None],
                position_ids=torch.cat(positions)[None],
                # a mask of four dimensions is handed on as it is; the attention ignores it
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device),
                use_cache=False,
                ragged=RaggedRows(lengths, caches),
            )
        return [
            TargetOutput(hidden, features)
            for hidden, features in zip(
                output.last_hidden_state[0].split(lengths),
                self._features(captured).split(lengths),
                strict=True,
            )
        ]

    def _forward_one(self, ids: torch.Tensor, start: int, cache: DynamicCache) -> TargetOutput:
        positions = torch.arange(start, start + ids.numel(), device=self.device)
        with self._capture() as captured:
            output = self.model.model(
                input_ids=ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True
            )
        return TargetOutput(output.last_hidden_state[0], self._features(captured))

    def logits(self, hidden_SH: torch.Tensor) -> torch.Tensor:
        """Head logits [S, V] of final hidden states.

        Two dimensions on purpose: for a strided batch of rows `linear` would copy the head once per batch entry.
        """
        return torch.nn.functional.linear(hidden_SH, self.head_VH)

    def _features(self, captured: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.cat([captured[layer_id][0] for layer_id in self.layer_ids], dim=-1)

"""The algorithm D3D: DFLASH's scheduling and verification around a drafter that reads text alone.

A draft model of DFLASH has keys and values made of the target's hidden states, and the target's embedding and head. A D3D
drafter is an ordinary causal LM, so three things differ. After a prefill it reads the prompt, after a verification the
verified block, causally, which fills its own cache in the very slots that the target's has. Its embedding makes a block's
input and its head the drafts. And of the target nothing is captured.

A verified block is read as a whole: what follows the accepted drafts in it lies beyond the committed text, where the next block
overwrites it, and rows before it do not see it. Every committed token is in the drafter's cache once its round ends, so
cached prefixes are as good to the drafter as to the target.

Shapes: R requests, B block size.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch

from drafters.d3d import D3DSpec
from serving_bridge.sglang_plugin.family import family_class

ALGORITHM = "D3D"
MODEL_CONFIG = "sglang.srt.configs.model_config.ModelConfig"
CAPTURE = (
    "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state._resolve_dflash_aux_hidden_state"
)


def register_d3d(after: Any) -> list[tuple[str, Callable[..., Any], Any]]:
    """Make the algorithm known and return the hooks it needs."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=_spec_class())
    def worker_class(server_args: Any) -> type:
        return _worker_class()

    return [
        (f"{MODEL_CONFIG}._config_draft_model", after_draft_config, after),
        (CAPTURE, after_capture, after),
    ]


def after_draft_config(result: None, model_config: Any) -> None:
    """Have a D3D checkpoint loaded as `d3d_models` has it, and say in DFLASH's words what the block is.

    Raises:
        UserError, ValueError: for a drafter of another family than the algorithm's.
    """
    algorithm, config = model_config.speculative_algorithm, model_config.hf_config
    if not model_config.is_draft_model:
        return
    if algorithm != ALGORITHM:
        if getattr(config, "d3d_config", None) and algorithm in {"DFLASH", "ADAFLASH"}:
            raise ValueError(
                f"{model_config.model_path}: a D3D drafter; start with --speculative-algorithm {ALGORITHM}"
            )
        return
    spec = D3DSpec.from_config(config)
    from sglang.srt.models.registry import ModelRegistry

    from serving_bridge.sglang_plugin.d3d_models import DRAFT_MODELS

    name = config.architectures[0]
    if name not in DRAFT_MODELS:
        raise ValueError(
            f"{model_config.model_path}: {name} cannot serve as a D3D drafter; one of {', '.join(DRAFT_MODELS)} can"
        )
    draft_model = DRAFT_MODELS[name]
    ModelRegistry.models[draft_model.__name__] = draft_model
    config.architectures = [draft_model.__name__]
    config.dflash_config = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        # asked for even where nothing is captured
        "target_layer_ids": [0],
    }


def after_capture(result: None, *, config: Any, spec_algorithm: Any, **kwargs: Any) -> None:
    """Capture no layer of the target: any target will do, also one that SGLang cannot capture from."""
    if getattr(spec_algorithm, "name", None) == ALGORITHM:
        config.dflash_use_aux_hidden_state = False
        config.dflash_target_layer_ids = None


def checked_block_size(server_args: Any, config: Any) -> int:
    """The checkpoint's block size.

    Raises:
        ValueError: for settings that a D3D drafter cannot follow.
    """
    block_size = D3DSpec.from_config(config).block_size
    for name in ("speculative_num_draft_tokens", "speculative_dflash_block_size"):
        wanted = getattr(server_args, name)
        if wanted is not None and int(wanted) != block_size:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} {wanted}: this D3D drafter was trained for blocks of {block_size}")
    if server_args.speculative_draft_window_size is not None:
        raise ValueError("--speculative-draft-window-size: a D3D drafter reads the whole text")
    return block_size


def check_target(target: Any, draft: Any) -> None:
    """Refuse a target whose tokens the drafter cannot read.

    Args:
        target, draft: model configurations as SGLang has them.

    Raises:
        ValueError: naming the reason.
    """
    if int(draft.vocab_size) != int(target.vocab_size):
        raise ValueError(
            f"the D3D drafter has {draft.vocab_size} rows of vocabulary, the target {target.vocab_size}"
        )
    if target.is_multimodal:
        raise ValueError(
            "a D3D drafter reads token ids, and prompts of this target may hold images in their place; serve it without "
            "multimodality"
        )


def _spec_class() -> Any:
    class D3DAlgorithm(family_class()):  # type: ignore[misc]
        """A member of the DFLASH family whose block size is the checkpoint's."""

        def supports_mixed_chunk(self) -> bool:
            return False

        def supports_prefill_shared_read_done(self) -> bool:
            """The drafter reads the scheduler's tables after the target has prefilled."""
            return False

        def handle_server_args(self, server_args: Any) -> None:
            from sglang.srt.utils.hf_transformers_utils import get_config

            path = server_args.speculative_draft_model_path
            if path is not None:
                config = get_config(
                    path,
                    trust_remote_code=server_args.trust_remote_code,
                    revision=server_args.speculative_draft_model_revision,
                    model_override_args=json.loads(server_args.json_model_override_args),
                )
                server_args.speculative_num_draft_tokens = checked_block_size(server_args, config)
            super().handle_server_args(server_args)

    return D3DAlgorithm


def _worker_class() -> type:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

    from serving_bridge.sglang_plugin.d3d_models import CommittedRows

    class D3DWorker(DFlashWorkerV2):
        """DFLASH's worker with the drafter's own reading and head."""

        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            runner = target_worker.model_runner
            check_target(runner.model_config, runner.spec_aux_config.draft_model_config)
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
            self._batch: Any = None
            self._block: Any = None
            self._committed_rows = CommittedRows(
                draft_token=torch.empty(0, dtype=torch.long, device=self.device),
                positions=torch.empty(0, dtype=torch.int64, device=self.device),
                draft_token_num=int(self.block_size),
                capture_hidden_mode=CaptureHiddenMode.NULL,
            )
            self._run_draft = self.draft_model_runner.forward

            def fill_and_keep(forward_batch: Any, *more: Any, **keywords: Any) -> Any:
                # made with the target's embedding
                forward_batch.input_embeds = None
                # as it was before the pass, which may pad it
                self._block = copy.copy(forward_batch)
                return self._run_draft(forward_batch, *more, **keywords)

            self.draft_model_runner.forward = fill_and_keep

        @property
        def last_shared_read_runner(self) -> Any:
            """Reading what was committed ends a step."""
            return self.draft_model_runner

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._batch = batch
            try:
                return super().forward_batch_generation(batch, *args, **kwargs)
            finally:
                self._batch = self._block = None

        def _append_target_hidden_to_draft_kv_by_loc(
            self, *, commit_lens: torch.Tensor | None = None, **of_the_target: Any
        ) -> None:
            """Read what was committed; called where DFLASH's drafter takes in the target's hidden states."""
            rows = self._prompt_rows() if commit_lens is None else self._verified_rows()
            with torch.inference_mode(), draft_tp_context(self.draft_parallel_layout):
                self._run_draft(rows)

        def _prompt_rows(self) -> Any:
            """The rows that the target has just prefilled."""
            rows = ForwardBatch.init_new(
                self._batch,
                self.draft_model_runner,
                capture_hidden_mode=CaptureHiddenMode.NULL,
                return_hidden_states_before_norm=False,
            )
            rows.spec_info = None
            rows.input_embeds = rows.replace_embeds = None
            rows.return_logprob = False
            return rows

        def _verified_rows(self) -> Any:
            """[R·B] rows of the verified blocks, in the slots that held their masks."""
            rows = self._block
            rows.input_ids = self._draft_block_tokens_buf[: rows.batch_size].flatten()
            rows.spec_info = self._committed_rows
            return rows

        def _greedy_sample_from_vocab_parallel_head(self, *, lm_head: Any, **kwargs: Any) -> torch.Tensor:
            """The drafter's head in place of the target's."""
            drafts: torch.Tensor = super()._greedy_sample_from_vocab_parallel_head(
                lm_head=self.draft_model.lm_head, **kwargs
            )
            return drafts

        def _resolve_mask_token_id(self, *, mask_token: str, mask_token_id: int | None = None) -> int:
            """The checkpoint's id: there is no mask token by name that a tokenizer could know."""
            assert mask_token_id is not None
            return mask_token_id

        def _init_fused_kv_helper(self) -> None:
            self._use_fused_kv_materialize = False

        def init_cuda_graphs(self) -> None:
            """The drafter runs without: a captured pass has one of its two ways of attending built in."""
            with draft_pp_context(), draft_tp_context(self.draft_parallel_layout):
                self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)
            self.draft_model_runner.prefill_cuda_graph_runner = None

    return D3DWorker

"""The algorithm ADAFLASH: DFLASH whose target verifies, of each request's block, only what the length head finds worth it.

The target's pass holds Σ verify_len rows instead of requests × block size. That needs an attention backend that takes rows
of different number per request, and greedy verification: a sampled one looks up probabilities in slots that were not
computed. Wherever either is missing, whole blocks are verified, which is slower and just as exact.

Shapes: R requests, B block size, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from drafters.policies import AdaFlashPolicy, Load
from serving_bridge.sglang_plugin.family import family_class
from serving_bridge.sglang_plugin.packing import packed_rows, scatter_rows

if TYPE_CHECKING:
    from serving_bridge.sglang_plugin.hooks import Bridge

_log = logging.getLogger(__name__)

ALGORITHM = "ADAFLASH"
VERIFY_INPUT = "sglang.srt.speculative.dflash_info.DFlashVerifyInput"
TARGET_WORKER = "sglang.srt.managers.tp_worker.TpModelWorker"
_LENGTHS_ATTRIBUTE = "_draftsmith_verify_lens"
_ROWS_ATTRIBUTE = "_draftsmith_rows"


def register_adaflash(bridge: Bridge, before: Any, after: Any) -> list[tuple[str, Callable[..., Any], Any]]:
    """Make the algorithm known and return the hooks it needs."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    @SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=family_class())
    def worker_class(server_args: Any) -> type:
        return _worker_class(bridge)

    def before_prepare(verify_input: Any, batch: Any, target_worker: Any, **kwargs: Any) -> None:
        attached = bridge.attached
        if attached is None or batch.forward_mode.is_idle() or not hasattr(attached.worker, "choose_lengths"):
            return
        lengths = attached.worker.choose_lengths(batch)
        attached.worker.__dict__[_LENGTHS_ATTRIBUTE] = lengths
        if lengths is not None:
            pack_verify_input(verify_input, batch, lengths)

    def after_target(result: Any, *args: Any, **kwargs: Any) -> None:
        spec_info: Any = getattr(kwargs.get("forward_batch"), "spec_info", None)
        rows = getattr(spec_info, _ROWS_ATTRIBUTE, None)
        if not kwargs.get("is_verify") or rows is None:
            return
        total = kwargs["forward_batch"].batch_size * int(spec_info.draft_token_num)
        output = result.logits_output
        output.next_token_logits = scatter_rows(output.next_token_logits, rows, total)
        output.hidden_states = scatter_rows(output.hidden_states, rows, total)

    return [
        (f"{VERIFY_INPUT}.prepare_for_verify", before_prepare, before),
        (f"{TARGET_WORKER}.forward_batch_generation", after_target, after),
    ]


def pack_verify_input(verify_input: Any, batch: Any, lengths: list[int]) -> None:
    """Leave only the verified slots in a verification pass and tell the attention backend how they lie."""
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    device = verify_input.draft_token.device
    rows = torch.tensor(packed_rows(lengths, int(verify_input.draft_token_num)), device=device)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device)
    lens_R = torch.tensor(lengths, dtype=torch.int32, device=device)
    starts[1:] = lens_R.cumsum(0)
    verify_input.ragged_verify_layout = RaggedVerifyLayout(
        verify_lens=lens_R,
        graph_num_tokens=sum(lengths),
        extend_start_loc=starts[:-1].clone(),
        qo_indptr_device=starts,
        verify_lens_cpu=lengths,
        total_verify_tokens=sum(lengths),
    )
    verify_input.__dict__[_ROWS_ATTRIBUTE] = rows
    verify_input.draft_token = verify_input.draft_token[rows]
    verify_input.positions = verify_input.positions[rows]
    batch.out_cache_loc = batch.out_cache_loc[rows]
    verify_input.kv_loc_cols = rows


def _worker_class(bridge: Bridge) -> type:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    settings = bridge.settings.length

    class AdaFlashWorker(DFlashWorkerV2):
        """DFLASH's worker, which also keeps what the length head reads."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._policy: AdaFlashPolicy | None = None
            self._policy_version: tuple[int, str] | None = None
            self._block_features: tuple[torch.Tensor, torch.Tensor] | None = None
            self._verify_mode: str | None = None
            run_draft = self.draft_model_runner.forward

            def forward_and_keep(forward_batch: Any, *more: Any, **keywords: Any) -> Any:
                output = run_draft(forward_batch, *more, **keywords)
                self._block_features = (output.logits_output.hidden_states, forward_batch.input_embeds)
                return output

            self.draft_model_runner.forward = forward_and_keep

        @property
        def verify_mode(self) -> str:
            """`compact` or `static`, decided once the attention backends exist."""
            if self._verify_mode is None:
                self._verify_mode, reason = choose_verify_mode(settings.verify, self)
                _log.info("draftsmith: verification is %s (%s)", self._verify_mode, reason)
            return self._verify_mode

        def choose_lengths(self, batch: Any) -> list[int] | None:
            """verify_len of each request, or None to verify whole blocks."""
            if (
                self.verify_mode == "static"
                or not _greedy(batch)
                or batch.has_grammar
                or batch.return_logprob
            ):
                return None
            policy = self._current_policy()
            if policy is None or self._block_features is None:
                return None
            hidden, embeddings = self._block_features
            requests, block = len(batch.seq_lens), int(self.block_size)
            lengths: list[int] = policy.verify_len(
                hidden.view(requests, block, -1), embeddings.view(requests, block, -1), Load(requests)
            ).tolist()
            return lengths

        def _current_policy(self) -> AdaFlashPolicy | None:
            assert bridge.attached is not None
            store = bridge.attached.store
            version = (store.swaps, store.served.version)
            if version != self._policy_version:
                head = store.served.length_head
                self._policy_version = version
                self._policy = None
                if head is not None:
                    self._policy = AdaFlashPolicy(
                        head.to(self.device),
                        settings.gamma,
                        {int(load): gamma for load, gamma in settings.gamma_by_load.items()},
                        settings.off_below_load,
                    )
                else:
                    _log.warning(
                        "draftsmith: drafter %s has no length head; whole blocks are verified", version[1]
                    )
            return self._policy

    return AdaFlashWorker


def choose_verify_mode(wanted: str, worker: Any) -> tuple[str, str]:
    """(mode, reason)."""
    if wanted == "static":
        return "static", "as configured"
    runner = worker.target_worker.model_runner
    if int(worker.server_args.tp_size) > 1:
        # ranks may round a length differently, and then disagree on the shape of the pass
        return "static", "lengths are not agreed between tensor-parallel ranks"
    if getattr(worker, "_need_mamba_verify_commit", False):
        return "static", "the target keeps a recurrent state"
    if getattr(runner, "decode_cuda_graph_runner", None) is not None:
        # a captured graph has whole blocks built in
        return "static", "the target runs captured graphs; --disable-cuda-graph allows compact verification"
    if wanted == "compact":
        return "compact", "as configured"
    backend = type(runner.attn_backend).__name__
    if str(worker.device).startswith("cpu"):
        return "compact", f"{backend} on CPU"
    return "static", f"compact verification with {backend} is untested; length.verify: compact turns it on"


def _greedy(batch: Any) -> bool:
    from serving_bridge.sglang_plugin.hooks import sampling_verified

    info = batch.sampling_info
    return info is None or bool(info.is_all_greedy) or not sampling_verified()

"""Where the plugin touches SGLang: one table of hooks, each a few lines that call the plugin's own parts.

Written for and tested with SGLang 0.5.23. SGLang logs a hook that it cannot apply and goes on; `Bridge.self_check`, itself
run from the scheduler's start, then refuses to start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from serving_bridge.records import Sampling
from serving_bridge.sglang_plugin import SCHEDULER, STATUS_KEY, SWAP_FORMAT
from serving_bridge.sglang_plugin.admission import AdmissionEstimate
from serving_bridge.sglang_plugin.drafter_store import DrafterStore, checked_module, read_served
from serving_bridge.sglang_plugin.packing import cap_candidates
from serving_bridge.sglang_plugin.recorder import Recorder, RequestLog
from serving_bridge.sglang_plugin.rounds import RoundCapture, capture
from serving_bridge.sglang_plugin.settings import PluginSettings, without_password
from serving_bridge.transports import open_writer

_log = logging.getLogger(__name__)

TESTED_SGLANG = "0.5.23"

_LOG_ATTRIBUTE = "_draftsmith_log"
_ROUND_ATTRIBUTE = "_draftsmith_round"
_LENGTHS_ATTRIBUTE = "_draftsmith_verify_lens"

WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
REQUEST = "sglang.srt.managers.schedule_batch.Req"


@dataclass
class Attached:
    """What belongs to a running drafter; there is none in processes without a scheduler."""

    worker: Any
    store: DrafterStore
    recorder: Recorder | None


class Bridge:
    """The plugin in one process."""

    def __init__(self, settings: PluginSettings) -> None:
        self.settings = settings
        self.attached: Attached | None = None
        self.targets: list[str] = []
        self.admission = (
            None if settings.admission_beta is None else AdmissionEstimate(settings.admission_beta)
        )
        self.verified_rows = 0
        self.drafted_rows = 0

    def register(self) -> None:
        """Give SGLang the table of hooks."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        before, after, around = HookType.BEFORE, HookType.AFTER, HookType.AROUND
        table: list[tuple[str, Callable[..., Any], Any]] = [
            (f"{WORKER}.__init__", self.after_worker_init, after),
            (f"{WORKER}.forward_batch_generation", self.around_forward, around),
            (f"{WORKER}._accept_block", self.around_accept, around),
            (f"{RESULTS}.process_batch_result_decode", self.around_result, around),
            (f"{RESULTS}.process_batch_result_prefill", self.after_prefill, after),
            (f"{WEIGHTS}.update_weights_from_tensor", self.around_update, around),
            (f"{WEIGHTS}.end_weight_update", self.after_end_update, after),
            (f"{STATE}.get_internal_state", self.after_internal_state, after),
            (f"{REQUEST}.__init__", self.after_request_init, after),
            (f"{SCHEDULER}.__init__", self.self_check, after),
        ]
        if self.admission is not None:
            table += [
                (f"{SCHEDULER}.get_num_allocatable_reqs", self.after_allocatable, after),
                (f"{BATCH}.retract_decode", self.before_retract, before),
            ]
        from serving_bridge.sglang_plugin.adaflash import register_adaflash
        from serving_bridge.sglang_plugin.d3d import register_d3d

        table += register_adaflash(self, before, after)
        table += register_d3d(after)
        for target, hook, kind in table:
            HookRegistry.register(target, hook, kind)
            self.targets.append(target)

    def missing_hooks(self) -> list[str]:
        """Targets that SGLang could not hook."""
        from sglang.srt.plugins.hook_registry import HookRegistry

        return [target for target in self.targets if target not in HookRegistry._patched]

    def self_check(self, result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        """At the end of the scheduler's start.

        Raises:
            RuntimeError: which ends the server, when it would serve unhooked.
        """
        missing = self.missing_hooks()
        if missing:
            raise RuntimeError(
                f"draftsmith: SGLang {version('sglang')} has no {', '.join(missing)}; this release was tested with "
                f"{TESTED_SGLANG}. Unset DRAFTSMITH_SGLANG to serve without the plugin."
            )
        if self.attached is None:
            raise RuntimeError(
                "draftsmith: the server runs no DFLASH, ADAFLASH or D3D drafter, so nothing would be logged; add "
                "--speculative-algorithm and --speculative-draft-model-path, or unset DRAFTSMITH_SGLANG"
            )
        _log.info("draftsmith: %d hooks applied, %s", len(self.targets), self.status())

    # the drafter

    def after_worker_init(self, result: None, worker: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        server_args = worker.server_args
        parallel = get_parallel()
        if parallel.attn_dp_enabled:
            raise RuntimeError(
                "draftsmith: data-parallel attention is not supported: each of its ranks serves requests of its own, and "
                "only the first would log them. Unset DRAFTSMITH_SGLANG to serve without the plugin."
            )
        served = read_served(server_args.speculative_draft_model_path, self.settings.target_id)
        if not served.target_id and self.settings.log:
            raise RuntimeError(
                f"draftsmith: {served.directory} has no manifest that names its target; set target_id in the settings"
            )
        store = DrafterStore(
            checked_module(worker.draft_model),
            served,
            swap_root=self.settings.swap_root,
            max_bytes=self.settings.max_drafter_bytes,
            agree=_agreement(parallel.tp_group.cpu_group),
            after_load=lambda: _refresh_derived(worker),
        )
        recorder = None
        if self.settings.log and parallel.tp_rank == 0:
            recorder = Recorder(
                open_writer(
                    self.settings.log,
                    capacity=self.settings.buffer_records,
                    spool_max_age_s=self.settings.spool_max_age_s,
                ),
                self.settings,
                target_id=served.target_id,
                block_size=int(worker.block_size),
                length_policy=str(server_args.speculative_algorithm).lower(),
            )
        self.attached = Attached(worker, store, recorder)

    def after_request_init(self, result: None, request: Any, *args: Any, **kwargs: Any) -> None:
        """Keep prefix caches of different drafters apart.

        Cached slots hold the draft model's keys and values of the drafter that filled them. A new drafter would draft badly
        after such a prefix; with the version in the cache's namespace it fills its own, and the old entries age out.
        """
        if self.attached is not None and self.attached.store.swaps:
            store = self.attached.store
            request.extra_key = f"{request.extra_key or ''}|drafter={store.swaps}:{store.served.version}"

    # rounds

    def around_forward(
        self, forward: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kw: Any
    ) -> Any:
        worker.__dict__[_ROUND_ATTRIBUTE] = None
        worker.__dict__[_LENGTHS_ATTRIBUTE] = None
        result = forward(worker, batch, *args, **kw)
        captured = worker.__dict__[_ROUND_ATTRIBUTE]
        if captured is not None:
            result.__dict__[_ROUND_ATTRIBUTE] = captured
        return result

    def around_accept(
        self, accept: Callable[..., Any], worker: Any, *, candidates: torch.Tensor, **kw: Any
    ) -> Any:
        verify_lens = worker.__dict__.get(_LENGTHS_ATTRIBUTE)
        if self.attached is not None and self.attached.recorder is not None:
            worker.__dict__[_ROUND_ATTRIBUTE] = capture(
                drafter_version=self.attached.store.served.version,
                candidates_RB=candidates,
                verify_lens=verify_lens,
                logits=kw.get("next_token_logits"),
                top_k=self.settings.target_top_k,
            )
        self.drafted_rows += candidates.numel()
        self.verified_rows += candidates.numel() if verify_lens is None else sum(verify_lens)
        if verify_lens is not None:
            candidates = cap_candidates(candidates, verify_lens)
        return accept(worker, candidates=candidates, **kw)

    def around_result(
        self, process: Callable[..., Any], results: Any, batch: Any, result: Any, *args: Any, **kw: Any
    ) -> Any:
        captured: RoundCapture | None = getattr(result, _ROUND_ATTRIBUTE, None)
        recorder = self.attached.recorder if self.attached is not None else None
        lengths = [
            None if request.finished() or request.is_retracted else len(request.output_ids)
            for request in batch.reqs
        ]
        outcome = process(results, batch, result, *args, **kw)
        if self.admission is not None:
            self.admission.observe(len(batch.reqs))
        if recorder is not None:
            for index, (request, before) in enumerate(zip(batch.reqs, lengths, strict=True)):
                if before is not None:
                    self._guarded(recorder, self._note_round, request, index, before, captured)
        return outcome

    def after_prefill(self, outcome: None, results: Any, batch: Any, *args: Any, **kw: Any) -> None:
        """A request that was preempted, prefilled again, and ended by the token of that prefill."""
        recorder = self.attached.recorder if self.attached is not None else None
        if recorder is None:
            return
        for request in batch.reqs:
            log = request.__dict__.get(_LOG_ATTRIBUTE)
            if log is not None and request.finished():
                self._guarded(recorder, self._note_end, request, log)

    def _guarded(self, recorder: Recorder, note: Callable[..., None], *args: Any) -> None:
        """Whatever is wrong with a record, serving goes on."""
        try:
            note(recorder, *args)
        except Exception:
            if not recorder.skipped["failed"]:
                _log.exception("draftsmith: a record could not be made; it is dropped and counted")
            recorder.skipped["failed"] += 1

    def _note_round(
        self, recorder: Recorder, request: Any, index: int, before: int, captured: RoundCapture | None
    ) -> None:
        log = request.__dict__.get(_LOG_ATTRIBUTE)
        if log is None:
            log = recorder.begin(request.rid, request.sampling_params.custom_params)
            request.__dict__[_LOG_ATTRIBUTE] = log
        committed = len(request.output_ids) - before
        if captured is not None and committed > 0:
            recorder.round(
                log,
                start=len(request.origin_input_ids) + before - 1,
                drafter_version=captured.drafter_version,
                verify_len=captured.verify_len(index),
                accepted=committed - 1,
                draft_ids=captured.draft_ids(index),
                target_top_k=captured.target_top_k(index),
            )
        if request.finished():
            self._note_end(recorder, request, log)

    def _note_end(self, recorder: Recorder, request: Any, log: RequestLog) -> None:
        # a request ends once, but may be seen ended more often
        del request.__dict__[_LOG_ATTRIBUTE]
        reason = unlike_the_target(request)
        if reason is not None:
            recorder.skipped[reason] += 1
            return
        recorder.finish(
            log,
            request_id=request.rid,
            prompt_ids=request.origin_input_ids,
            output_ids=request.output_ids_through_stop,
            sampling=effective_sampling(request.sampling_params),
            finish_reason=request.finished_reason.to_json()["type"],
        )

    # weights

    def around_update(self, update: Callable[..., Any], updater: Any, order: Any) -> Any:
        if order.load_format != SWAP_FORMAT:
            return update(updater, order)
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

        if self.attached is None:
            return UpdateWeightsFromTensorReqOutput(success=False, message="no drafter runs here")
        store = self.attached.store
        before = store.served.version
        # what is under way on the device must not see half of the new weights
        torch.get_device_module().synchronize()
        success, message = store.handle(order.serialized_named_tensors[0])
        if store.served.version != before:
            updater.record_weight_version_after_update(store.served.version)
        return UpdateWeightsFromTensorReqOutput(success=success, message=message)

    def after_end_update(self, result: Any, updater: Any, *args: Any, **kwargs: Any) -> None:
        """Weights that came another way leave the same stale copies behind."""
        if self.attached is not None:
            self.attached.store.forget_staged()
            _refresh_derived(self.attached.worker)

    # admission

    def after_allocatable(self, allowed: int, scheduler: Any, running_bs: int, *args: Any, **kw: Any) -> int:
        assert self.admission is not None
        return self.admission.admissible(running_bs, allowed)

    def before_retract(self, *args: Any, **kwargs: Any) -> None:
        assert self.admission is not None
        self.admission.overflow()

    # status

    def status(self) -> dict[str, Any]:
        """What `draftsmith doctor --sglang` and the swap client read; plain values."""
        attached = self.attached
        return {
            "plugin_version": _own_version(),
            "sglang_version": version("sglang"),
            "tested_with": TESTED_SGLANG,
            "pid": os.getpid(),
            "hooks": len(self.targets),
            "missing_hooks": self.missing_hooks(),
            "algorithm": None if attached is None else str(attached.worker.server_args.speculative_algorithm),
            "drafter": None if attached is None else attached.store.status(),
            "block_size": None if attached is None else int(attached.worker.block_size),
            "target_id": None if attached is None else attached.store.served.target_id,
            "log": without_password(self.settings.log),
            "records": None if attached is None or attached.recorder is None else attached.recorder.status(),
            "verify": getattr(None if attached is None else attached.worker, "verify_mode", "static"),
            "sampling_verified": sampling_verified(),
            "verified_rows": self.verified_rows,
            "drafted_rows": self.drafted_rows,
            "admission": None
            if self.admission is None
            else {"estimate": self.admission.estimate, "overflows": self.admission.overflows},
        }

    def after_internal_state(self, result: Any, *args: Any, **kwargs: Any) -> None:
        result.internal_state[STATUS_KEY] = self.status()


def install(settings: PluginSettings) -> Bridge:
    """Register everything with SGLang."""
    bridge = Bridge(settings)
    bridge.register()
    return bridge


def sampling_verified() -> bool:
    """Whether this build verifies sampled requests; without the kernel, DFLASH decodes them greedily."""
    from sglang.srt.speculative.dflash_utils import is_dflash_sampling_verify_available

    return bool(is_dflash_sampling_verify_available())


def unlike_the_target(request: Any) -> str | None:
    """Why a request's text is not what the target would say to these token ids, if it is not."""
    if (
        getattr(request, "multimodal_inputs", None) is not None
        or getattr(request, "lora_id", None) is not None
    ):
        return "multimodal_or_lora"
    if getattr(request, "input_embeds", None) is not None:
        return "input_embeds"
    if getattr(request, "grammar", None) is not None or getattr(request, "custom_logit_processor", None):
        return "constrained"
    params = request.sampling_params
    penalties = (
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("min_p", 0.0),
    )
    if any(getattr(params, name, plain) != plain for name, plain in penalties) or params.logit_bias:
        return "penalised"
    return None


def effective_sampling(params: Any) -> Sampling:
    """How a request was really decoded: SGLang writes greedy as top_k 1, and falls back to greedy without its kernel."""
    greedy = params.top_k == 1
    if greedy or not sampling_verified():
        return Sampling(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            requested_temperature=None if greedy else float(params.temperature),
        )
    return Sampling(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        # SGLang's "no limit" is a huge number
        top_k=int(params.top_k) if params.top_k < 2**30 else 0,
        seed=getattr(params, "sampling_seed", None),
    )


def _refresh_derived(worker: Any) -> None:
    """Rebuild what the worker stacked from the draft model's weights: the fused KV projection keeps copies."""
    if getattr(worker, "_use_fused_kv_materialize", False):
        worker._init_fused_kv_helper()


def _agreement(group: Any) -> Callable[[str | None], list[str]]:
    def agree(problem: str | None) -> list[str]:
        size = torch.distributed.get_world_size(group=group)
        if size == 1:
            return [problem] if problem else []
        everyone: list[str | None] = [None] * size
        torch.distributed.all_gather_object(everyone, problem, group=group)
        return [p for p in everyone if p]

    return agree


def _own_version() -> str:
    try:
        return version("draftsmith")
    except Exception:
        return "unknown"

"""What DFLASH needs on a CPU beyond the platform's declarations."""

from __future__ import annotations

from typing import Any

import torch

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
DRAFT_ATTENTION = "sglang.srt.models.dflash.DFlashAttention"
HANDLE_DFLASH = "sglang.srt.arg_groups.speculative_hook._handle_dflash"


def install() -> None:
    """Register the hooks with SGLang."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "torch_native" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices(["torch_native"])
    _ignore_streams()
    HookRegistry.register(f"{BACKEND}.forward_extend", before_extend, HookType.BEFORE)
    HookRegistry.register(f"{DRAFT_ATTENTION}.__init__", after_draft_attention_init, HookType.AFTER)
    HookRegistry.register(HANDLE_DFLASH, before_handle_dflash, HookType.BEFORE)


def before_handle_dflash(server_args: Any) -> None:
    """Scheduling of the next batch during this one is not implemented on CPU."""
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook._disable_overlap_schedule_for_cpu(server_args)


def after_draft_attention_init(result: None, attention: Any, *args: Any, **kwargs: Any) -> None:
    """The fused norm and rotation is a GPU kernel; the plain one is there as well."""
    attention.use_table_qk_norm_rope = False


def before_extend(
    backend: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Show a verification pass to the backend as what it is there: an extension of each request by some rows."""
    if not forward_batch.forward_mode.is_target_verify() or forward_batch.extend_seq_lens is not None:
        return None
    spec_info = forward_batch.spec_info
    layout = getattr(spec_info, "ragged_verify_layout", None)
    if layout is None:
        rows = torch.full((forward_batch.batch_size,), int(spec_info.draft_token_num))
    else:
        rows = layout.verify_lens.long()
    extended = _Overlay(
        forward_batch,
        extend_prefix_lens=forward_batch.seq_lens,
        extend_seq_lens=rows,
        seq_lens=forward_batch.seq_lens + rows,
    )
    return (backend, q, k, v, layer, extended, *args), kwargs


class _Overlay:
    """An object seen through other values of some attributes."""

    def __init__(self, base: Any, **values: Any) -> None:
        self._base = base
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def _ignore_streams() -> None:
    record_stream = torch.Tensor.record_stream

    def for_device(tensor: torch.Tensor, stream: Any) -> None:
        if tensor.device.type != "cpu":
            record_stream(tensor, stream)

    torch.Tensor.record_stream = for_device  # type: ignore[method-assign, assignment]

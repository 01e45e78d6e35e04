"""A CPU platform for SGLang that has DFLASH."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities

ATTENTION = "torch_native"


class CpuDraftPlatform(CpuSRTPlatform):
    """SGLang's own CPU platform, declared as an outside one: only those may add speculative algorithms."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        return ATTENTION

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: Any) -> bool:
        return bool(backend == ATTENTION)

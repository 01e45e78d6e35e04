"""The plugin that SGLang loads: verification records out, drafters in, per-request verification lengths.

SGLang finds it by the entry-point group `sglang.srt.plugins` and calls `register` in each of its processes. It stays out
of the way unless `DRAFTSMITH_SGLANG` is set, to a JSON object or the path of a file holding one (see `PluginSettings`).
"""

from __future__ import annotations

import logging
import os
from typing import Any

SETTINGS_VARIABLE = "DRAFTSMITH_SGLANG"
SWAP_FORMAT = "draftsmith"
"""`load_format` of `/update_weights_from_tensor` that carries a `SwapOrder` in place of tensors."""
STATUS_KEY = "draftsmith"
"""Of a server's internal state, which `/server_info` shows: where the plugin leaves its own."""
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

_log = logging.getLogger(__name__)


def register() -> None:
    """Install the plugin's hooks in this process of SGLang.

    SGLang logs what a plugin raises and starts without it, and serving unhooked would look like serving without traffic.
    So whatever goes wrong here, an import included, also ends the scheduler's own start.
    """
    text = os.environ.get(SETTINGS_VARIABLE, "")
    if not text:
        _log.info("draftsmith: %s is not set, nothing is hooked", SETTINGS_VARIABLE)
        return
    try:
        from serving_bridge.sglang_plugin.hooks import install
        from serving_bridge.sglang_plugin.settings import load_settings

        install(load_settings(text))
    except Exception as error:
        refuse_start(f"draftsmith plugin: {type(error).__name__}: {error}")
        raise


def refuse_start(reason: str) -> None:
    """Make the scheduler of this process fail at its start with this reason."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(reason)

    HookRegistry.register(f"{SCHEDULER}.__init__", fail, HookType.BEFORE)

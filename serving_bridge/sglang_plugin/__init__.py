"""The plugin that SGLang loads: verification records out, drafters in, per-request verification lengths.

SGLang finds it by the entry-point group `sglang.srt.plugins` and calls `register` in each of its processes. It stays out
of the way unless `DRAFTSMITH_SGLANG` is set, to a JSON object or the path of a file holding one (see `PluginSettings`).
"""

from __future__ import annotations

import logging
import os

from serving_bridge.sglang_plugin.settings import SETTINGS_VARIABLE, load_settings

_log = logging.getLogger(__name__)


def register() -> None:
    """Install the plugin's hooks in this process of SGLang.

    Raises:
        SettingsError: when the settings cannot be used. SGLang logs what a plugin raises and starts without it, so the
            scheduler's own start is made to fail as well: serving unhooked would look like serving without traffic.
    """
    text = os.environ.get(SETTINGS_VARIABLE, "")
    if not text:
        _log.info("draftsmith: %s is not set, nothing is hooked", SETTINGS_VARIABLE)
        return
    from serving_bridge.sglang_plugin.hooks import install, refuse_start

    try:
        install(load_settings(text))
    except Exception as error:
        refuse_start(f"draftsmith plugin: {error}")
        raise

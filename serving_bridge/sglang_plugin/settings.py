"""What the operator decides about the plugin: one JSON object in the environment of SGLang's processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from serving_bridge.sglang_plugin import SETTINGS_VARIABLE


class SettingsError(ValueError):
    """The settings cannot be used; the message names the field."""


class LengthSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How ADAFLASH turns the length head's estimate into a verification length; see `drafters.policies.AdaFlashPolicy`.

    gamma_by_load: "from this many running requests on" → γ.
    off_below_load: whole blocks are verified below this many running requests.
    verify: `compact` packs the verified slots of all requests into one pass of Σ verify_len rows, which the attention
        backend must be able to run; `static` verifies whole blocks; `auto` takes `compact` where it is known to work.
    """

    gamma: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    gamma_by_load: dict[str, float] = {}
    off_below_load: Annotated[int, msgspec.Meta(ge=0)] = 0
    verify: Literal["auto", "compact", "static"] = "auto"


class PluginSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of the plugin.

    log: where verification records go: a spool directory or a `redis://` address; empty logs nothing.
    log_share: share of requests that are logged, by hash of the conversation key: whole conversations or nothing.
    log_by_default: whether a request that does not say is logged; it says so with `custom_params.draftsmith_log`.
    redact: `module:function`, given each record and returning it changed, or None to drop it.
    target_top_k: for each verified slot, how many of the target's best tokens are logged.
    buffer_records: records that wait for a slow log before the oldest is dropped.
    spool_max_age_s: age at which a spool's segment is sealed, so that readers see its records.
    target_id: needed only if the drafter's directory has no manifest.
    swap_root: directory below which drafters may be loaded from; empty forbids hot swaps through the plugin.
    max_drafter_bytes: larger drafter directories are refused before anything of them is read.
    length: for ADAFLASH.
    admission_beta: smoothing of the admission estimate (AdaFlash §3.3); None leaves admission to SGLang.
    """

    log: str = ""
    log_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    log_by_default: bool = True
    redact: str = ""
    target_top_k: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    buffer_records: Annotated[int, msgspec.Meta(ge=1)] = 1024
    spool_max_age_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    target_id: str = ""
    swap_root: str = ""
    max_drafter_bytes: Annotated[int, msgspec.Meta(gt=0)] = 64 * 2**30
    length: LengthSettings = LengthSettings()
    admission_beta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None


def load_settings(text: str) -> PluginSettings:
    """Settings from JSON, or from the file that `text` names.

    Raises:
        SettingsError: for anything else, naming the field.
    """
    source = SETTINGS_VARIABLE
    if not text.lstrip().startswith("{"):
        source = text
        try:
            text = Path(text).read_text()
        except (OSError, ValueError) as error:
            raise SettingsError(f"{SETTINGS_VARIABLE}: {text}: {error}") from None
    try:
        settings = msgspec.json.decode(text.encode(), type=PluginSettings)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise SettingsError(f"{source}: {error}") from None
    for load, gamma in settings.length.gamma_by_load.items():
        if not load.isdecimal() or gamma <= 0:
            raise SettingsError(f"{source}: length.gamma_by_load maps a number of requests to a γ above 0")
    if settings.swap_root and not Path(settings.swap_root).is_absolute():
        raise SettingsError(f"{source}: swap_root must be an absolute path, not {settings.swap_root!r}")
    return settings


def without_password(text: str) -> str:
    """Of `scheme://user:password@host`, what a screen may show."""
    return re.sub(r"(://[^/@:\s]*:)[^@/]*@", r"\1***@", text)

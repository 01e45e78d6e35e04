"""`draftsmith doctor --sglang URL`: is the plugin in a running server there, whole, and logging?"""

from __future__ import annotations

import os
from typing import Any

from drafters.errors import UserError
from pipeline.doctor import Check
from serving_bridge.server import SwapError
from serving_bridge.sglang_http import ServerAddress, SGLangClient, plugin_status_of

KEY_VARIABLES = ("SGLANG_ADMIN_KEY", "SGLANG_API_KEY")


def examine_server(url: str) -> list[Check]:
    """Findings about one server; the first that is blocking ends the list.

    Raises:
        UserError: for an address that makes no sense, or that needs a key.
    """
    try:
        address = ServerAddress(
            url, api_key=os.environ.get(KEY_VARIABLES[1]), admin_key=os.environ.get(KEY_VARIABLES[0])
        )
    except ValueError as error:
        raise UserError(f"--sglang {error} (environment variable {KEY_VARIABLES[0]})") from None
    try:
        info = SGLangClient(address, timeout_s=10.0).server_info()
    except SwapError as error:
        return [Check("server", "missing", str(error), "nothing can be logged or swapped", blocking=True)]
    checks = [Check("server", "ok", f"{url}, SGLang {info.get('version', 'of unknown version')}")]
    status = plugin_status_of(info)
    if status is None:
        follows = "pip install --no-deps draftsmith there, set DRAFTSMITH_SGLANG, start it again"
        return [
            *checks,
            Check("plugin", "missing", "not there, or its settings are not", follows, blocking=True),
        ]
    return [*checks, *plugin_checks(status)]


def plugin_checks(status: dict[str, Any]) -> list[Check]:
    """What the plugin's own status means."""
    missing = status["missing_hooks"]
    found = f"{status['plugin_version']}, {status['hooks']} hooks"
    checks = []
    if missing:
        text = f"{found}; not applied: {', '.join(missing)}"
        checks.append(Check("plugin", "missing", text, "use a tested SGLang version", blocking=True))
    else:
        checks.append(Check("plugin", "ok", found))
    if status["sglang_version"] != status["tested_with"]:
        checks.append(
            Check(
                "version",
                "warn",
                f"SGLang {status['sglang_version']}",
                f"tested with {status['tested_with']}; run `make test-sglang` against yours",
            )
        )
    drafter = status["drafter"] or {}
    checks.append(Check("drafter", "ok", str(drafter.get("drafter_version")), _swaps(drafter)))
    checks.append(_records(status))
    # of a D3D drafter whole blocks are verified, and that is all there is
    settled = status["verify"] == "compact" or status.get("algorithm") == "D3D"
    checks.append(
        Check(
            "verification",
            "ok" if settled else "warn",
            str(status["verify"]),
            "" if settled else "whole blocks are verified; ADAFLASH with a length head would verify less",
        )
    )
    if not status["sampling_verified"]:
        checks.append(
            Check("sampling", "warn", "no kernel", "requests with a temperature are decoded greedily here")
        )
    return checks


def _swaps(drafter: dict[str, Any]) -> str:
    problem = drafter.get("last_problem")
    return f"{drafter.get('swaps', 0)} swaps" + (f"; last problem: {problem}" if problem else "")


def _records(status: dict[str, Any]) -> Check:
    records = status["records"]
    if records is None:
        return Check(
            "records", "warn", "not logged", "set `log` in the plugin's settings to learn from traffic"
        )
    found = f"{records['written']} written, {records['dropped']} dropped, to {status['log']}"
    if records["dropped"] or records.get("rejected"):
        why = records.get("last_error") or "the log was too slow or full"
        return Check("records", "warn", found, f"{why}; raise buffer_records or mend the log")
    return Check("records", "ok", found)

"""Verification records of a serving engine, put together round by round.

Knows nothing of SGLang: `hooks` says what happened, this decides what becomes a record. A record is complete only when its
request ends, so rounds wait on the request's own log until then; an abandoned request takes its log with it.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from serving_bridge.records import Round, Sampling, VerificationRecord
from serving_bridge.sglang_plugin.settings import PluginSettings, SettingsError
from serving_bridge.transport import LogWriter

_log = logging.getLogger(__name__)

PREFIX = "draftsmith_"
"""Of the keys that a client may set in a request's `custom_params`."""

MAX_TOP_K_ROUNDS = 256
"""Rounds of a request that keep the target's best tokens: they are most of a record, which must stay bounded."""

Redaction = Callable[[VerificationRecord], VerificationRecord | None]


@dataclass(frozen=True)
class RequestInfo:
    """What a client said about a request, in `custom_params`."""

    conversation_key: str
    domain: str
    tenant: str | None
    log: bool

    @classmethod
    def of(
        cls, request_id: str, custom_params: Mapping[str, Any] | None, settings: PluginSettings
    ) -> RequestInfo:
        """Read the keys; what is missing or of a wrong type has its default."""
        said = custom_params if isinstance(custom_params, Mapping) else {}

        def text(key: str) -> str | None:
            value = said.get(PREFIX + key)
            return value if isinstance(value, str) and value else None

        conversation = text("conversation") or request_id
        log = said.get(PREFIX + "log")
        wanted = log if isinstance(log, bool) else settings.log_by_default
        return cls(
            conversation,
            text("domain") or "default",
            text("tenant"),
            wanted and in_share(conversation, settings.log_share),
        )


def in_share(conversation_key: str, share: float) -> bool:
    """Whether a conversation is among the logged share: a function of its key, so all its turns or none."""
    digest = hashlib.sha256(b"log\x1f" + conversation_key.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


@dataclass
class RequestLog:
    """Rounds of a running request."""

    info: RequestInfo
    rounds: list[Round] = field(default_factory=list)


class Recorder:
    """Builds records and hands them to a writer that never blocks.

    Args:
        writer: where records go.
        settings: sampling and redaction.
        target_id: of the served target.
        block_size: slots of a drafted block.
        length_policy: as records name it.
    """

    def __init__(
        self,
        writer: LogWriter,
        settings: PluginSettings,
        *,
        target_id: str,
        block_size: int,
        length_policy: str,
    ) -> None:
        self.writer = writer
        self.settings = settings
        self.target_id = target_id
        self.block_size = block_size
        self.length_policy = length_policy
        self.skipped: Counter[str] = Counter()
        self._redact = _import_redaction(settings.redact)

    def begin(self, request_id: str, custom_params: Mapping[str, Any] | None) -> RequestLog:
        """The log of a request that is seen for the first time."""
        info = RequestInfo.of(request_id, custom_params, self.settings)
        if not info.log:
            self.skipped["not_wanted"] += 1
        return RequestLog(info)

    def round(
        self,
        log: RequestLog,
        *,
        start: int,
        drafter_version: str,
        verify_len: int,
        accepted: int,
        draft_ids: list[int],
        target_top_k: list[list[tuple[int, float]]] | None,
    ) -> None:
        """Note one verification round."""
        if not log.info.log:
            return
        if target_top_k is not None and len(log.rounds) >= MAX_TOP_K_ROUNDS:
            target_top_k = None
        log.rounds.append(
            Round(
                start=start,
                drafter_version=drafter_version,
                verify_len=verify_len,
                accepted=accepted,
                draft_ids=draft_ids,
                target_top_k=target_top_k,
            )
        )

    def finish(
        self,
        log: RequestLog,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        sampling: Sampling,
        finish_reason: Literal["stop", "length", "abort"],
    ) -> None:
        """Write the record of a request that ended."""
        if not log.info.log:
            return
        last = len(prompt_ids) + len(output_ids) - 1
        # a stop string may end the text before tokens that were already committed
        rounds = [r for r in log.rounds if r.start <= last]
        if not output_ids or not rounds:
            self.skipped["no_rounds"] += 1
            return
        record = VerificationRecord(
            request_id=request_id,
            conversation_key=log.info.conversation_key,
            time=time.time(),
            target_id=self.target_id,
            sampling=sampling,
            domain=log.info.domain,
            tenant=log.info.tenant,
            prompt_ids=list(prompt_ids),
            output_ids=list(output_ids),
            rounds=rounds,
            finish_reason=finish_reason,
            block_size=self.block_size,
            length_policy=self.length_policy,
        )
        redacted = self._redacted(record)
        if redacted is not None:
            self.writer.write(redacted)

    def status(self) -> dict[str, Any]:
        """Counters, for status views."""
        stats: dict[str, Any] = getattr(self.writer, "stats", dict)()
        return {**stats, "written": self.writer.written, "dropped": self.writer.dropped} | {
            "skipped": dict(self.skipped)
        }

    def _redacted(self, record: VerificationRecord) -> VerificationRecord | None:
        if self._redact is None:
            return record
        try:
            redacted = self._redact(record)
            if redacted is not None and not isinstance(redacted, VerificationRecord):
                raise TypeError(f"the redaction returned {type(redacted).__name__}, not a record")
        except Exception:
            # a record that could not be redacted must not be kept, nor may it disturb serving
            if not self.skipped["redaction_failed"]:
                _log.exception("draftsmith: the redaction failed; its records are dropped and counted")
            self.skipped["redaction_failed"] += 1
            return None
        self.skipped["redacted_away"] += redacted is None
        return redacted


def _import_redaction(name: str) -> Redaction | None:
    if not name:
        return None
    module, _, function = name.partition(":")
    try:
        redaction: Redaction = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"redact: {name!r} cannot be imported as module:function ({error})") from None
    if not callable(redaction):
        raise SettingsError(f"redact: {name!r} is not a function")
    return redaction

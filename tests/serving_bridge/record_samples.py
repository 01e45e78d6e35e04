"""Small verification records for the tests of this folder."""

from __future__ import annotations

from typing import Any

from serving_bridge.records import Round, Sampling, VerificationRecord


def make_round(
    start: int, accepted: int, block_size: int = 4, verify_len: int | None = None, prepared: bool = False
) -> Round:
    return Round(
        start=start,
        drafter_version="v1",
        verify_len=block_size if verify_len is None else verify_len,
        accepted=accepted,
        draft_ids=[100 + start + slot for slot in range(1, block_size)],
        prepared=prepared,
    )


def make_record(request_id: str = "r0", **changes: Any) -> VerificationRecord:
    """A prompt of 3, an output of 7: the prefill's token, then rounds that commit 3, 1 and 2 tokens."""
    fields: dict[str, Any] = {
        "request_id": request_id,
        "conversation_key": f"conversation-{request_id}",
        "time": 1_700_000_000.25,
        "target_id": "tiny@main#0123456789ab",
        "sampling": Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=7),
        "prompt_ids": [5, 6, 7],
        "output_ids": [10, 11, 12, 13, 14, 15, 2],
        "rounds": [make_round(3, 2), make_round(6, 0), make_round(7, 1)],
        "finish_reason": "stop",
        "block_size": 4,
        "length_policy": "fixed",
    }
    return VerificationRecord(**(fields | changes))

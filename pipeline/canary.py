"""The canary: does a freshly swapped drafter do on live traffic what the gate promised?

Live rounds are judged uncensored (all B-1 logged drafts against the served text), and compared with the old champion replayed
at the very same round starts of the same records, so neither load, nor the length policy, nor the mix of traffic
confounds the comparison. A server whose draft weights are stale or damaged shows here, though every checksum was right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from datamodules.streaming import record_to_document
from drafters.replay import draft_all_anchors
from pipeline.config import CanaryConfig
from pipeline.models import TargetBundle, load_drafter_for
from serving_bridge.records import VerificationRecord
from serving_bridge.transport import LogReader


@dataclass(frozen=True)
class CanaryVerdict:
    """Whether the new version may stay, why, and the two acceptance lengths."""

    passed: bool
    reason: str
    live: float | None = None
    baseline: float | None = None
    records: int = 0


def watch(
    reader: LogReader,
    drafter_version: str,
    baseline: Path,
    bundle: TargetBundle,
    config: CanaryConfig,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    poll_s: float = 0.5,
) -> CanaryVerdict:
    """Wait for records of the new version and judge them.

    Args:
        reader: positioned at the time of the swap; not committed, so it holds back no retention.
        drafter_version: as the records name it.
        baseline: checkpoint of the old champion.
        bundle: the target.
        config: how many records, how large a drop, how long to wait.
        should_stop: polled while waiting; a challenger that is unproven when told to stop does not pass.
    """
    deadline = time.monotonic() + config.timeout_s
    seen: list[VerificationRecord] = []
    while len(seen) < config.min_records:
        deliveries = reader.read(config.min_records)
        news = [d.record for d in deliveries if uses(d.record, drafter_version)]
        seen += news
        if news:
            continue
        # other drafters' records keep coming where several servers share a log: they buy no time
        if should_stop() and not deliveries:
            return CanaryVerdict(
                False,
                f"told to stop after {len(seen)} of {config.min_records} records; the challenger is unproven",
                records=len(seen),
            )
        if time.monotonic() > deadline:
            return CanaryVerdict(
                True,
                f"only {len(seen)} of {config.min_records} records came in time; the gate's verdict stands",
                records=len(seen),
            )
        if not deliveries:
            time.sleep(poll_s)
    live, expected = compare(seen, drafter_version, baseline, bundle)
    floor = expected * (1 - config.max_drop)
    passed = live >= floor
    return CanaryVerdict(
        passed,
        f"live acceptance length {live:.3f} over {len(seen)} records, old champion {expected:.3f} on the same "
        f"rounds: {'not below' if passed else 'below'} the floor {floor:.3f}",
        live,
        expected,
        len(seen),
    )


def uses(record: VerificationRecord, drafter_version: str) -> bool:
    """Whether any round of a record was drafted by this version."""
    return any(r.drafter_version == drafter_version for r in record.rounds)


@torch.no_grad()
def compare(
    records: Sequence[VerificationRecord], drafter_version: str, baseline: Path, bundle: TargetBundle
) -> tuple[float, float]:
    """(live, baseline) mean accepted drafts + 1 over the rounds that `drafter_version` drafted."""
    drafter = load_drafter_for(baseline, bundle, dtype=bundle.target.dtype).drafter
    documents = [record_to_document(record) for record in records]
    live_sum = base_sum = rounds = 0
    replayed = draft_all_anchors(drafter, bundle.target, documents)
    for record, (document, anchors, drafts_AB) in zip(records, replayed, strict=True):
        row_of = {anchor: row for row, anchor in enumerate(anchors)}
        for r in record.rounds:
            if r.drafter_version != drafter_version or r.start not in row_of:
                continue
            served = document.token_ids[r.start + 1 :]
            live_sum += 1 + _matching(r.draft_ids, served)
            base_sum += 1 + _matching(drafts_AB[row_of[r.start]].tolist(), served)
            rounds += 1
    return live_sum / max(1, rounds), base_sum / max(1, rounds)


def _matching(drafts: Sequence[int], served: Sequence[int]) -> int:
    count = 0
    for draft, token in zip(drafts, served, strict=False):
        if draft != token:
            break
        count += 1
    return count

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
from drafters.fill import Drafter
from drafters.replay import draft_all_anchors
from pipeline.config import CanaryConfig
from pipeline.console import say
from pipeline.models import TargetBundle, load_drafter_for
from pipeline.sequential import SignTest
from serving_bridge.records import VerificationRecord
from serving_bridge.transport import Delivery, LogReader


@dataclass(frozen=True)
class CanaryVerdict:
    """Whether the new version may stay, why, and the two acceptance lengths.

    `stopped`: there is no verdict, the watch was told to stop first.
    """

    passed: bool
    reason: str
    live: float | None = None
    baseline: float | None = None
    records: int = 0
    stopped: bool = False


@dataclass(frozen=True)
class RecordScore:
    """One record's rounds of the new version: drafts that matched the served text, plus one for each round."""

    live: int
    baseline: int
    rounds: int


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
    """Judge the records of the new version as they come, until a sequential test is sure.

    It asks whether live acceptance keeps above `1 - max_drop` of the old champion's on the same rounds. At `max_records`
    without certainty, and at the timeout with some records, the estimate itself decides; without any, the gate's
    verdict stands.

    Args:
        reader: positioned at the time of the swap; not committed, so it holds back no retention.
        drafter_version: as the records name it.
        baseline: checkpoint of the old champion.
        bundle: the target.
        config: how large a drop, how sure, how many records, how long to wait.
        should_stop: polled while waiting; a challenger that is unproven when told to stop does not pass, and `stopped` says so.
    """
    deadline = time.monotonic() + config.timeout_s
    drafter = load_drafter_for(baseline, bundle, dtype=bundle.target.dtype).drafter
    test = SignTest(config.error_rate, config.min_records)
    scores: list[RecordScore] = []
    while True:
        # asked before reading: what was written before the word to stop is still read
        stopping = should_stop()
        deliveries = _read(reader, config.min_records)
        news = [d.record for d in deliveries if uses(d.record, drafter_version)]
        # one by one, or a batch of records would be one look where the test allows many
        for score in score_records(news, drafter_version, drafter, bundle):
            scores.append(score)
            test.add(score.live - (1 - config.max_drop) * score.baseline)
            sure = test.verdict()
            if sure is not None:
                return _verdict(scores, config, sure, f"at an error rate of {config.error_rate:g}")
            if len(scores) >= config.max_records:
                return _verdict(scores, config, test.mean >= 0, "by the estimate, without certainty")
        if news:
            continue
        # other drafters' records keep coming where several servers share a log: they buy no time
        if stopping and not deliveries:
            return CanaryVerdict(
                False,
                f"told to stop after {len(scores)} of {config.min_records} records; the challenger is unproven",
                records=len(scores),
                stopped=True,
            )
        if time.monotonic() > deadline:
            if len(scores) >= config.min_records:
                return _verdict(scores, config, test.mean >= 0, "by the estimate when time was up")
            return CanaryVerdict(
                True,
                f"only {len(scores)} of {config.min_records} records came in time; the gate's verdict stands",
                records=len(scores),
            )
        if not deliveries:
            time.sleep(poll_s)


def _read(reader: LogReader, limit: int) -> list[Delivery]:
    """What is there; nothing while the log cannot be reached."""
    try:
        return reader.read(limit)
    except OSError as error:
        say(f"canary: the record log cannot be read ({error})")
        return []


def _verdict(scores: Sequence[RecordScore], config: CanaryConfig, passed: bool, how: str) -> CanaryVerdict:
    live, expected = acceptance_lengths(scores)
    floor = expected * (1 - config.max_drop)
    return CanaryVerdict(
        passed,
        f"live acceptance length {live:.3f} over {len(scores)} records, old champion {expected:.3f} on the same "
        f"rounds: {'not below' if passed else 'below'} the floor {floor:.3f}, {how}",
        live,
        expected,
        len(scores),
    )


def uses(record: VerificationRecord, drafter_version: str) -> bool:
    """Whether any round of a record was drafted by this version."""
    return any(r.drafter_version == drafter_version for r in record.rounds)


def acceptance_lengths(scores: Sequence[RecordScore]) -> tuple[float, float]:
    """(live, baseline) mean over all rounds."""
    rounds = max(1, sum(s.rounds for s in scores))
    return sum(s.live for s in scores) / rounds, sum(s.baseline for s in scores) / rounds


def compare(
    records: Sequence[VerificationRecord], drafter_version: str, baseline: Path, bundle: TargetBundle
) -> tuple[float, float]:
    """(live, baseline) over the rounds that `drafter_version` drafted, given the old champion's checkpoint."""
    drafter = load_drafter_for(baseline, bundle, dtype=bundle.target.dtype).drafter
    return acceptance_lengths(score_records(records, drafter_version, drafter, bundle))


@torch.no_grad()
def score_records(
    records: Sequence[VerificationRecord], drafter_version: str, baseline: Drafter, bundle: TargetBundle
) -> list[RecordScore]:
    """Score the rounds that `drafter_version` drafted; records without one that can be compared are left out."""
    documents = [record_to_document(record) for record in records]
    scores = []
    replayed = draft_all_anchors(baseline, bundle.target, documents) if documents else []
    for record, (document, anchors, drafts_AB) in zip(records, replayed, strict=True):
        row_of = {anchor: row for row, anchor in enumerate(anchors)}
        live = base = rounds = 0
        for r in record.rounds:
            if r.drafter_version != drafter_version or r.start not in row_of:
                continue
            if len(r.draft_ids) < len(drafts_AB[row_of[r.start]]):
                # prepared for full acceptance, without sight of the anchor: no fair pair
                continue
            served = document.token_ids[r.start + 1 :]
            live += 1 + matching_prefix(r.draft_ids, served)
            base += 1 + matching_prefix(drafts_AB[row_of[r.start]].tolist(), served)
            rounds += 1
        if rounds:
            scores.append(RecordScore(live, base, rounds))
    return scores


def matching_prefix(drafts: Sequence[int], served: Sequence[int]) -> int:
    """Drafts before the first that differs from the served text."""
    count = 0
    for draft, token in zip(drafts, served, strict=False):
        if draft != token:
            break
        count += 1
    return count

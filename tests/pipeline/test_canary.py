"""The canary's figures against single decoding rounds, and what it says of damaged drafts and of silence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import pipeline.canary
from drafters.checkpoint import load_drafter
from drafters.decoding import DecodingSession, ServingDrafter
from drafters.policies import FixedPolicy
from drafters.verify import SamplingParams
from pipeline.canary import compare, uses, watch
from pipeline.config import CanaryConfig
from pipeline.models import TargetBundle
from serving_bridge.local_engine import Request, make_record
from serving_bridge.records import Round, VerificationRecord
from serving_bridge.transport import Cursor, Delivery
from tests.serving_bridge.tiny_serving import NEW_TOKENS, Scene, make_scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"), "llama")


@pytest.fixture(scope="module")
def bundle(scene: Scene) -> TargetBundle:
    return TargetBundle(scene.target, None, "tiny", [])


def serving_of(scene: Scene, directory: Path, length: int | None = None) -> ServingDrafter:
    loaded = load_drafter(directory, dtype=scene.target.dtype)
    return ServingDrafter(loaded.drafter, FixedPolicy(length), loaded.drafter_version)


def serve(scene: Scene, takes_over: int, length: int | None = None) -> list[VerificationRecord]:
    """Records whose first `takes_over` rounds are v2's (the old champion) and whose later ones are v1's."""
    old, new = serving_of(scene, scene.second, length), serving_of(scene, scene.first, length)
    records = []
    for number, prompt in enumerate(scene.prompts):
        session = DecodingSession(scene.target, prompt, sampling=SamplingParams(), max_new_tokens=NEW_TOKENS)
        session.prefill()
        while not session.finished:
            session.step(old if len(session.rounds) < takes_over else new)
        request = Request(f"r{number}", prompt, NEW_TOKENS)
        records.append(make_record(request, session, scene.target, new))
    return records


def matching(drafts: Sequence[int], served: Sequence[int]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafts, served, strict=False))))


def one_round(scene: Scene, serving: ServingDrafter, tokens: list[int], start: int) -> list[int]:
    """Drafts of a round begun at `start` by decoding from the tokens before it."""
    session = DecodingSession(
        scene.target, tokens[:start], sampling=SamplingParams(), max_new_tokens=NEW_TOKENS
    )
    session.prefill()
    assert session.tokens[start] == tokens[start]
    return session.step(serving).draft_ids


@pytest.mark.parametrize("length", [None, 2])
def test_both_figures_equal_those_of_single_rounds(
    scene: Scene, bundle: TargetBundle, length: int | None
) -> None:
    records = serve(scene, takes_over=2, length=length)
    live, baseline = [], []
    old = serving_of(scene, scene.second)
    for record in records:
        tokens = record.prompt_ids + record.output_ids
        for r in record.rounds[2:]:
            served = tokens[r.start + 1 :]
            live.append(1 + matching(r.draft_ids, served))
            baseline.append(1 + matching(one_round(scene, old, tokens, r.start), served))
    assert sum(live) > len(live) and sum(baseline) > len(baseline)
    found = compare(records, "v1", scene.second, bundle)
    assert found == (sum(live) / len(live), sum(baseline) / len(baseline))


def test_shortened_verification_does_not_censor_the_live_figure(scene: Scene, bundle: TargetBundle) -> None:
    """With one row verified nothing is ever accepted, yet the drafts were as good as ever."""
    records = serve(scene, takes_over=0, length=1)
    assert not any(r.accepted for record in records for r in record.rounds)
    live, baseline = compare(records, "v1", scene.first, bundle)
    assert live == baseline > 1


class Log:
    """A reader that hands out batches, then nothing; or the same batch for ever."""

    def __init__(self, *batches: Sequence[VerificationRecord], repeat: bool = False) -> None:
        self.batches = itertools.cycle(batches) if repeat else iter(batches)
        self.cursor = Cursor()
        self.reads = 0

    def read(self, limit: int) -> list[Delivery]:
        self.reads += 1
        assert self.reads < 1000, "the watch does not end"
        return [Delivery(self.cursor, record, self.cursor) for record in next(self.batches, ())]

    def seek(self, cursor: Cursor) -> None:
        raise AssertionError("the canary reads on")

    def commit(self, cursor: Cursor, keep_from: Cursor | None = None) -> None:
        raise AssertionError("the canary holds back no retention")

    def lag(self) -> int:
        return 0


class Clock:
    """Time that passes by a second a look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pipeline.canary, "time", clock)
    return clock


def config(records: int = 4) -> CanaryConfig:
    return CanaryConfig(min_records=records, max_drop=0.1, timeout_s=60)


def with_drafts(record: VerificationRecord, drafts: Sequence[int]) -> VerificationRecord:
    def spoiled(r: Round) -> Round:
        return msgspec.structs.replace(r, draft_ids=list(drafts), accepted=0)

    return msgspec.structs.replace(record, rounds=[spoiled(r) for r in record.rounds])


def test_a_drafter_as_good_as_promised_passes(scene: Scene, bundle: TargetBundle, clock: Clock) -> None:
    records = serve(scene, takes_over=1)
    log = Log(records[:1], [], records[1:])
    verdict = watch(log, "v1", scene.second, bundle, config(len(records)))
    assert verdict.passed and verdict.records == len(records)
    assert (verdict.live, verdict.baseline) == compare(records, "v1", scene.second, bundle)
    assert "not below the floor" in verdict.reason


def test_damaged_drafts_are_noticed(scene: Scene, bundle: TargetBundle, clock: Clock) -> None:
    records = [with_drafts(r, [62, 62, 62]) for r in serve(scene, takes_over=0)]
    verdict = watch(Log(records), "v1", scene.first, bundle, config())
    assert not verdict.stopped
    assert not verdict.passed
    assert verdict.live is not None and verdict.baseline is not None
    assert verdict.live < 0.9 * verdict.baseline
    assert f"live acceptance length {verdict.live:.3f}" in verdict.reason
    assert f"below the floor {0.9 * verdict.baseline:.3f}" in verdict.reason


def test_a_drop_within_the_tolerance_passes(scene: Scene, bundle: TargetBundle, clock: Clock) -> None:
    records = serve(scene, takes_over=0)
    live, expected = compare(records, "v1", scene.first, bundle)
    assert live == expected
    spoiled = [with_drafts(records[0], [62, 62, 62]), *records[1:]]
    live, _ = compare(spoiled, "v1", scene.first, bundle)
    drop = 1 - live / expected
    assert drop > 0
    for allowed, passes in ((drop + 0.01, True), (drop - 0.01, False)):
        settings = CanaryConfig(min_records=4, max_drop=allowed, timeout_s=60)
        assert watch(Log(spoiled), "v1", scene.first, bundle, settings).passed == passes


@pytest.mark.parametrize("traffic", ["none", "of the old drafter"])
def test_without_enough_records_in_time_the_gate_stands(
    traffic: str, scene: Scene, bundle: TargetBundle, clock: Clock
) -> None:
    records = serve(scene, takes_over=0)
    others = [
        msgspec.structs.replace(
            r, rounds=[msgspec.structs.replace(x, drafter_version="v0") for x in r.rounds]
        )
        for r in records
    ]
    assert uses(records[0], "v1") and not uses(others[0], "v1")
    log = Log([]) if traffic == "none" else Log(others, repeat=True)
    verdict = watch(log, "v1", scene.second, bundle, config())
    assert verdict.passed and (verdict.live, verdict.records) == (None, 0)
    assert "only 0 of 4 records" in verdict.reason
    assert clock.now < 100


def test_being_told_to_stop_ends_the_watch(scene: Scene, bundle: TargetBundle, clock: Clock) -> None:
    records = serve(scene, takes_over=0)
    verdict = watch(Log(records[:2]), "v1", scene.second, bundle, config(), should_stop=lambda: True)
    # SIGTERM must not make a champion of what the canary has not judged
    assert not verdict.passed and "2 of 4" in verdict.reason and "unproven" in verdict.reason
    assert verdict.stopped
    assert clock.now < 10

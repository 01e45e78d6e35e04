"""The embedded engine under policies that learn: lossless across swaps, records that say what was drafted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from drafters.acceptance_head import AcceptanceHead
from drafters.checkpoint import LoadedDrafter, load_drafter, save_drafter
from drafters.errors import UserError
from drafters.lookahead import Lookahead
from drafters.policies import FixedPolicy, LengthPolicy, Load, RoundTiming
from drafters.throughput_policy import ThroughputPolicy
from pipeline.config import PolicyConfig
from pipeline.policies import policy_factory
from serving_bridge.local_engine import Completion, LocalEngine, Request
from serving_bridge.records import VerificationRecord, committed_tokens, decode, encode
from tests.serving_bridge.tiny_serving import BLOCK_SIZE, NEW_TOKENS, PATIENCE, Scene, make_scene

Start = Callable[[Callable[[LoadedDrafter], LengthPolicy]], LocalEngine]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("llama"), "llama")


class Log:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[VerificationRecord] = []

    def write(self, record: VerificationRecord) -> None:
        self.taken.append(record)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def start(scene: Scene, log: Log) -> Iterator[Start]:
    engines: list[LocalEngine] = []

    def begin(policy: Callable[[LoadedDrafter], LengthPolicy]) -> LocalEngine:
        engines.append(
            LocalEngine(
                scene.target,
                scene.first,
                policy=policy,
                eos_ids=[],
                writer=log,  # type: ignore[arg-type]
                max_running=3,
            )
        )
        return engines[-1]

    yield begin
    for engine in engines:
        engine.stop(PATIENCE)


def complete(engine: LocalEngine, scene: Scene) -> list[Completion]:
    futures = [engine.submit(Request(f"r{i}", p, NEW_TOKENS)) for i, p in enumerate(scene.prompts)]
    return [future.result(PATIENCE) for future in futures]


class EverySecondRound(FixedPolicy):
    """Drafts in every second round."""

    rounds = 0

    def wants_draft(self, load: Load) -> bool:
        EverySecondRound.rounds += 1
        return EverySecondRound.rounds % 2 == 0

    def observe(self, timing: RoundTiming) -> None:
        return


def test_records_hold_the_rounds_that_drafted(scene: Scene, start: Start, log: Log) -> None:
    """What was decoded plainly lies between rounds, as after a prefill that was repeated; readers take it."""
    completions = complete(start(lambda loaded: EverySecondRound()), scene)
    assert [c.output_ids for c in completions] == scene.outputs
    gaps = 0
    for record in log.taken:
        assert decode(encode(record)) == record, "and it is consistent"
        assert all(len(r.draft_ids) == BLOCK_SIZE - 1 for r in record.rounds)
        assert committed_tokens(record) < len(record.output_ids) - 1
        ends = [r.start + r.accepted + 1 for r in record.rounds]
        gaps += sum(r.start > end for r, end in zip(record.rounds[1:], ends, strict=False))
    assert gaps > 0


def test_what_rounds_cost_outlives_a_swap(scene: Scene, start: Start, tmp_path: Path) -> None:
    factory, made = policy_factory(PolicyConfig(name="throughput", probe_every=4)), list[ThroughputPolicy]()

    def policy(loaded: LoadedDrafter) -> LengthPolicy:
        made.append(cast(ThroughputPolicy, factory(loaded)))
        return made[-1]

    places = []
    for name, place in (("a", scene.first), ("b", scene.second)):
        loaded = load_drafter(place)
        head = AcceptanceHead(loaded.drafter.config.hidden_size, BLOCK_SIZE, 4)
        places.append(
            save_drafter(
                tmp_path / name,
                loaded.drafter,
                identity=loaded.identity,
                drafter_version=name,
                acceptance_head=head,
            )
        )
    engine = LocalEngine(scene.target, places[0], policy=policy, eos_ids=[], max_running=3)
    try:
        for place in (*places[::-1], places[1]):
            costs = made[-1].costs
            before = costs.observed
            assert [c.output_ids for c in complete(engine, scene)] == scene.outputs
            assert costs.observed > before and costs.draft_s(1) > 0
            engine.swap(place)
            assert made[-1].costs.observed == costs.observed, "the target is the same"
            assert made[-1].costs.draft_s(1) == 0, "the drafter is another"
    finally:
        engine.stop(PATIENCE)
    assert len(made) == 4


def test_a_policy_that_learns_costs_does_not_go_with_drafting_ahead(scene: Scene) -> None:
    with Lookahead(None) as lookahead, pytest.raises(UserError, match="policy fixed learns what rounds cost"):
        LocalEngine(
            scene.target,
            scene.first,
            policy=lambda loaded: EverySecondRound(),
            eos_ids=[],
            lookahead=lookahead,
        )


def test_an_engine_that_never_drafts_decodes_plainly(scene: Scene, start: Start, log: Log) -> None:
    class Never(EverySecondRound):
        def wants_draft(self, load: Load) -> bool:
            return False

        def verify_len(
            self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load
        ) -> torch.Tensor:
            raise AssertionError("nothing was to be drafted")

    assert [c.output_ids for c in complete(start(lambda loaded: Never()), scene)] == scene.outputs
    for record in log.taken:
        assert record.rounds == [] and decode(encode(record)) == record

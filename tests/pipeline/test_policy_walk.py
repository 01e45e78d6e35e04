"""Policies walked over served text give what decoding with them gives, and tokens per second by the costs handed in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafters.acceptance_head import AcceptanceHead
from drafters.checkpoint import LoadedDrafter, load_drafter
from drafters.decoding import DecodingSession, ServingDrafter
from drafters.errors import UserError
from drafters.length_head import LengthHead
from drafters.packing import Document
from drafters.policies import AdaFlashPolicy, FixedPolicy, LengthPolicy
from drafters.replay import replay, total_acceptance_length
from drafters.step_cost import StepCosts
from drafters.survival_policy import SurvivalPolicy
from drafters.verify import SamplingParams
from pipeline.block_traces import BlockTrace, trace_documents
from pipeline.measure_costs import measure_costs
from pipeline.policy_walk import walk
from pipeline.simulation.methods import Method, every_method
from pipeline.simulation.requests import Requests
from pipeline.simulation.runs import rate_interval
from pipeline.simulation.serving import serve
from pipeline.simulation.traffic import Traffic
from pipeline.stages.served_texts import sample, served_documents
from pipeline.stages.tune_policy import read_costs
from serving_bridge.spool import SpoolWriter
from tests.drafters.policy_samples import linear_costs, random_acceptance_head
from tests.pipeline.cost_samples import LinearCosts
from tests.serving_bridge.record_samples import make_record
from tests.serving_bridge.tiny_serving import BLOCK_SIZE, Scene, make_scene

UNIT = LinearCosts(fixed=1.0, row=0.1, draft=0.5)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"), "llama")


@pytest.fixture(scope="module")
def loaded(scene: Scene) -> LoadedDrafter:
    plain = load_drafter(scene.first, dtype=scene.target.dtype)
    hidden = plain.drafter.config.hidden_size
    acceptance: AcceptanceHead = random_acceptance_head(hidden, BLOCK_SIZE, seed=3, weight=0.5)
    return replace(plain, length_head=LengthHead(hidden, 8), acceptance_head=acceptance)


@pytest.fixture(scope="module")
def requests(scene: Scene, loaded: LoadedDrafter) -> Requests:
    return Requests.of(list(trace_documents(loaded, scene.target, scene.documents)), BLOCK_SIZE)


def find(name: str, setting: str = "") -> Method:
    every = every_method(BLOCK_SIZE, length_head=True, acceptance_head=True)
    (found,) = [c for c in every if (c.name, c.setting) == (name, setting)]
    return found


def test_whole_blocks_give_replayed_acceptance(
    scene: Scene, loaded: LoadedDrafter, requests: Requests
) -> None:
    tau = total_acceptance_length(replay(loaded.drafter, scene.target, scene.documents))
    assert tau > 1.2
    result = walk(find("fixed", f"length {BLOCK_SIZE}"), requests, UNIT, 1)
    assert result.acceptance_length == pytest.approx(tau)
    assert result.verify_len == BLOCK_SIZE
    # every round costs 0.5 + 1 + 0.1·B
    assert result.tokens_per_s.point == pytest.approx(tau / (1.5 + 0.1 * BLOCK_SIZE))
    assert result.tokens_per_s.low <= result.tokens_per_s.point <= result.tokens_per_s.high


def test_other_policies_are_walked_from_their_own_round_starts(
    scene: Scene, loaded: LoadedDrafter, requests: Requests
) -> None:
    assert loaded.acceptance_head is not None and loaded.length_head is not None
    cases: list[tuple[Method, LengthPolicy]] = [
        (find("fixed", "length 2"), FixedPolicy(2)),
        (find("survival", "threshold 0.4"), SurvivalPolicy(loaded.acceptance_head, 0.4)),
        (find("adaflash", "gamma 1.5"), AdaFlashPolicy(loaded.length_head, 1.5)),
    ]
    for method, policy in cases:
        committed = rounds = rows = 0
        for document, text in zip(scene.documents, scene.outputs, strict=True):
            prompt, _ = document.prompt_and_output()
            session = DecodingSession(
                scene.target, prompt, sampling=SamplingParams(), max_new_tokens=len(text)
            )
            session.run(ServingDrafter(loaded.drafter, policy, "v1"))
            rounds += len(session.rounds)
            rows += sum(r.verify_len for r in session.rounds)
            committed += sum(r.committed for r in session.rounds)
        result = walk(method, requests, UNIT, 1)
        assert result.acceptance_length == pytest.approx(committed / rounds), method.name
        assert result.verify_len == pytest.approx(rows / rounds), method.name
        if method.name == "survival":
            assert 1 < result.verify_len < BLOCK_SIZE and result.verify_len % 1


def oracle(seed: int, count: int = 24, length: int = 30) -> list[BlockTrace]:
    """Texts whose survival is known for certain: 1 for what will be accepted, 0 after it."""
    generator = np.random.default_rng(seed)
    traces = []
    for index in range(count):
        accepted = generator.integers(0, BLOCK_SIZE, length)
        accepted = np.minimum(accepted, np.arange(length, 0, -1) - 1)
        survival = (np.arange(BLOCK_SIZE - 1) < accepted[:, None]).astype(float)
        anchors = {5 + i: i for i in range(length)}
        traces.append(BlockTrace(f"d{index}", [(5, 5 + length)], anchors, accepted, None, survival))
    return traces


@pytest.mark.parametrize("load", [1, 4])
@pytest.mark.parametrize("row", [0.01, 0.2, 0.6])
def test_with_foresight_no_method_beats_the_joint_choice(load: int, row: float) -> None:
    costs = LinearCosts(fixed=1.0, row=row, draft=0.2)
    table = linear_costs(fixed=1.0, row=row, draft=0.2, block_size=BLOCK_SIZE)
    every = every_method(BLOCK_SIZE, length_head=False, acceptance_head=True, probe_every=10_000)
    assert {m.name for m in every} == {"plain", "fixed", "survival", "throughput"}
    requests = Requests.of(oracle(0), BLOCK_SIZE)
    rates = [(m.name, walk(m, requests, costs, load, table).tokens_per_s.point) for m in every]
    best = max(rate for name, rate in rates if name != "throughput")
    (joint,) = [rate for name, rate in rates if name == "throughput"]
    assert joint > 0.99 * best
    # what it learns in one walk is not known in the next
    assert table.observed == linear_costs(fixed=1.0, row=row, draft=0.2, block_size=BLOCK_SIZE).observed
    # plain decoding: one token for each request in one pass, without drafting
    (plain,) = [rate for name, rate in rates if name == "plain"]
    assert plain == pytest.approx(load / (1.0 + row * load))


def test_rounds_stay_full_and_every_text_is_served() -> None:
    """Five requests at a time over four texts of unlike length: the round's cost is shared, none goes idle."""
    traces = [*oracle(1, 3, 30), *oracle(2, 1, 90)]
    costs = LinearCosts(fixed=2.0, row=0.0, draft=0.0)
    result = walk(find("fixed", f"length {BLOCK_SIZE}"), Requests.of(traces, BLOCK_SIZE), costs, 5)
    # whatever the lengths, a full round of 2 s commits 5·τ tokens
    assert result.tokens_per_s.point == pytest.approx(5 * result.acceptance_length / 2.0)
    assert result.verify_len == BLOCK_SIZE
    with pytest.raises(UserError, match="no traced text has a round"):
        Requests.of([replace(traces[0], spans=[])], BLOCK_SIZE)


def test_texts_come_from_greedy_records_of_this_target_only(tmp_path: Path) -> None:
    def sampled(temperature: float) -> object:
        sampling = make_record().sampling
        return type(sampling)(temperature=temperature, top_p=1.0, top_k=0)

    writer = SpoolWriter(tmp_path)
    good = make_record()
    for record in (
        good,
        make_record(target_id="another"),
        make_record(sampling=sampled(0.7)),
        make_record(request_id="last"),
    ):
        writer.write(record)
    writer.close()
    before = sorted(p.name for p in tmp_path.rglob("*"))
    found = list(served_documents(tmp_path, good.target_id, 1000))
    assert [d.document_id for d in found] == [good.request_id, "last"]
    assert found[0].prompt_and_output() == (good.prompt_ids, good.output_ids)
    assert sorted(p.name for p in tmp_path.rglob("*")) == before, "no reader is left registered"


def test_a_sample_is_even_and_keeps_its_order() -> None:
    assert sample(iter(range(5)), 5, 0) == sample(iter(range(5)), 9, 3) == list(range(5))
    drawn = [sample(iter(range(20)), 5, seed) for seed in range(2000)]
    assert all(found == sorted(set(found)) and len(found) == 5 for found in drawn)
    assert drawn[7] == sample(range(20), 5, 7)
    # each of 20 is in a quarter of the samples: σ = 0.0097
    shares = np.bincount(np.concatenate(drawn), minlength=20) / 2000
    assert abs(shares - 0.25).max() < 0.045


def test_a_walk_measures_full_rounds_of_all_texts(requests: Requests) -> None:
    """From the first `load` answers on, not from an empty engine: `throughput` has calibrated by then."""
    costs = LinearCosts(fixed=1.0, row=0.1, draft=0.5)
    result = walk(find("fixed", "length 2"), requests, costs, 3)

    def rate(warm_up: int) -> float:
        outcome = serve(requests, FixedPolicy(2), costs, Traffic(3), warm_up=warm_up, finish=requests.count)
        return rate_interval(requests, outcome).point

    assert result.tokens_per_s.point == rate(3) != rate(0)


def test_costs_are_measured_as_far_as_prompts_leave_room(
    scene: Scene, loaded: LoadedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = max(len(prompt) for prompt in scene.prompts) + 20
    monkeypatch.setattr(scene.target.config, "max_position_embeddings", limit)
    bundle: Any = SimpleNamespace(target=scene.target)
    full = Document([1] * limit + [2, 2], [False] * limit + [True] * 2, "full")

    def measured(documents: Sequence[Document], max_new_tokens: int) -> StepCosts:
        return measure_costs(
            bundle, loaded.drafter, documents, (1, 2), rounds=8, max_new_tokens=max_new_tokens
        )

    costs = measured([*scene.documents, full], 1000)
    assert costs.observed == 16 and costs.known
    with pytest.raises(UserError, match=f"no prompt leaves room .* context of {limit}"):
        measured([full], 1000)
    with pytest.raises(UserError, match="answers of 1 tokens are too short to measure"):
        measured(scene.documents, 1)


def test_costs_are_read_back_or_refused(tmp_path: Path) -> None:
    costs = StepCosts()
    for rows in (1, 2, 8):
        costs.observe_verify(rows, 1, 1.0 + rows)
    costs.observe_draft(1, 0.5)
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(costs.to_json()))
    assert read_costs(file).verify_s([2, 5], 1).tolist() == costs.verify_s([2, 5], 1).tolist()
    for content in ("{", "[]", '{"verify": []}', '{"verify": [[1, 2]], "draft": []}'):
        file.write_text(content)
        with pytest.raises(UserError, match=r"--costs .*not a cost table"):
            read_costs(file)
    with pytest.raises(UserError, match="--costs"):
        read_costs(tmp_path / "absent")

"""Traces in a file, and traces of logged rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.length_head import LengthHead
from drafters.policies import FixedPolicy
from pipeline.block_traces import BlockTrace, trace_documents
from pipeline.simulation.record_traces import trace_of_record
from pipeline.simulation.requests import Requests
from pipeline.simulation.serving import serve
from pipeline.simulation.trace_file import FORMAT, TraceSet, load_traces, save_traces
from pipeline.simulation.traffic import Traffic
from serving_bridge.local_engine import LocalEngine, Request
from serving_bridge.records import VerificationRecord, committed_tokens, verification_rounds
from tests.drafters.policy_samples import random_acceptance_head
from tests.pipeline.cost_samples import LinearCosts
from tests.serving_bridge.record_samples import make_record, make_round
from tests.serving_bridge.tiny_serving import BLOCK_SIZE, NEW_TOKENS, Scene, make_scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene"), "llama")


@pytest.fixture(scope="module")
def traces(scene: Scene) -> list[BlockTrace]:
    plain = load_drafter(scene.first, dtype=scene.target.dtype)
    hidden = plain.drafter.config.hidden_size
    head = random_acceptance_head(hidden, BLOCK_SIZE, seed=3, weight=0.5)
    loaded = replace(plain, length_head=LengthHead(hidden, 8), acceptance_head=head)
    documents = [replace(d, domain=f"d{i % 2}") for i, d in enumerate(scene.documents)]
    return list(trace_documents(loaded, scene.target, documents))


def trace_set(traces: list[BlockTrace]) -> TraceSet:
    return TraceSet(traces, BLOCK_SIZE, "tiny@r0#0", "v1", "made up")


def same(a: BlockTrace, b: BlockTrace) -> bool:
    arrays = [(a.accepted_A, b.accepted_A), (a.ratio_A, b.ratio_A), (a.survival_AD, b.survival_AD)]
    return (a.document_id, a.spans, a.row_of, a.domain) == (
        b.document_id,
        b.spans,
        b.row_of,
        b.domain,
    ) and all(
        (x is None and y is None) or (x is not None and y is not None and np.array_equal(x, y))
        for x, y in arrays
    )


def test_a_file_gives_back_what_was_written(tmp_path: Path, traces: list[BlockTrace]) -> None:
    file = tmp_path / "traces.safetensors"
    save_traces(file, trace_set(traces))
    found = load_traces(file)
    assert all(same(a, b) for a, b in zip(found.traces, traces, strict=True))
    assert {t.domain for t in found.traces} == {"d0", "d1"}
    assert replace(found, traces=traces) == trace_set(traces)
    # without heads, and with two answers in a text
    (first, last) = traces[0].spans[0]
    bare = replace(traces[0], ratio_A=None, survival_AD=None, spans=[(first, first + 1), (first + 2, last)])
    bare = replace(bare, accepted_A=np.minimum(bare.accepted_A, 1))
    save_traces(file, trace_set([bare]))
    (back,) = load_traces(file).traces
    assert same(back, bare)
    assert not [p for p in tmp_path.iterdir() if p != file]


Arrays = dict[str, Any]


def spoil(file: Path, change: Callable[[Arrays, dict[str, str]], object], metadata: dict[str, str]) -> None:
    arrays, labels = load_file(file), dict(metadata)
    change(arrays, labels)
    save_file(arrays, file, labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, m: m.update(format="draftsmith-traces-9"), "format 'draftsmith-traces-9' is not"),
        (lambda a, m: m.pop("target_id"), "damaged .*target_id"),
        (lambda a, m: m.update(block_size="3"), "damaged .*survival has shape"),
        (lambda a, m: m.update(block_size="three"), "damaged"),
        (lambda a, m: m.update(document_ids="["), "damaged"),
        (lambda a, m: m.update(domains="[]"), "counts do not add up"),
        (lambda a, m: a.update(accepted=a["accepted"] + 4), "cannot have"),
        (lambda a, m: a.update(accepted=a["accepted"] - 9), "must hold counts"),
        (lambda a, m: a.update(accepted=a["accepted"].astype(np.float32)), "must hold counts"),
        (lambda a, m: a.update(anchors=a["anchors"] + 1), "counts do not add up"),
        (lambda a, m: a.update(spans=a["spans"] + 50), "no block at"),
        (lambda a, m: a.update(spans=a["spans"][:-1]), "spans has shape"),
        (lambda a, m: a.update(ratio=a["ratio"] * np.float32(np.nan)), "ratio has values outside"),
        (lambda a, m: a.update(more=a["ratio"]), "damaged"),
        (lambda a, m: a.pop("positions"), "damaged .*positions"),
    ],
)
def test_what_contradicts_itself_is_refused(
    tmp_path: Path, traces: list[BlockTrace], change: Callable[[Arrays, dict[str, str]], object], message: str
) -> None:
    file = tmp_path / "traces.safetensors"
    save_traces(file, trace_set(traces))
    ids = {"document_ids": json.dumps([t.document_id for t in traces])}
    labels = {"format": FORMAT, "block_size": str(BLOCK_SIZE), "target_id": "t", "drafter_version": "v"}
    labels |= {"source": "s", "domains": json.dumps([t.domain for t in traces])} | ids
    spoil(file, lambda a, m: None, labels)
    assert load_traces(file).target_id == "t"
    spoil(file, change, labels)
    with pytest.raises(UserError, match=f"--traces .*{message}"):
        load_traces(file)


def test_no_file_and_another_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no tensors")
    for name in ("absent", "text", "."):
        with pytest.raises(UserError, match=r"--traces .*not a file of traces"):
            load_traces(tmp_path / name)


@pytest.mark.parametrize("length", [None, 2])
def test_logged_rounds_are_traced_without_a_model(
    scene: Scene, traces: list[BlockTrace], length: int | None
) -> None:
    """Where serving began a round, a log tells what replay tells, whatever it let the target verify."""
    engine = LocalEngine(
        scene.target, scene.first, policy=lambda loaded: FixedPolicy(length), eos_ids=[], max_running=2
    )
    try:
        futures = [
            engine.submit(Request(f"r{i}", prompt, NEW_TOKENS)) for i, prompt in enumerate(scene.prompts)
        ]
        records = [future.result(60).record for future in futures]
    finally:
        engine.stop()
    logged = [trace_of_record(record) for record in records]
    for record, found, replayed in zip(records, logged, traces, strict=True):
        assert record.output_ids == scene.outputs[records.index(record)]
        assert found.spans == replayed.spans
        for this in record.rounds:
            assert (
                found.accepted_A[found.row_of[this.start]] == replayed.accepted_A[replayed.row_of[this.start]]
            )
    # served again with the lengths that served it, they give the rounds that the records count
    requests = Requests.of(logged, BLOCK_SIZE)
    outcome = serve(
        requests,
        FixedPolicy(length),
        LinearCosts(1.0, 0.0, 0.0),
        Traffic(1),
        warm_up=0,
        finish=requests.count,
    )
    assert outcome.blocks == sum(map(verification_rounds, records))
    assert outcome.committed == sum(map(committed_tokens, records))
    # 1.0 would be no drafts accepted at all
    assert outcome.acceptance_length > 1.2


def record(rounds: list[tuple[int, int, int]], output: list[int], **fields: Any) -> VerificationRecord:
    """Rounds of (start, verify_len, drafts of a block of 4 that are the text)."""
    text = [5, 6, 7, *output]
    made = []
    for start, verify_len, matching in rounds:
        drafts = [*text[start + 1 : start + 1 + matching], 99, 99, 99][:3]
        accepted = min(matching, verify_len - 1)
        made.append(replace_round(make_round(start, accepted, 4, verify_len), drafts))
    return make_record(output_ids=output, rounds=made, **fields)


def replace_round(this: Any, drafts: list[int]) -> Any:
    fields = {name: getattr(this, name) for name in this.__struct_fields__} | {"draft_ids": drafts}
    return type(this)(**fields)


def test_blocks_that_were_not_drafted_are_given_what_is_left_of_the_one_around_them() -> None:
    output = list(range(10, 20))
    # at 3 three drafts are the text, at 7 none, at 8 two and all of the rest; positions 3..12
    whole = trace_of_record(record([(3, 4, 3), (7, 4, 0), (8, 4, 2), (11, 4, 1)], output, domain="x"))
    assert whole.spans == [(3, 12)] and whole.domain == "x"
    assert [whole.accepted_A[whole.row_of[p]] for p in range(3, 12)] == [3, 2, 1, 0, 0, 2, 1, 0, 1]
    # verified to 2 slots only: the next round begins inside the block, and what it drafted is the nearer truth
    short = trace_of_record(record([(3, 2, 3), (5, 2, 0), (6, 2, 3)], output))
    assert short.spans == [(3, 10)]
    assert [short.accepted_A[short.row_of[p]] for p in range(3, 10)] == [3, 2, 0, 3, 2, 1, 0]
    # over a stretch decoded plainly the text goes on, as one request
    parted = trace_of_record(record([(3, 4, 1), (9, 4, 3)], output))
    assert parted.spans == [(3, 8)]
    assert [parted.accepted_A[parted.row_of[p]] for p in range(3, 8)] == [1, 0, 3, 2, 1]
    assert Requests.of([parted], 4).count == 1
    assert trace_of_record(make_record(rounds=[])).spans == []

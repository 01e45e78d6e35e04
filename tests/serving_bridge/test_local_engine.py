"""The embedded engine: lossless whatever is swapped, honest records, and failures that stay where they belong."""

from __future__ import annotations

import copy
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafters.branches import Budget
from drafters.checkpoint import LoadedDrafter, file_sha256, load_drafter, save_drafter
from drafters.d3d import D3DDrafter
from drafters.d3d_loss import d3d_loss
from drafters.errors import UserError
from drafters.lookahead import Lookahead
from drafters.objectives import LossSpec
from drafters.packing import pack_documents
from drafters.policies import FixedPolicy, LengthPolicy, Load
from drafters.replay import replay, total_acceptance_length
from drafters.verify import SamplingParams
from serving_bridge.local_engine import Completion, LocalEngine, Request, parameters_checksum
from serving_bridge.records import (
    VerificationRecord,
    committed_tokens,
    decode,
    encode,
    validate,
    verification_rounds,
)
from serving_bridge.server import DraftServer, SwapError
from serving_bridge.transport import BufferedWriter
from tests.serving_bridge.tiny_serving import (
    BLOCK_SIZE,
    NEW_TOKENS,
    PATIENCE,
    VOCAB,
    Gate,
    Scene,
    greedy,
    make_scene,
    tiny_drafter,
    tiny_target,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(params=["llama", "qwen3"])
def scene(request: pytest.FixtureRequest) -> Scene:
    return request.getfixturevalue(request.param)


def whole_blocks(loaded: LoadedDrafter) -> LengthPolicy:
    return FixedPolicy()


class Records:
    """A log that keeps what it is given."""

    def __init__(self) -> None:
        self.taken: list[VerificationRecord] = []
        self.dropped = 0

    @property
    def written(self) -> int:
        return len(self.taken)

    def write(self, record: VerificationRecord) -> bool:
        self.taken.append(record)
        return True

    def close(self) -> None:
        return


@pytest.fixture
def start() -> Iterator[Callable[..., LocalEngine]]:
    """Starts engines and stops them after the test."""
    engines: list[LocalEngine] = []

    def begin(scene: Scene, **settings: Any) -> LocalEngine:
        options: dict[str, Any] = {"policy": whole_blocks, "eos_ids": [], "max_running": 3} | settings
        engines.append(LocalEngine(scene.target, scene.first, **options))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.stop()


def submit_all(engine: LocalEngine, scene: Scene, count: int | None = None) -> list[Future[Completion]]:
    """The scene's requests `r0`, `r1`, …, or the first `count` of them."""
    return [engine.submit(Request(f"r{i}", p, NEW_TOKENS)) for i, p in enumerate(scene.prompts[:count])]


def results(futures: Sequence[Future[Completion]]) -> list[Completion]:
    return [future.result(PATIENCE) for future in futures]


def versions(record: VerificationRecord) -> list[str]:
    return [r.drafter_version for r in record.rounds]


def test_concurrent_requests_equal_greedy_generation(scene: Scene, start: Callable[..., LocalEngine]) -> None:
    completions = results(submit_all(start(scene), scene))
    assert [c.output_ids for c in completions] == scene.outputs
    accepted = sum(r.accepted for c in completions for r in c.record.rounds)
    assert accepted > 0  # else the cache is never cropped, and the test says little


@pytest.mark.parametrize("length", [1, 2, 3])
def test_shorter_verification_changes_rounds_not_output(
    llama: Scene, start: Callable[..., LocalEngine], length: int
) -> None:
    completions = results(submit_all(start(llama, policy=lambda loaded: FixedPolicy(length)), llama))
    assert [c.output_ids for c in completions] == llama.outputs
    assert {r.verify_len for c in completions for r in c.record.rounds} == {length}


def test_end_token_ends_the_output(llama: Scene, start: Callable[..., LocalEngine]) -> None:
    eos = llama.outputs[0][NEW_TOKENS // 2]
    engine = start(llama, eos_ids=[eos])
    for completion, prompt in zip(results(submit_all(engine, llama)), llama.prompts, strict=True):
        assert completion.output_ids == greedy(llama.target, prompt, eos=eos)
        ended = completion.output_ids[-1] == eos
        assert completion.record.finish_reason == ("stop" if ended else "length")


def test_swap_takes_effect_at_the_next_round_of_running_requests(
    scene: Scene, start: Callable[..., LocalEngine]
) -> None:
    gate, log = Gate(stop_before=4), Records()
    engine = start(scene, policy=gate.policy, writer=log)
    server: DraftServer = engine
    target_before = parameters_checksum(scene.target.model)
    futures = submit_all(engine, scene)
    assert gate.reached.wait(PATIENCE)

    report = server.swap(scene.second)
    assert server.drafter_version == "v2"
    gate.open.set()
    completions = results(futures)

    assert [c.output_ids for c in completions] == scene.outputs
    assert (report.old_version, report.new_version) == ("v1", "v2")
    assert report.target_checksum == target_before == parameters_checksum(scene.target.model)
    loaded = load_drafter(scene.second, dtype=scene.target.dtype)
    assert report.draft_checksum == parameters_checksum(loaded.drafter)
    served = {c.request.request_id: versions(c.record) for c in completions}
    for name in ("r0", "r1", "r2"):  # the three that ran during the swap
        assert set(served[name]) == {"v1", "v2"}
        assert served[name] == sorted(served[name])
    # 4 rounds before the swap, and the one it found under way
    # 4 rounds before the swap, and the one it found under way
    assert sum(names.count("v1") for names in served.values()) == sum(gate.blocks[:5])
    for record in log.taken:
        validate(record)


def test_swapping_all_the_time_changes_nothing_in_the_output(
    llama: Scene, start: Callable[..., LocalEngine]
) -> None:
    engine = start(llama)
    done = threading.Event()
    swaps = 0

    def keep_swapping() -> None:
        nonlocal swaps
        while not done.wait(0.005):
            engine.swap((llama.second, llama.first)[swaps % 2])
            swaps += 1

    swapper = threading.Thread(target=keep_swapping)
    swapper.start()
    try:
        completions = results([f for _ in range(2) for f in submit_all(engine, llama)])
    finally:
        done.set()
        swapper.join(PATIENCE)
    assert [c.output_ids for c in completions] == llama.outputs * 2
    assert swaps > 1
    assert any(len(set(versions(c.record))) == 2 for c in completions)


def test_drafting_ahead_while_drafters_are_swapped(
    llama: Scene, start: Callable[..., LocalEngine], tmp_path: Path
) -> None:
    """Two D3D drafters of the target's own weights, one of them learnt a little, four requests at a time."""
    config = copy.deepcopy(llama.target.config)
    config.d3d_config = {"block_size": BLOCK_SIZE, "mask_token_id": VOCAB - 1}
    directories = []
    for name, steps in (("a", 30), ("b", 5)):
        lm = AutoModelForCausalLM.from_config(config).float()
        lm.load_state_dict(llama.target.model.state_dict())
        drafter = D3DDrafter(lm)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
        batch = pack_documents(llama.documents, anchors_per_document=0, anchor_source="all")
        for _ in range(steps):
            optimizer.zero_grad()
            d3d_loss(drafter(batch), drafter.head_VH, batch, LossSpec()).value.backward()
            optimizer.step()
        identity = llama.target.identity
        directories.append(
            save_drafter(
                tmp_path / name, drafter, identity=identity, drafter_version=name, dtype=torch.float32
            )
        )
    log, swaps, done = Records(), 0, threading.Event()
    with Lookahead(Budget(BLOCK_SIZE, 2)) as lookahead:
        engine = start(replace(llama, first=directories[0]), writer=log, max_running=4, lookahead=lookahead)

        def keep_swapping() -> None:
            nonlocal swaps
            while not done.wait(0.02):
                swaps += 1
                engine.swap(directories[swaps % 2])

        swapper = threading.Thread(target=keep_swapping)
        swapper.start()
        try:
            completions = results([f for _ in range(2) for f in submit_all(engine, llama)])
        finally:
            done.set()
            swapper.join(PATIENCE)
        engine.stop()
    assert [c.output_ids for c in completions] == llama.outputs * 2
    assert swaps > 1 and any(len(set(versions(c.record))) == 2 for c in completions)
    rounds = [r for record in log.taken for r in record.rounds]
    # a swap drops what the old drafter had prepared
    assert 1 < sum(r.prepared for r in rounds) <= lookahead.stats.hits
    assert any(not r.prepared for r in rounds)
    for record in log.taken:
        assert decode(encode(record)) == record


def rewrite(directory: Path, **files: Any) -> None:
    """Make the manifest fit the directory's files again."""
    path = directory / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {name: file_sha256(directory / name) for name in manifest["files"]}
    path.write_text(json.dumps(manifest | files))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    rewrite(directory)


def flip_a_bit(directory: Path, scene: Scene) -> None:
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (directory / "model.safetensors").write_bytes(weights)


def put_nan(directory: Path, scene: Scene) -> None:
    change_tensors(directory, lambda tensors: next(iter(tensors.values())).view(-1)[:1].fill_(float("nan")))


def drop_tensor(directory: Path, scene: Scene) -> None:
    change_tensors(directory, lambda tensors: tensors.pop("fc.weight"))


def add_tensor(directory: Path, scene: Scene) -> None:
    change_tensors(directory, lambda tensors: tensors.update(surplus=torch.zeros(2)))


def other_target(directory: Path, scene: Scene) -> None:
    rewrite(directory, target=replace(scene.target.identity, revision="r1").to_json())


def other_tokenizer(directory: Path, scene: Scene) -> None:
    rewrite(directory, target=replace(scene.target.identity, tokenizer_hash="f" * 16).to_json())


def other_layers(directory: Path, scene: Scene) -> None:
    elsewhere = tiny_target(layer_ids=(0, 2, 3))
    save_drafter(
        directory, tiny_drafter(elsewhere, seed=5), identity=scene.target.identity, drafter_version="bad"
    )


def other_block_size(directory: Path, scene: Scene) -> None:
    longer = tiny_drafter(scene.target, seed=5, block_size=6)
    save_drafter(directory, longer, identity=scene.target.identity, drafter_version="bad")


def nonsense_config(directory: Path, scene: Scene) -> None:
    (directory / "config.json").write_text("[]")
    rewrite(directory)


def absent(directory: Path, scene: Scene) -> None:
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (flip_a_bit, "checksum"),
        (put_nan, "not finite"),
        (drop_tensor, "fc.weight"),
        (add_tensor, "surplus"),
        (other_target, "r1"),
        (other_tokenizer, "tokenizer"),
        (other_layers, r"\[0, 2, 3\]"),
        (other_block_size, "block size 6"),
        (nonsense_config, ""),
        (absent, "manifest.json"),
    ],
)
def test_bad_checkpoint_is_refused_and_the_old_drafter_goes_on(
    spoil: Callable[[Path, Scene], None],
    named: str,
    llama: Scene,
    start: Callable[..., LocalEngine],
    tmp_path: Path,
) -> None:
    bad = shutil.copytree(llama.second, tmp_path / "bad")
    spoil(bad, llama)
    gate = Gate(stop_before=4)
    engine = start(llama, policy=gate.policy)
    futures = submit_all(engine, llama, 2)
    assert gate.reached.wait(PATIENCE)
    with pytest.raises(SwapError, match=f"still serving v1.*{named}"):
        engine.swap(bad)
    assert engine.drafter_version == "v1"
    gate.open.set()
    completions = results(futures)
    assert [c.output_ids for c in completions] == llama.outputs[:2]
    assert {v for c in completions for v in versions(c.record)} == {"v1"}
    assert engine.swap(llama.second).new_version == "v2"


def test_a_policy_that_cannot_be_made_refuses_the_swap(
    llama: Scene, start: Callable[..., LocalEngine]
) -> None:
    def only_v1(loaded: LoadedDrafter) -> LengthPolicy:
        if loaded.drafter_version != "v1":
            raise ZeroDivisionError("no policy")
        return FixedPolicy()

    engine = start(llama, policy=only_v1)
    with pytest.raises(SwapError, match="no policy"):
        engine.swap(llama.second)
    assert results(submit_all(engine, llama, 1))[0].output_ids == llama.outputs[0]


def test_a_swap_that_finds_another_target_is_undone(llama: Scene, start: Callable[..., LocalEngine]) -> None:
    engine = start(llama)
    weight = llama.target.model.model.norm.weight
    with torch.no_grad():
        weight[0] += 1
        try:
            with pytest.raises(SwapError, match="target's weights changed"):
                engine.swap(llama.second)
        finally:
            weight[0] -= 1
    assert engine.drafter_version == "v1"
    assert engine.swap(llama.second).old_version == "v1"


def test_an_engine_does_not_start_with_another_targets_drafter(llama: Scene, tmp_path: Path) -> None:
    bad = shutil.copytree(llama.first, tmp_path / "bad")
    other_target(bad, llama)
    with pytest.raises(UserError, match="r1"):
        LocalEngine(llama.target, bad, policy=whole_blocks, eos_ids=[])


def test_records_are_valid_and_their_acceptance_length_is_the_replays(
    scene: Scene, start: Callable[..., LocalEngine]
) -> None:
    log = Records()
    completions = results(submit_all(start(scene, writer=log), scene))
    assert {r.request_id for r in log.taken} == {f"r{i}" for i in range(len(scene.prompts))}
    for record in log.taken:
        validate(record)
        assert decode(encode(record)) == record
    loaded = load_drafter(scene.first, dtype=scene.target.dtype)
    replayed = replay(loaded.drafter, scene.target, scene.documents)
    records = [c.record for c in completions]
    live = sum(map(committed_tokens, records)) / sum(map(verification_rounds, records))
    assert live == total_acceptance_length(replayed)
    assert [[r.start for r in record.rounds] for record in records] == [r.round_starts for r in replayed]


def test_record_carries_what_the_request_said(llama: Scene, start: Callable[..., LocalEngine]) -> None:
    sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=5)
    request = Request("a", llama.prompts[0], 9, sampling, conversation_key="talk", domain="code")
    engine = start(llama)
    first, again = results([engine.submit(request), engine.submit(request)])
    record = first.record
    assert first.output_ids == again.output_ids and len(first.output_ids) == 9
    assert (record.conversation_key, record.domain, record.length_policy) == ("talk", "code", "fixed")
    assert record.target_id == llama.target.identity.target_id
    found = record.sampling
    assert (found.temperature, found.top_p, found.top_k, found.seed) == (0.7, 0.9, 20, 5)
    plain = engine.submit(Request("b", llama.prompts[0], 9)).result(PATIENCE).record
    assert plain.conversation_key == "b" and plain.sampling.temperature == 0


class StuckSink:
    """A record log that hangs until it is let go."""

    def __init__(self) -> None:
        self.entered, self.free = threading.Event(), threading.Event()
        self.taken: list[str] = []

    def write(self, record: VerificationRecord) -> bool:
        self.entered.set()
        assert self.free.wait(PATIENCE)
        self.taken.append(record.request_id)
        return True

    def maybe_roll(self) -> bool:
        return False

    def roll(self) -> bool:
        return True

    def close(self) -> None:
        return


def test_a_log_that_hangs_or_drops_holds_up_no_request(
    llama: Scene, start: Callable[..., LocalEngine]
) -> None:
    sink = StuckSink()
    writer = BufferedWriter(sink, capacity=2)
    engine = start(llama, writer=writer)
    assert engine.submit(Request("stuck", llama.prompts[0], NEW_TOKENS)).result(PATIENCE)
    assert sink.entered.wait(PATIENCE)
    completions = results(submit_all(engine, llama))
    assert [c.output_ids for c in completions] == llama.outputs
    assert writer.dropped == len(llama.prompts) - 2 and writer.written == 0
    sink.free.set()
    assert writer.close(PATIENCE)
    assert len(sink.taken) == 3


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request("bad", [], 4), "empty"),
        (Request("bad", [1] * 120, 40), "context of 128"),
        (Request("bad", [1, 2], 0), "max_new_tokens"),
        (Request("bad", [1, 10**6], 4), "1000000"),
    ],
)
def test_a_request_that_cannot_be_served_fails_alone(
    request_: Request, named: str, llama: Scene, start: Callable[..., LocalEngine]
) -> None:
    log = Records()
    engine = start(llama, writer=log)
    before = submit_all(engine, llama, 2)
    bad = engine.submit(request_)
    after = submit_all(engine, llama, 2)
    with pytest.raises(UserError, match=named):
        bad.result(PATIENCE)
    assert [c.output_ids for c in results(before + after)] == llama.outputs[:2] * 2
    assert "bad" not in {r.request_id for r in log.taken}


def test_a_failure_in_a_round_fails_its_requests_and_no_others(
    llama: Scene, start: Callable[..., LocalEngine]
) -> None:
    class FailsOnce(FixedPolicy):
        def verify_len(
            self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load
        ) -> torch.Tensor:
            calls.append(load.running)
            if len(calls) == 5:
                raise RuntimeError("out of memory")
            return super().verify_len(hidden_NBH, embeddings_NBH, load)

    calls: list[int] = []
    futures = submit_all(start(llama, policy=lambda loaded: FailsOnce()), llama)
    for future in futures:
        future.exception(PATIENCE)
    failed = [i for i, future in enumerate(futures) if future.exception() is not None]
    assert failed == [0, 1, 2]
    with pytest.raises(RuntimeError, match="out of memory"):
        futures[0].result()
    assert [f.result().output_ids for f in futures[3:]] == llama.outputs[3:]
    assert max(calls) == 3 and min(calls) >= 1  # the policy hears how many run


def test_requests_withdrawn_by_their_callers_disturb_nobody(
    llama: Scene, start: Callable[..., LocalEngine]
) -> None:
    gate, log = Gate(stop_before=2), Records()
    engine = start(llama, policy=gate.policy, writer=log)
    futures = submit_all(engine, llama)
    assert gate.reached.wait(PATIENCE)
    assert futures[1].cancel() and futures[3].cancel()  # one running, one waiting
    gate.open.set()
    kept = [0, 2, 4]
    assert [futures[i].result(PATIENCE).output_ids for i in kept] == [llama.outputs[i] for i in kept]
    assert sorted(r.request_id for r in log.taken) == [f"r{i}" for i in kept]


def test_stop_finishes_running_requests_and_cancels_waiting_ones(
    llama: Scene, start: Callable[..., LocalEngine]
) -> None:
    gate = Gate(stop_before=3)
    engine = start(llama, policy=gate.policy, max_running=2)
    futures = submit_all(engine, llama)
    assert gate.reached.wait(PATIENCE)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    for future in futures[2:]:
        with pytest.raises(CancelledError):
            future.result(PATIENCE)
    assert not futures[0].done()
    gate.open.set()
    stopper.join(PATIENCE)
    assert not stopper.is_alive()
    assert [f.result(0).output_ids for f in futures[:2]] == llama.outputs[:2]
    with pytest.raises(RuntimeError, match="stopped"):
        engine.submit(Request("late", [1], 2))


def test_swap_of_an_idle_engine_and_waiting_for_work(llama: Scene, start: Callable[..., LocalEngine]) -> None:
    engine = start(llama)
    for directory in (llama.second, llama.first, llama.second):
        engine.swap(directory)
    time.sleep(0.05)
    (completion,) = results([engine.submit(Request("a", llama.prompts[0], NEW_TOKENS))])
    assert set(versions(completion.record)) == {"v2"}
    assert completion.seconds > 0


def test_checksum_covers_every_byte_and_name(llama: Scene) -> None:
    drafter = tiny_drafter(llama.target, seed=9)
    before = parameters_checksum(drafter)
    assert parameters_checksum(tiny_drafter(llama.target, seed=9)) == before
    state = drafter.state_dict()
    last = sorted(state)[-1]
    with torch.no_grad():
        state[last].view(-1)[-1] += 1e-6
    assert before not in (parameters_checksum(drafter), parameters_checksum(drafter.bfloat16()))

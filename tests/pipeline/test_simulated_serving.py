"""A simulated engine gives the timeline that counting by hand gives, and decodes what the real one decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.checkpoint import LoadedDrafter, load_drafter
from drafters.decoding import DecodingSession, ServingDrafter, decode_round
from drafters.length_head import LengthHead
from drafters.policies import AdaFlashPolicy, FixedPolicy, LengthPolicy, Load, RoundTiming
from drafters.step_cost import StepCosts
from drafters.survival_policy import SurvivalPolicy
from drafters.verify import SamplingParams
from pipeline.block_traces import BlockTrace, trace_documents
from pipeline.simulation.costs import TableCosts
from pipeline.simulation.methods import PLAIN, PlainPolicy, every_method
from pipeline.simulation.requests import Requests
from pipeline.simulation.serving import Outcome, SimulatedRound, serve
from pipeline.simulation.traffic import Arrivals, Traffic
from tests.drafters.policy_samples import random_acceptance_head
from tests.pipeline.cost_samples import LinearCosts
from tests.serving_bridge.tiny_serving import BLOCK_SIZE, Scene, make_scene

B = 4


def text(name: str, first: int, accepted: list[int], ratio: list[float], survival: list[float]) -> BlockTrace:
    """A text with a round at each of these anchors; S of a block is `survival`, that squared, that cubed."""
    count = len(accepted)
    return BlockTrace(
        name,
        [(first, first + count)],
        {first + i: i for i in range(count)},
        np.minimum(accepted, count - np.arange(count)),
        np.asarray(ratio),
        np.asarray(survival)[:, None] ** np.arange(1, B),
    )


def random_texts(seed: int, count: int = 7) -> list[BlockTrace]:
    generator = np.random.default_rng(seed)
    found = []
    for index in range(count):
        tokens = int(generator.integers(1, 9))
        found.append(
            text(
                f"t{index}",
                int(generator.integers(0, 5)),
                generator.integers(0, B, tokens).tolist(),
                generator.random(tokens).astype(np.float32).tolist(),
                generator.random(tokens).astype(np.float32).tolist(),
            )
        )
    return found


def watched(
    requests: Requests, policy: LengthPolicy, costs: object, traffic: Traffic, **limits: int
) -> tuple[Outcome, list[SimulatedRound]]:
    rounds: list[SimulatedRound] = []
    outcome = serve(requests, policy, costs, traffic, watch=rounds.append, **limits)  # type: ignore[arg-type]
    return outcome, rounds


def test_a_tiny_timeline_by_hand() -> None:
    """Two clients, two texts of 5 and 3 tokens, lengths ⌊4·â⌋, seconds from a table that was measured."""
    long = text("long", 2, [1, 3, 0, 1, 0], [0.5, 0.9, 1.0, 0.75, 0.25], [0.0] * 5)
    short = text("short", 3, [0, 2, 0], [1.0, 0.75, 0.5], [0.0] * 3)
    requests = Requests.of([long, short], B)
    table = StepCosts()
    # a pass of 2 requests: 1 s, and 0.25 s for each row from the fifth on
    for rows, seconds in ((2, 1.0), (4, 1.0), (5, 1.25), (6, 1.5), (7, 1.75), (8, 2.0)):
        table.observe_verify(rows, 2, seconds)
    table.observe_draft(2, 0.5)
    assert requests.length_head is not None
    policy = AdaFlashPolicy(requests.length_head)
    outcome, rounds = watched(requests, policy, TableCosts(table), Traffic(2), warm_up=0, finish=3)
    seen = [
        sorted(
            zip(r.requests_R.tolist(), r.lengths_R.tolist(), r.committed_R.tolist(), strict=True),
        )
        for r in rounds
    ]
    # the client that is done takes the next text in order, which may be the long one or the short
    order = [request for request, _ in Arrivals(Traffic(2), 2).take(0.0, 4)]
    third = order[2]
    # long: 2 of 4 slots, 1 draft accepted: 2 tokens; then 4 of 4 with none accepted; then 3 of 4 with 1: the end
    # short: 4 of 4 with none accepted; then 3 of 4 with both: at the end
    start = [(0, 2, 2), (1, 4, 1)]
    second = [(0, 4, 1), (1, 3, 2)]
    assert seen[:2] == [start, second]
    fresh = (0, 2, 2) if third == 0 else (1, 4, 1)
    assert seen[2] == sorted([(0, 3, 2), fresh])
    rows = [6, 7, 3 + fresh[1]]
    durations = [0.5 + {5: 1.25, 6: 1.5, 7: 1.75}[n] for n in rows]
    assert [r.began_s for r in rounds[:4]] == pytest.approx(
        np.cumsum([0.0, *durations])[: len(rounds)].tolist()
    )
    # the short text is answered after two rounds, the long one after three, whoever is third later
    assert outcome.latency_s[:2] == pytest.approx([sum(durations[:2]), sum(durations)])
    assert outcome.rows == sum(r.lengths_R.sum() for r in rounds)


def reference(
    traces: list[BlockTrace],
    lengths_of: Callable[[BlockTrace, int], int],
    cost: Callable[[int, int], float],
    traffic: Traffic,
    finish: int,
) -> tuple[list[float], float, int, int, int]:
    """The same in plain Python: latencies, seconds, committed, rows, blocks."""
    arrivals = Arrivals(traffic, len(traces))
    running: list[list[float]] = []  # request, committed so far, time of arrival
    now, latencies, committed, rows, blocks = 0.0, [], 0, 0, 0
    while len(latencies) < finish:
        if not running:
            now = max(now, arrivals.next_s)
        running += [[r, 0, at] for r, at in arrivals.take(now, traffic.concurrency - len(running))]
        used = 0
        for entry in running:
            trace = traces[int(entry[0])]
            first, last = trace.spans[0]
            place = first + int(entry[1])
            length = lengths_of(trace, place)
            step = min(min(int(trace.accepted_A[trace.row_of[place]]), length - 1) + 1, last - place)
            entry[1] += step
            committed, used, blocks = committed + step, used + length, blocks + 1
        now += cost(used, len(running))
        rows += used
        for entry in running:
            first, last = traces[int(entry[0])].spans[0]
            if first + entry[1] == last:
                latencies.append(now - entry[2])
        running = [e for e in running if traces[int(e[0])].spans[0][0] + e[1] < traces[int(e[0])].spans[0][1]]
    return latencies, now, committed, rows, blocks


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("load", [1, 2, 5, 16])
def test_every_policy_against_plain_python(seed: int, load: int) -> None:
    traces = random_texts(seed)
    requests = Requests.of(traces, B)
    costs = LinearCosts(fixed=1.0, row=0.25, draft=0.125)
    assert requests.length_head is not None and requests.acceptance_head is not None

    def ratio(trace: BlockTrace, place: int) -> int:
        assert trace.ratio_A is not None
        return max(1, min(B, int(trace.ratio_A[trace.row_of[place]] * 1.5 * B + 1e-6)))

    def above(trace: BlockTrace, place: int) -> int:
        assert trace.survival_AD is not None
        return 1 + int((trace.survival_AD[trace.row_of[place]].astype(np.float32) >= np.float32(0.3)).sum())

    cases: list[tuple[LengthPolicy, Callable[[BlockTrace, int], int], float]] = [
        (FixedPolicy(), lambda trace, place: B, 0.125),
        (FixedPolicy(2), lambda trace, place: 2, 0.125),
        (PlainPolicy(), lambda trace, place: 1, 0.0),
        (AdaFlashPolicy(requests.length_head, 1.5), ratio, 0.125),
        (SurvivalPolicy(requests.acceptance_head, 0.3), above, 0.125),
    ]
    for rate in (None, 0.2, 3.0):
        traffic = Traffic(load, rate, seed=seed)
        for policy, lengths_of, draft in cases:
            finish = 3 * len(traces)
            outcome, rounds = watched(requests, policy, costs, traffic, warm_up=0, finish=finish)
            latencies, now, committed, rows, blocks = reference(
                traces,
                lengths_of,
                lambda used, count, draft=draft: draft + 1.0 + 0.25 * used,  # type: ignore[misc]
                traffic,
                finish,
            )
            assert outcome.latency_s == pytest.approx(latencies), policy.name
            assert outcome.seconds == pytest.approx(now)
            assert (outcome.committed, outcome.rows, outcome.blocks) == (committed, rows, blocks)
            # the clock that requests share is the clock of the rounds, and idle time is nobody's
            busy = sum((r.draft_s or 0.0) + r.verify_s for r in rounds)
            assert outcome.seconds_Q.sum() == pytest.approx(busy) and busy <= outcome.seconds + 1e-9


@pytest.mark.parametrize("load", [1, 3, 12])
def test_rows_and_tokens_are_conserved(load: int) -> None:
    """Also with a policy that mixes drafted and plain rounds: every answer is whole, every row is paid for once."""
    requests = Requests.of(random_texts(3, 20), B)
    methods = every_method(B, length_head=True, acceptance_head=True, probe_every=5)
    assert {m.name for m in methods} == {"plain", "fixed", "adaflash", "survival", "throughput"}
    for method in methods:
        costs = LinearCosts(fixed=0.1, row=0.2, draft=1.0)
        outcome, rounds = watched(
            requests, method.make(requests), costs, Traffic(load), warm_up=load, finish=60
        )
        assert [w.rows for w in costs.verified] == [int(r.lengths_R.sum()) for r in rounds]
        assert all(w.head_rows == w.rows and w.requests == load for w in costs.verified)
        assert sum(r.draft_s is not None for r in rounds) == len(costs.drafted)
        served = np.zeros(requests.count)
        for r in rounds:
            np.add.at(served, r.requests_R, r.committed_R)
        # all but what is under way at the end has been committed as often as it was asked
        lengths = requests.end_Q - requests.first_Q
        assert (served % lengths != 0).sum() <= load
        assert outcome.committed == outcome.committed_Q.sum() < served.sum()
        if method.name == "throughput" and load == 12:
            # drafting costs more than it brings: it is left but for probes
            assert 0 < outcome.drafted < 0.7 * outcome.rounds
        if method.name == "plain":
            assert outcome.drafted == 0 and outcome.rows == outcome.blocks == outcome.committed


def test_one_client_and_a_constant_cost_give_replay_arithmetic() -> None:
    traces = random_texts(1, 12)
    requests = Requests.of(traces, B)
    committed = rounds = 0
    for trace in traces:
        (first, last), place = trace.spans[0], trace.spans[0][0]
        while place < last:
            place += min(int(trace.accepted_A[trace.row_of[place]]) + 1, last - place)
            rounds += 1
        committed += last - first
    costs = LinearCosts(fixed=2.0, row=0.0, draft=0.5)
    # measured after a first answer, over as many as there are: each text once
    outcome = serve(requests, FixedPolicy(), costs, Traffic(1, seed=9), warm_up=1, finish=requests.count)
    assert outcome.acceptance_length == committed / rounds
    assert outcome.tokens_per_s == pytest.approx(committed / rounds / 2.5)
    plain = serve(requests, PLAIN.make(requests), costs, Traffic(1), warm_up=1, finish=requests.count)
    assert plain.tokens_per_s == pytest.approx(1 / 2.0)


def test_the_seed_decides_order_and_arrivals() -> None:
    requests = Requests.of(random_texts(2), B)

    def timeline(seed: int, rate: float | None) -> list[tuple[float, list[int]]]:
        traffic = Traffic(2, rate, seed=seed)
        _, rounds = watched(requests, FixedPolicy(), LinearCosts(1.0, 0.1, 0.1), traffic, warm_up=2, finish=9)
        return [(r.began_s, r.requests_R.tolist()) for r in rounds]

    for rate in (None, 0.5):
        assert timeline(5, rate) == timeline(5, rate)
        assert timeline(5, rate) != timeline(6, rate)


class Listening:
    """Drafts in the rounds that a pattern of d's and p's says, and keeps what it is told."""

    name = "listening"

    def __init__(self, pattern: str = "ddp") -> None:
        self.pattern = pattern
        self.loads: list[int] = []
        self.told: list[RoundTiming] = []

    def wants_draft(self, load: Load) -> bool:
        self.loads.append(load.running)
        return self.pattern[(len(self.loads) - 1) % len(self.pattern)] == "d"

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        assert load.running == self.loads[-1]
        return torch.full((len(hidden_NBH),), B)

    def observe(self, timing: RoundTiming) -> None:
        self.told.append(timing)


def test_new_prompts_are_read_in_a_round_of_which_policies_are_not_told() -> None:
    traces = [text("a", 10, [0] * 6, [0.5] * 6, [0.5] * 6), text("b", 7, [0] * 2, [0.5] * 2, [0.5] * 2)]
    requests = Requests.of(traces, B)
    policy, costs = Listening(), LinearCosts(fixed=0.0, row=1.0, draft=100.0)
    outcome, rounds = watched(requests, policy, costs, Traffic(2, prompts=True), warm_up=0, finish=3)
    # both prompts, and no draft
    assert costs.verified[0].rows == 17 and costs.verified[0].head_rows == 2 and costs.verified[0].keys == 0
    assert costs.verified[0].pairs == 10 * 11 // 2 + 7 * 8 // 2
    assert rounds[0].draft_s is None and len(rounds[0].lengths_R) == 0
    # the first drafting pass reads what the prompts left, and the policy hears nothing of its cost
    assert costs.drafted[0].unread == 17 and costs.drafted[0].keys == 17
    assert policy.told[0].draft_s is None and policy.told[0].rows == 2 * B
    assert policy.told[1].draft_s == 100.0 and policy.told[1].rows == 2 * B
    assert [t.committed for t in policy.told[:2]] == [2, 2]
    # b is over after two rounds and another prompt is read beside a's round; then there is no report
    with_prompt = [w for w in costs.verified if w.rows not in (2, 2 * B)]
    assert len(policy.told) == len(rounds) - len(with_prompt) and len(with_prompt) >= 2
    assert set(policy.loads) == {2}
    assert outcome.first_token_s[0] == 17.0 and min(outcome.latency_s) > 17.0


def test_the_first_token_waits_for_a_place() -> None:
    """Answers of one token each, one at a time, asked faster than answered: all but the round itself is waiting."""
    requests = Requests.of([text(f"t{i}", 3, [0], [0.5], [0.5]) for i in range(4)], B)
    costs = LinearCosts(fixed=2.0, row=0.0, draft=1.0)
    outcome = serve(requests, FixedPolicy(), costs, Traffic(1, rate=1.0), warm_up=0, finish=12)
    waited = np.asarray(outcome.first_token_s)
    assert waited == pytest.approx(np.asarray(outcome.latency_s) - 3.0)
    assert waited[0] == 0.0 and waited.max() > 3.0


def test_drafting_after_a_plain_round_catches_up() -> None:
    requests = Requests.of([text("a", 3, [0] * 12, [0.5] * 12, [0.5] * 12)], B)
    policy, costs = Listening(), LinearCosts(fixed=0.0, row=1.0, draft=1.0)
    serve(requests, policy, costs, Traffic(1), warm_up=0, finish=1)
    # drafted, drafted, plain, drafted, …: one token each, read by the drafter when it next drafts
    assert [w.unread for w in costs.drafted] == [0, 1, 2, 1, 2, 1, 2, 1]
    assert [w.keys for w in costs.drafted] == [3, 4, 6, 7, 9, 10, 12, 13]
    assert [t.rows for t in policy.told] == [B, B, 1] * 4


def random_length_head(hidden_size: int) -> LengthHead:
    """A head whose answers differ from block to block."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = LengthHead(hidden_size, 8)
    with torch.no_grad():
        head.out.weight.mul_(8.0)
    return head


def decoded(
    scene: Scene, serving: ServingDrafter, order: list[int], rounds: int
) -> list[list[tuple[int, int, int]]]:
    """(text, verify_len, committed) of each request in rounds of two by `decode_round`."""
    waiting, running, found = iter(order), list[tuple[int, DecodingSession]](), []
    for _ in range(rounds):
        while len(running) < 2:
            index = next(waiting)
            prompt, output = scene.documents[index].prompt_and_output()
            session = DecodingSession(
                scene.target, prompt, sampling=SamplingParams(), max_new_tokens=len(output)
            )
            running.append((index, session))
        begun = [(index, session) for index, session in running if session.begun]
        assert not decode_round([session for _, session in running], serving)
        found.append([(i, s.rounds[-1].verify_len, s.rounds[-1].committed) for i, s in begun])
        running = [(index, session) for index, session in running if not session.finished]
    return found


@pytest.mark.parametrize("pattern", ["ddp", "ddppppppp", "d"])
def test_a_policy_is_asked_and_told_the_same_by_both_engines(tmp_path: Path, pattern: str) -> None:
    """Loads, requests, rows and tokens, and whether drafting was as dear as it mostly is, after gaps short and long."""
    scene = make_scene(tmp_path, "llama")
    loaded = load_drafter(scene.first, dtype=scene.target.dtype)
    requests = Requests.of(list(trace_documents(loaded, scene.target, scene.documents)), BLOCK_SIZE)
    traffic = Traffic(2, prompts=True, seed=4)
    order = [request for request, _ in Arrivals(traffic, requests.count).take(0.0, 40)]
    simulated, real = Listening(pattern), Listening(pattern)
    _, rounds = watched(
        requests, simulated, LinearCosts(1.0, 0.1, 0.1), traffic, warm_up=0, finish=2 * requests.count
    )
    decoded(scene, ServingDrafter(loaded.drafter, real, "v1"), order, len(rounds))

    def told(policy: Listening) -> list[tuple[int, int, bool, int | None]]:
        return [(t.requests, t.rows, t.draft_s is None, t.committed) for t in policy.told]

    assert simulated.loads == real.loads
    assert told(simulated) == told(real)
    assert {t.draft_s is None for t in real.told} == {True, False}
    assert len(real.told) > 10


def test_a_simulated_engine_decodes_what_the_real_one_does(tmp_path: Path) -> None:
    """Texts of two requests at a time by `decode_round`, with a γ that depends on how many run, against their simulation."""
    scene = make_scene(tmp_path, "llama")
    plain = load_drafter(scene.first, dtype=scene.target.dtype)
    hidden = plain.drafter.config.hidden_size
    loaded: LoadedDrafter = replace(
        plain,
        length_head=random_length_head(hidden),
        acceptance_head=random_acceptance_head(hidden, BLOCK_SIZE, seed=3, weight=0.5),
    )
    assert loaded.length_head is not None and loaded.acceptance_head is not None
    requests = Requests.of(list(trace_documents(loaded, scene.target, scene.documents)), BLOCK_SIZE)
    traffic = Traffic(2, prompts=True, seed=4)
    order = [request for request, _ in Arrivals(traffic, requests.count).take(0.0, 40)]
    pairs: list[tuple[LengthPolicy, LengthPolicy]] = []
    for make in (
        lambda length, acceptance: AdaFlashPolicy(length, 0.5, gamma_by_load={2: 1.7}),
        lambda length, acceptance: SurvivalPolicy(acceptance, 0.1, threshold_by_load={2: 0.4}),
    ):
        pairs.append(
            (
                make(loaded.length_head, loaded.acceptance_head),
                make(requests.length_head, requests.acceptance_head),
            )
        )
    for real, simulated in pairs:
        rounds: list[SimulatedRound] = []
        finish = requests.count
        serve(
            requests,
            simulated,
            LinearCosts(1.0, 0.1, 0.1),
            traffic,
            warm_up=0,
            finish=finish,
            watch=rounds.append,
        )
        expected = decoded(scene, ServingDrafter(loaded.drafter, real, "v1"), order, len(rounds))
        for number, (simulated_round, real_round) in enumerate(zip(rounds, expected, strict=True)):
            found = zip(
                simulated_round.requests_R.tolist(),
                simulated_round.lengths_R.tolist(),
                simulated_round.committed_R.tolist(),
                strict=True,
            )
            assert list(found) == real_round, (real.name, number)
        lengths = {n for r in rounds for n in r.lengths_R.tolist()}
        assert len(lengths) > 1, "a policy whose lengths never differ proves nothing"

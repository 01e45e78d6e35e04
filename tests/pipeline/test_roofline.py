"""Rounds on a data sheet's device: counted by hand, and what they make of policies under load."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.synthetic_traces import Process, draw, draw_with, whole_block_tau
from pipeline.config import Config
from pipeline.plan.devices import GPUS
from pipeline.plan.models import models_of
from pipeline.simulation.costs import DraftWork, VerifyWork
from pipeline.simulation.methods import read_methods
from pipeline.simulation.requests import Requests
from pipeline.simulation.roofline import RooflineCosts
from pipeline.simulation.runs import Row, run_methods
from pipeline.simulation.traffic import Traffic


def config(model: str, **drafter: Any) -> Config:
    return Config.model_validate(
        {"target": {"model": model}, "drafter": drafter, "data": {"train": [{"path": "unread.jsonl"}]}}
    )


def roofline(model: str = "Qwen/Qwen3-8B", device: str = "h200", **drafter: Any) -> RooflineCosts:
    settings = {"block_size": 16, "num_layers": 5} | drafter
    return RooflineCosts(models_of(config(model, **settings)), GPUS[device], settings["block_size"])


# Qwen3-8B, from its model card's configuration: 36 layers, H 4096, I 12288, 32 heads and 8 key heads of 128, V 151,936
LAYER = 4096 * (2 * 32 * 128 + 2 * 8 * 128) + 3 * 4096 * 12288
HEAD = 4096 * 151_936
KEYS = 2 * 8 * 128 * 36 * 2
"""Bytes of keys and values of a token in bfloat16."""


def test_a_plain_step_moves_weights_and_caches() -> None:
    """One request: nothing but memory counts. Activations, which are read and written too, are a few MB."""
    costs = roofline()
    context = 1000
    work = VerifyWork(requests=1, rows=1, head_rows=1, keys=context, pairs=context + 1)
    moved = 2 * 36 * LAYER + 2 * HEAD + KEYS * context
    assert costs.verify_s(work) == pytest.approx(moved / 4.8e12, rel=0.002)
    # every token more in the cache costs its keys and values
    more = replace(work, keys=2 * context, pairs=2 * context + 1)
    assert costs.verify_s(more) - costs.verify_s(work) == pytest.approx(KEYS * context / 4.8e12)
    assert replace(costs, overhead_s=0.5).verify_s(work) == pytest.approx(0.5 + costs.verify_s(work))


def test_many_rows_cost_their_products() -> None:
    costs = roofline()
    rows, context = 2048, 500
    work = VerifyWork(128, rows, rows, 128 * context, rows * context)
    layers, attention, head = costs.verify_components(work)
    peak = 989e12 * 0.5
    assert layers.seconds == pytest.approx(2 * rows * 36 * LAYER / peak)
    assert head.seconds == pytest.approx(2 * rows * HEAD / peak)
    assert attention.flops == 4 * rows * context * 4096 * 36
    assert attention.moved == KEYS * (128 * context + rows)
    # the same rows for fewer requests read fewer caches
    assert costs.verify_s(replace(work, keys=64 * context)) < costs.verify_s(work)


def test_a_drafting_pass_of_both_families() -> None:
    work = DraftWork(requests=64, unread=300, keys=64 * 500)
    costs = roofline()
    layers, attention, head = costs.draft_components(work)
    slots = 64 * 16
    context = 5 * 2 * 4096 * 8 * 128
    assert layers.flops == 2 * 300 * (5 * 4096**2 + context) + 2 * slots * 5 * LAYER
    assert attention.flops == 4 * 16 * (64 * 500 + slots) * 4096 * 5
    assert attention.moved == (64 * 500 + slots) * KEYS * 5 // 36
    assert head.flops == 2 * 64 * 15 * HEAD
    # a causal LM reads what it missed as rows of its own
    lm = roofline("SmolLM2-135M-Instruct", family="d3d")
    matrices = lm.models.drafter.matrices
    assert lm.draft_components(work)[0].flops == 2 * (300 + slots) * matrices
    assert lm.draft_s(replace(work, unread=20_000)) > lm.draft_s(work)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen/Qwen3.5-9B"])
def test_experts_and_linear_attention(model: str) -> None:
    """Few rows read few experts, many read all; linear attention has states in place of keys."""
    costs = roofline(model)
    one = costs.verify_components(VerifyWork(1, 1, 1, 1000, 1001))
    many = costs.verify_components(VerifyWork(1, 4096, 1, 1000, 4096 * 1000))
    size, arch = costs.models.target_size, costs.models.target
    assert many[0].moved > 2 * size.matrices
    if arch.experts is not None:
        assert one[0].moved == pytest.approx(2 * (size.matrices - size.idle_matrices), rel=0.01)
        assert one[0].moved < 0.3 * many[0].moved
    else:
        full = sum(arch.full_attention)
        assert 0 < full < arch.layers
        assert one[1].moved > 1001 * 2 * arch.kv_width * full * 2
        assert costs.verify_components(VerifyWork(2, 2, 2, 1000, 1001))[1].moved > 1.5 * one[1].moved


def test_what_does_not_fit() -> None:
    """16.4 GB of weights and 147 KB a token: an H100 holds some 400,000 tokens of context beside the drafter, an H200 more."""
    assert roofline(device="h100").fits(350_000) and not roofline(device="h100").fits(450_000)
    assert roofline(device="h200").fits(700_000)


@pytest.fixture(scope="module")
def requests() -> Requests:
    """Blocks of 16 with the mean τ that AdaFlash reports of Qwen3-8B after adaptation."""
    traces = draw_with(7.3, Process(texts=40, tokens=256, prompt=500), seed=0)
    assert whole_block_tau(traces) == pytest.approx(7.3, abs=0.15)
    return Requests.of(traces, 16)


# a plain step of one request then takes 5.4 ms, as AdaFlash's Tables 1 and 3 imply: 835 tokens/s at a speedup of 4.54
@pytest.mark.parametrize(("device", "overhead_ms", "longer"), [("h100", 0.9, 0), ("h200", 2.2, 300)])
def test_the_shape_of_adaflash_table_1(
    requests: Requests, device: str, overhead_ms: float, longer: int
) -> None:
    """Alone the longest verification wins; in a crowd whole blocks fall below plain decoding, and chosen lengths do not."""
    costs = replace(roofline(device=device), overhead_s=overhead_ms / 1000)
    requests = replace(requests, prompt_Q=requests.prompt_Q + longer)
    names = "fixed:16,fixed:8,fixed:4,adaflash:1,adaflash:1.25,survival:0.4,throughput"
    methods = read_methods(names, requests, config("Qwen/Qwen3-8B").policy)
    rows = list(run_methods(requests, methods, costs, Traffic(1), [1, 32, 128]))
    (plain,) = [r for r in rows if (r["concurrency"], r["policy"]) == (1, "plain")]
    assert plain["tokens_per_s"] == pytest.approx(835.32 / 4.54, rel=0.03)

    def speedup(load: int, policy: str, setting: str = "") -> float:
        (row,) = [r for r in rows if (r["concurrency"], r["policy"], r["setting"]) == (load, policy, setting)]
        return float(row["speedup"])

    def best(load: int, policy: str) -> Row:
        return max(
            (r for r in rows if (r["concurrency"], r["policy"]) == (load, policy)), key=lambda r: r["speedup"]
        )

    alone = speedup(1, "fixed", "length 16")
    assert alone > 4
    for other in (best(1, "adaflash"), best(1, "survival")):
        assert alone > other["speedup"]
    assert alone > speedup(1, "fixed", "length 8") > speedup(1, "fixed", "length 4")
    assert speedup(1, "throughput") > 0.97 * alone
    # a whole block pays less and less
    whole = [alone, speedup(32, "fixed", "length 16"), speedup(128, "fixed", "length 16")]
    assert whole == sorted(whole, reverse=True) and whole[1] > 1.5 and whole[2] < 0.92
    for policy in ("adaflash", "survival", "throughput"):
        row = best(128, policy)
        assert row["speedup"] > 1.02 and row["speedup"] > 1.2 * whole[2], policy
        assert row["verify_len"] < 0.6 * 16, policy


@cache
def texts_of(tau: float) -> Requests:
    return Requests.of(draw_with(tau, Process(texts=24, tokens=160, prompt=200), seed=3), 16)


@pytest.mark.parametrize("load", [1, 32, 128, 512])
@pytest.mark.parametrize("tau", [1.2, 2.5, 4.0, 7.0])
def test_the_joint_choice_is_nearly_the_best_everywhere(tau: float, load: int) -> None:
    """Probes included, against plain decoding and all fixed lengths, whichever of them is the best here."""
    requests = texts_of(tau)
    methods = read_methods("fixed,throughput", requests, config("Qwen/Qwen3-8B").policy)
    rows = list(run_methods(requests, methods, roofline(), Traffic(1), [load]))
    (joint,) = [r["speedup"] for r in rows if r["policy"] == "throughput"]
    assert joint >= 0.98 * max(r["speedup"] for r in rows if r["policy"] != "throughput")


def test_plain_decoding_is_what_is_left_of_a_bad_drafter() -> None:
    """Drafts that are hardly ever right, in a crowd: `throughput` hardly drafts, and loses no more than its probes."""
    requests = Requests.of(draw(Process(texts=30, tokens=128, ease=-3.0), seed=1), 16)
    methods = read_methods("fixed:16,throughput", requests, config("Qwen/Qwen3-8B").policy)
    rows = {r["policy"]: r for r in run_methods(requests, methods, roofline(), Traffic(1), [256])}
    assert rows["fixed"]["speedup"] < 0.3
    assert rows["throughput"]["drafted_share"] < 0.02
    assert rows["throughput"]["speedup"] > 0.98

"""Policies over traced texts at a number of requests running together: tokens per second by measured costs, with bounds."""

from __future__ import annotations

from dataclasses import dataclass

from drafters.step_cost import StepCosts
from pipeline.bootstrap import Interval
from pipeline.simulation.costs import RoundCosts
from pipeline.simulation.methods import Method
from pipeline.simulation.requests import Requests
from pipeline.simulation.runs import rate_interval
from pipeline.simulation.serving import serve
from pipeline.simulation.traffic import Traffic


@dataclass(frozen=True)
class WalkResult:
    """`tokens_per_s` of the whole engine with its bootstrap bounds over documents, τ, and mean verify_len."""

    method: Method
    tokens_per_s: Interval
    acceptance_length: float
    verify_len: float


def walk(
    method: Method, requests: Requests, costs: RoundCosts, load: int, table: StepCosts | None = None
) -> WalkResult:
    """Serve the texts, `load` at a time, and measure once `load` of them are answered, until as many more are as there are.

    A text that ends makes place for the next, from the first again when all have begun, so that rounds stay full to the end; what
    runs at either end is served in part. If there are fewer texts than `load`, that many are answered. Prompts cost nothing
    here.

    Args:
        method: what chooses lengths.
        requests: the texts.
        costs: of the rounds.
        load: requests running together.
        table: what `throughput` knows of the costs beforehand.
    """
    policy = method.make(requests, None if table is None else table.copy())
    outcome = serve(requests, policy, costs, Traffic(load), warm_up=load, finish=max(requests.count, load))
    return WalkResult(method, rate_interval(requests, outcome), outcome.acceptance_length, outcome.verify_len)

"""Every method at every concurrency, as rows of figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from drafters.monotone import Floats
from pipeline.bootstrap import Interval, bootstrap_ratio
from pipeline.simulation.costs import RoundCosts, TableCosts
from pipeline.simulation.methods import Method
from pipeline.simulation.requests import Requests
from pipeline.simulation.roofline import RooflineCosts
from pipeline.simulation.serving import Outcome, serve
from pipeline.simulation.traffic import Traffic

PERCENTILES = (50, 90, 99)

Row = dict[str, Any]


def run_methods(
    requests: Requests,
    methods: Sequence[Method],
    costs: RoundCosts,
    traffic: Traffic,
    loads: Sequence[int],
) -> Iterator[Row]:
    """Rows by load, then by method in the order given, of which the first is what speedups are over.

    Where requests come at a rate of their own there is no speedup: what is served is what is asked, and the last of the requests
    decide how long it takes.

    As many requests as run together are answered before measuring begins; then as many as there are, or as run together.
    """
    for load in loads:
        base = None
        for method in methods:
            outcome = serve(
                requests,
                method.make(requests),
                costs,
                replace(traffic, concurrency=load),
                warm_up=load,
                finish=max(load, requests.count),
            )
            base = base or outcome.tokens_per_s
            speedup = outcome.tokens_per_s / base if traffic.rate is None else None
            yield _row(requests, method, costs, load, outcome, speedup)


def rate_interval(requests: Requests, outcome: Outcome) -> Interval:
    """Tokens per second while requests ran, and bounds from resampling whole documents."""
    seconds_D = np.bincount(requests.document_Q, outcome.seconds_Q).astype(np.float64)
    committed_D = np.bincount(requests.document_Q, outcome.committed_Q).astype(np.float64)
    ran_D = seconds_D > 0
    return bootstrap_ratio(committed_D[ran_D], seconds_D[ran_D])


def _row(
    requests: Requests,
    method: Method,
    costs: RoundCosts,
    load: int,
    outcome: Outcome,
    speedup: float | None,
) -> Row:
    interval = rate_interval(requests, outcome)
    # bounds are of busy time; of the clock's, in proportion
    share = outcome.tokens_per_s / interval.point
    latency_s = np.asarray(outcome.latency_s)
    return {
        "concurrency": load,
        "policy": method.name,
        "setting": method.setting,
        "tokens_per_s": outcome.tokens_per_s,
        "tokens_per_s_low": interval.low * share,
        "tokens_per_s_high": interval.high * share,
        "speedup": speedup,
        "acceptance_length": outcome.acceptance_length,
        "verify_len": outcome.verify_len,
        "rows_per_round": outcome.rows / outcome.rounds,
        "running": outcome.blocks / outcome.rounds,
        "drafted_share": outcome.drafted / outcome.rounds,
        "latency_s": _percentiles(latency_s),
        "token_s": _percentiles(latency_s / np.asarray(outcome.tokens)),
        "first_token_s": _percentiles(np.asarray(outcome.first_token_s)),
        "notes": list(_notes(costs, load, outcome)),
    }


def _percentiles(values: Floats) -> dict[str, float]:
    return {f"p{p}": float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def _notes(costs: RoundCosts, load: int, outcome: Outcome) -> Iterator[str]:
    if isinstance(costs, TableCosts) and costs.beyond(load, outcome.most_rows):
        yield "costs extrapolated beyond the table"
    if isinstance(costs, RooflineCosts) and not costs.fits(outcome.most_keys):
        yield f"does not fit into the memory of {costs.device.name}"

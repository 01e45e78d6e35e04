"""Acceptance heads and cost tables for tests of the policies that rest on them."""

from __future__ import annotations

import torch

from drafters.acceptance_head import AcceptanceHead
from drafters.step_cost import StepCosts
from drafters.throughput_policy import CALIBRATION_ROUNDS, ThroughputPolicy


def random_acceptance_head(
    hidden_size: int,
    block_size: int,
    *,
    seed: int = 0,
    confidence: bool = True,
    bias: float = 0.0,
    weight: float = 2.0,
) -> AcceptanceHead:
    """A head whose answers differ from block to block and slot to slot; `weight` by how much."""
    generator = torch.Generator().manual_seed(seed)
    head = AcceptanceHead(hidden_size, block_size, 8, confidence=confidence)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        head.out.weight.mul_(weight)
        head.slot_bias.add_(bias)
        if head.confidence_weight is not None:
            head.confidence_weight.fill_(0.3)
    return head.requires_grad_(False)


def linear_costs(
    *, fixed: float, row: float, draft: float, block_size: int, requests: tuple[int, ...] = (1, 2, 4)
) -> StepCosts:
    """A table that has seen fixed + row·rows seconds of verification and `draft` seconds of drafting, over and over."""
    costs = StepCosts()
    for _ in range(CALIBRATION_ROUNDS):
        for count in requests:
            for rows in range(count, count * block_size + 1):
                costs.observe_verify(rows, count, fixed + row * rows)
            costs.observe_draft(count, draft)
    return costs


def settled_policy(head: AcceptanceHead, costs: StepCosts, *, probe_every: int = 10_000) -> ThroughputPolicy:
    """A policy that is done with calibration."""
    return ThroughputPolicy(head, costs, probe_every=probe_every)

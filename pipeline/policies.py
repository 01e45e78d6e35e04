"""Length policies of a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable

from drafters.acceptance_head import AcceptanceHead
from drafters.checkpoint import LoadedDrafter
from drafters.errors import UserError
from drafters.length_head import LengthHead
from drafters.policies import AdaFlashPolicy, FixedPolicy, LengthPolicy
from drafters.step_cost import StepCosts
from drafters.survival_policy import SurvivalPolicy
from drafters.throughput_policy import ThroughputPolicy
from pipeline.config import PolicyConfig

_log = logging.getLogger(__name__)

_BY_ACCEPTANCE = ("survival", "throughput")


def make_policy(config: PolicyConfig, loaded: LoadedDrafter, costs: StepCosts | None = None) -> LengthPolicy:
    """The configured length policy of a drafter; `adaflash` without a length head falls back to whole blocks.

    Args:
        config: the section.
        loaded: the drafter with its heads, which are moved to its device.
        costs: the table that `throughput` goes on with; None starts a new one.

    Raises:
        UserError: when the drafter lacks the head that the policy rests on.
    """
    device = next(loaded.drafter.parameters()).device
    if config.name in _BY_ACCEPTANCE and loaded.acceptance_head is None:
        raise UserError(
            f"policy.name: {config.name} needs an acceptance head, and drafter {loaded.drafter_version} has none; fit one "
            "with fit-length-head (length_head.acceptance: true), or choose fixed or adaflash"
        )
    length_head, acceptance_head = loaded.length_head, loaded.acceptance_head
    return policy_with(
        config,
        None if length_head is None else length_head.to(device),
        None if acceptance_head is None else acceptance_head.to(device),
        costs,
    )


def policy_with(
    config: PolicyConfig,
    length_head: LengthHead | None,
    acceptance_head: AcceptanceHead | None,
    costs: StepCosts | None = None,
) -> LengthPolicy:
    """The configured length policy over these heads; see `make_policy`."""
    if config.name in _BY_ACCEPTANCE:
        assert acceptance_head is not None
        if config.name == "survival":
            return SurvivalPolicy(acceptance_head, config.threshold, config.threshold_by_load)
        return ThroughputPolicy(acceptance_head, costs, probe_every=config.probe_every)
    if config.name == "fixed" or length_head is None:
        return FixedPolicy(config.length)
    return AdaFlashPolicy(
        length_head,
        gamma=config.gamma,
        gamma_by_load=config.gamma_by_load,
        off_below_load=config.off_below_load,
    )


def policy_factory(config: PolicyConfig) -> Callable[[LoadedDrafter], LengthPolicy]:
    """Makes the policy of each drafter that one engine serves; what verification costs outlives a swap.

    The first drafter must have the head that the policy rests on. One that is swapped in without it, as in a rollback to a
    champion from before the head, is served with whole blocks: refusing it would keep the challenger that failed.
    """
    costs = StepCosts()
    started = False

    def make(loaded: LoadedDrafter) -> LengthPolicy:
        nonlocal started
        if started and config.name in _BY_ACCEPTANCE and loaded.acceptance_head is None:
            _log.warning(
                "policy %s: drafter %s has no acceptance head, so whole blocks are verified",
                config.name,
                loaded.drafter_version,
            )
            return FixedPolicy()
        policy = make_policy(config, loaded, costs.for_another_drafter())
        started = True
        return policy

    return make

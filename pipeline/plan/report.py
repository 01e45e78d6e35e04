"""A plan as tables for people and as plain values for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.plan.advice import USABLE
from pipeline.plan.planner import Outcome, Plan
from pipeline.plan.time import received_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

GIB = 2**30
NAMES = {
    "moments": "AdamW moments",
    "ddp_buckets": "DDP buckets",
    "gathered": "gathered layers (FSDP2)",
    "weight_casts": "bfloat16 casts of weights",
    "activations": "drafter activations",
    "loss": "loss: chunk, gradients",
}


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, in bytes, FLOP and seconds of one optimizer step on one GPU."""
    size = plan.models.target_size
    return {
        "name": plan.name,
        "stage": plan.stage,
        "device": asdict(plan.device),
        "usable_share": USABLE,
        "target": {
            "parameters": size.total,
            "active_parameters": size.active,
            "layers": plan.models.target.layers,
        },
        "drafter": {
            "family": plan.step.family,
            "parameters": plan.models.drafter.total,
            "trained_parameters": plan.models.trained(plan.step),
            "layers": plan.models.drafter_layers,
        },
        "step": asdict(plan.step)
        | {"tokens": plan.step.tokens, "blocks": plan.step.blocks, "slots": plan.step.slots},
        "strategies": [_outcome_json(plan, outcome) for outcome in plan.outcomes],
        "notes": plan.notes,
    }


def _outcome_json(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    tokens = plan.step.accumulate * plan.step.tokens * outcome.strategy.gpus
    return {
        "strategy": outcome.strategy.name,
        "gpus": outcome.strategy.gpus,
        "memory_bytes": outcome.memory.components(),
        "resident_bytes": outcome.memory.resident,
        "peak_bytes": outcome.memory.peak,
        "fits": outcome.fits,
        "advice": outcome.advice,
        "time": [asdict(component) for component in outcome.time],
        "seconds": outcome.seconds,
        "tokens_per_second": tokens / outcome.seconds,
        "network_bytes_per_second": network_rate(plan, outcome),
    }


def network_rate(plan: Plan, outcome: Outcome) -> float:
    """Bytes/s that each GPU must receive so that features never keep it waiting; 0 without a feature server."""
    received = received_bytes(plan.step, plan.models, outcome.strategy)
    busy = sum(c.seconds for c in outcome.time if c.name != "features received")
    return received / busy


def as_tables(plan: Plan) -> list[RenderableType]:
    """What is planned, memory and time by component and strategy, and what follows."""
    step, size, drafter = plan.step, plan.models.target_size, plan.models.drafter
    active = f", {size.active / 1e9:.2f} B active" if size.active != size.total else ""
    formats = f"target in {'bfloat16' if step.target_bytes == 2 else 'float32'}, products of the drafter in "
    lines: list[RenderableType] = [
        f"{plan.name}: one optimizer step of {plan.stage} ({step.objective}) on {plan.device.name}",
        f"target {size.total / 1e9:.2f} B parameters{active}; {step.family} drafter {drafter.total / 1e6:.1f} M, "
        f"{plan.models.trained(step) / 1e6:.1f} M of them trained",
        f"{step.accumulate} × {step.documents} documents of {step.document_tokens} tokens, {step.anchors} blocks of "
        f"{step.block_size} in each; {formats}{'bfloat16' if step.mixed else 'float32'}",
        _memory_table(plan),
        _time_table(plan),
    ]
    for outcome in plan.outcomes:
        rate = network_rate(plan, outcome)
        if rate:
            share = rate / plan.device.network_bandwidth
            lines.append(
                f"{outcome.strategy.name}: {rate / 1e9:.2f} GB/s of features for each GPU, {share:.0%} of "
                f"{plan.device.network_bandwidth / 1e9:g} GB/s"
            )
        if not outcome.fits:
            lines.append(f"{outcome.strategy.name} does not fit; it would with one of")
            lines += [f"  {text}" for text in outcome.advice]
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def _table(plan: Plan, title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for outcome in plan.outcomes:
        of = f" × {outcome.strategy.gpus}" if outcome.strategy.gpus > 1 else ""
        table.add_column(outcome.strategy.name + of, justify="right")
    return table


def _memory_table(plan: Plan) -> RenderableType:
    table = _table(plan, "Memory of each device, GiB")
    parts = [outcome.memory.components() for outcome in plan.outcomes]
    for name in parts[0]:
        if any(part[name] for part in parts):
            table.add_row(NAMES.get(name, name.replace("_", " ")), *(_gib(part[name]) for part in parts))
    table.add_section()
    table.add_row("peak", *(_gib(outcome.memory.peak) for outcome in plan.outcomes))
    table.add_row("usable", *(_gib(int(USABLE * plan.device.memory_bytes)) for _ in plan.outcomes))
    table.add_row("fits", *("yes" if outcome.fits else "NO" for outcome in plan.outcomes))
    return table


def _time_table(plan: Plan) -> RenderableType:
    table = _table(plan, "Time of an optimizer step, ms", "TFLOP", "GB")
    parts = [{c.name: c for c in outcome.time} for outcome in plan.outcomes]
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [part.get(name) for part in parts]
        some = [c for c in found if c]
        moved = {f"{c.moved / 1e9:.3g}" for c in some}
        table.add_row(
            name,
            f"{some[0].flops / 1e12:.3g}",
            moved.pop() if len(moved) == 1 else "varies",
            *(f"{c.seconds * 1e3:.2f}" if c else "-" for c in found),
        )
    table.add_section()
    table.add_row("total", "", "", *(f"{outcome.seconds * 1e3:.2f}" for outcome in plan.outcomes))
    return table


def _gib(count: int) -> str:
    if not count:
        return "-"
    return f"{count / GIB:.2f}" if count >= GIB / 10 else f"{count / GIB:.2g}"

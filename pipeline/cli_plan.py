"""The command `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from drafters.errors import UserError
from pipeline.invocation import ConfigArgument, SetOption, read_config


def plan(
    config: ConfigArgument,
    assignments: SetOption = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="h200, h100, a100, or cpu: this machine's, measured.")
    ] = "h100",
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs that train.")] = 1,
    stage: Annotated[str, typer.Option(metavar="STAGE", help="train, distill or online.")] = "train",
    document_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Tokens of each document; the longest there may be by default.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", show_default=False, help="Write the plan there as JSON too."),
    ] = None,
) -> None:
    """Compute memory and time of one training step.

    By component, for one GPU or several (DDP, FSDP2, the target on a feature server), from sizes alone: no weights are
    loaded, so the target may be one that this machine could not hold. Sizes come from a directory's config.json or from
    shipped presets. Says whether it fits, and what to change if not. docs/plan.md has the formulas and their limits.

    Example: draftsmith plan quickstart --set target.model=Qwen/Qwen3-8B --device h200 --gpus 8
    """
    from pipeline.plan.planner import make_plan
    from pipeline.plan.report import as_json, as_tables
    from pipeline.plan.step import STAGES

    chosen = next((name for name in STAGES if name == stage), None)
    if chosen is None:
        raise UserError(f"--stage: {stage} is unknown; use one of {', '.join(STAGES)}")
    made = make_plan(
        read_config(config, assignments),
        stage=chosen,
        device=device,
        gpus=gpus,
        document_tokens=document_tokens,
    )
    from rich.console import Console

    console = Console()
    for part in as_tables(made):
        console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))
    if json_path is not None:
        from pipeline.result import write_json

        try:
            write_json(json_path, as_json(made))
        except OSError as error:
            raise UserError(f"--json: {json_path} cannot be written ({error.strerror})") from None

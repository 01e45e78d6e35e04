"""`draftsmith data regenerate`: the target's own responses to all prompts."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import torch

from datamodules.regenerate import RegenerationReport, regenerate
from datamodules.responses import ResponseStore
from drafters.batched_attention import plain_attention
from drafters.errors import UserError
from pipeline.config import Config
from pipeline.console import say
from pipeline.corpus import SPLITS, conversations, responses_directory
from pipeline.models import TargetBundle
from pipeline.stages.context import Stage, open_stage


def regenerate_responses(config: Config) -> Path:
    """Answer the prompts of both splits; prompts answered earlier are kept.

    Training responses follow `regenerate`; held-out ones are always greedy and in float32 for at most
    `evaluate.max_new_tokens` tokens, since they double as the AR reference of the lossless check.
    """
    with open_stage(config, "regenerate", "responses") as stage:
        for split in SPLITS:
            prompts = conversations(config, split)
            if split == "train" and not prompts:
                raise UserError("data.train: the sources hold no prompts")
            if not prompts:
                continue
            with stage.result.section(split):
                report = _answer(stage, split, prompts)
            stage.result.metrics[split] = {
                "prompts": report.total,
                "already_done": report.already_done,
                "generated": report.generated,
                "skipped_long": report.skipped_long,
                "truncated": report.truncated,
                "new_tokens": report.new_tokens,
            }
            stage.result.add_output(responses_directory(config, split))
        return stage.output


def _answer(stage: Stage, split: str, prompts: list) -> RegenerationReport:  # type: ignore[type-arg]
    config, bundle, settings = stage.config, stage.bundle, stage.config.regenerate
    heldout = split == "heldout"
    started = last = time.monotonic()

    def progress(report: RegenerationReport) -> None:
        nonlocal last
        finished = report.already_done + report.generated + report.skipped_long
        if time.monotonic() - last > 10 or finished == report.total:
            last = time.monotonic()
            rate = report.new_tokens / max(1e-9, last - started)
            say(f"{split}: {finished}/{report.total} prompts, {rate:.0f} tokens/s")

    with _reference_precision(bundle, heldout):
        return regenerate(
            bundle.target.model,
            bundle.tokenizer,
            prompts,
            ResponseStore(responses_directory(config, split)),
            target=bundle.target.identity,
            max_new_tokens=config.evaluate.max_new_tokens if heldout else settings.max_new_tokens,
            batch_size=settings.batch_size,
            temperature=0.0 if heldout else settings.temperature,
            top_p=1.0 if heldout else settings.top_p,
            top_k=0 if heldout else settings.top_k,
            seed=config.seed,
            max_prompt_tokens=config.data.max_prompt_tokens,
            on_progress=progress,
        )


class _reference_precision:
    """The model in float32 and on HF's own attention while held-out references are made, then back as it was."""

    def __init__(self, bundle: TargetBundle, active: bool) -> None:
        self.model, self.dtype, self.active = bundle.target.model, bundle.target.dtype, active
        self.attention = ExitStack()

    def __enter__(self) -> None:
        if self.active:
            self.model.to(torch.float32)
            self.attention.enter_context(plain_attention(self.model))

    def __exit__(self, *_: object) -> None:
        self.attention.close()
        # bfloat16 → float32 → bfloat16 gives the same bits back
        self.model.to(self.dtype)

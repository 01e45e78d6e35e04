"""Batched generation with the target by HF `generate`.

Shapes: R rows of a batch, T tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from datamodules.responses import FinishReason, Sampling
from drafters.errors import UserError

if TYPE_CHECKING:
    import torch


def generate_responses(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> list[tuple[list[int], FinishReason]]:
    """One answer per prompt, all in one left-padded batch.

    Returns:
        Ids up to and including the first end token with `stop`, or `max_new_tokens` ids with `length`.
    """
    import torch

    stop_ids = stop_token_ids(model, tokenizer)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    ids_RT = torch.tensor([[pad_id] * n + list(p) for n, p in zip(padding, prompts, strict=True)])
    mask_RT = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
    positions_RT = (mask_RT.cumsum(-1) - 1).clamp(min=0)
    device = model.device
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": stop_ids,
        "pad_token_id": pad_id,
        "do_sample": sampling.temperature > 0,
    }
    if sampling.temperature > 0:
        settings |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    with torch.no_grad(), _generation_state(model, settings), _seeded(device, seed):
        output = model.generate(
            input_ids=ids_RT.to(device),
            attention_mask=mask_RT.to(device),
            position_ids=positions_RT.to(device),
        )
    return [_cut(row, stop_ids) for row in output[:, longest:].tolist()]


def stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Ids that end an answer: those of the model's generation config (one or a list), and the tokenizer's.

    Raises:
        UserError: neither names one.
    """
    return configured_stop_ids(model.generation_config, tokenizer)


def configured_stop_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """`stop_token_ids` without the model itself."""
    configured = generation_config.eos_token_id
    if configured is None:
        configured = []
    ids = [configured] if isinstance(configured, int) else [int(i) for i in configured]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError("neither the model's generation config nor its tokenizer names an end token")
    return ids


def _cut(ids: list[int], stop_ids: Sequence[int]) -> tuple[list[int], FinishReason]:
    for index, token in enumerate(ids):
        if token in stop_ids:
            return ids[: index + 1], "stop"
    return ids, "length"


@contextmanager
def _generation_state(model: Any, settings: dict[str, Any]) -> Iterator[None]:
    """The model in eval mode with these generation settings only, and back as it was.

    Settings passed to `generate` are completed from the model's own generation config, so a
    repetition penalty there would silently bend the distribution; hence the config itself is swapped.
    """
    from transformers import GenerationConfig

    config, training = model.generation_config, model.training
    model.generation_config = GenerationConfig(**settings)
    model.eval()
    try:
        yield
    finally:
        model.generation_config = config
        model.train(training)


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Torch's random state set to `seed`, and back as it was."""
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield

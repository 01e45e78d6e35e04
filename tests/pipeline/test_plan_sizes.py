"""A plan's arithmetic against real modules: parameters, saved activations, FLOPs, exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3MoeConfig

from drafters.d3d import D3DDrafter
from drafters.length_head import LengthHead
from pipeline.plan.activations import d3d_activations, dflash_activations
from pipeline.plan.architecture import from_hf
from pipeline.plan.sizes import dflash_size, length_head_size, model_size
from pipeline.plan.sources import architecture_of
from pipeline.tiny_target import write_tiny_target
from tests.pipeline import plan_samples as samples


def parameters(module: torch.nn.Module) -> int:
    """All parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters())


MOE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 80,
    "intermediate_size": 112,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mlp_only_layers": [1],
}
HYBRID: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 80,
    "intermediate_size": 112,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


@pytest.mark.parametrize(
    "config",
    [
        samples.lm_config("llama"),
        samples.lm_config("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        samples.lm_config("qwen3"),
        samples.lm_config("qwen3", tie_word_embeddings=True, attention_bias=True, num_key_value_heads=4),
        Qwen3MoeConfig(**MOE),
        Qwen3MoeConfig(
            **MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [], "tie_word_embeddings": True}
        ),
        Qwen3_5TextConfig(**HYBRID),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_are_those_of_the_model(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = model_size(samples.architecture(config))
    assert size.total == parameters(model)
    assert size.largest_layer == max(parameters(layer) for layer in model.model.layers)


def test_active_parameters_leave_out_the_other_experts() -> None:
    config = Qwen3MoeConfig(**MOE)
    fewer = Qwen3MoeConfig(**MOE | {"num_experts": 2})
    size = model_size(samples.architecture(config))
    routers = 3 * 80 * (6 - 2)
    assert size.active == model_size(samples.architecture(fewer)).total + routers


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen/Qwen3-8B", 8.19e9, 8.19e9),
        ("Qwen/Qwen3-32B", 32.8e9, 32.8e9),
        # the card rounds 3.353 B of active parameters down
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30.5e9, 3.35e9),
        ("Qwen/Qwen3.5-9B", 8.95e9, 8.95e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134.5e6, 134.5e6),
    ],
)
def test_presets_have_the_published_sizes(name: str, total: float, active: float) -> None:
    size = model_size(architecture_of(name, "target.model"))
    assert size.total == pytest.approx(total, rel=0.01)
    assert size.active == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tiny_presets_are_what_is_made_on_the_spot(kind: str, tmp_path: Path) -> None:
    write_tiny_target(tmp_path, kind, seed=0)
    written = json.loads((tmp_path / "config.json").read_text())
    assert from_hf(written, "here") == architecture_of(f"tiny:{kind}", "target.model")
    assert architecture_of(str(tmp_path), "target.model") == architecture_of(f"tiny:{kind}", "target.model")


@pytest.mark.parametrize(("layers", "context_layers"), [(1, 1), (2, 3), (5, 2)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_dflash_parameters(kind: str, layers: int, context_layers: int) -> None:
    target = samples.lm_config(kind)
    drafter = samples.dflash(target, layers=layers, context_layers=context_layers)
    size = dflash_size(samples.architecture(target), layers=layers, context_layers=context_layers)
    assert size.total == parameters(drafter)
    assert size.matrices == sum(p.numel() for p in drafter.parameters() if p.dim() > 1)
    assert size.mlp_matrices == sum(p.numel() for n, p in drafter.named_parameters() if ".mlp." in n)


def test_d3d_parameters() -> None:
    config = samples.lm_config("qwen3", tie_word_embeddings=True)
    assert model_size(samples.architecture(config)).total == parameters(samples.d3d(config))


def test_length_head_parameters() -> None:
    assert length_head_size(80, 24) == parameters(LengthHead(80, 24))


def saved_bytes(forward: Callable[[], object], owner: torch.nn.Module) -> int:
    """Storage that autograd keeps for the backward, weights and their casts left out."""
    weights = {p.untyped_storage().data_ptr() for p in owner.parameters()}
    casts = {shape for p in owner.parameters() if p.dim() == 2 for shape in (p.shape, p.shape[::-1])}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tensor.shape not in casts:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("freeze_mlp", [False, True])
def test_dflash_activations_are_what_autograd_saves(mixed: bool, freeze_mlp: bool) -> None:
    step = samples.step(mixed=mixed, freeze_mlp=freeze_mlp)
    target = samples.lm_config("llama")
    drafter = samples.dflash(target, layers=3, context_layers=2)
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(not (freeze_mlp and ".mlp." in name))
    batch = samples.batch(step)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        saved = saved_bytes(lambda: samples.run_dflash(drafter, batch), drafter)
    planned = dflash_activations(step, samples.architecture(target), layers=3, context_layers=2)
    assert saved == planned


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_d3d_activations_are_what_autograd_saves(kind: str, mixed: bool) -> None:
    step = samples.step("d3d", mixed=mixed)
    config = samples.lm_config(kind)
    drafter: D3DDrafter = samples.d3d(config)
    batch = samples.batch(step)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        saved = saved_bytes(lambda: drafter(batch), drafter)
    assert saved == d3d_activations(step, samples.architecture(config))

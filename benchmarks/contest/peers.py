"""The peers' contenders: their own models and losses as their training loops call them, given our anchors.

Runs in the peers' environment. Both defaults of attention and loss need a GPU (flex attention's backward, Triton losses); what is
used instead are the options they ship for CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from contest.problem import DECAY, Problem, drafter_config
from contest.side import Side

PREFIXES = ("fc.", "hidden_norm.", "norm.", "layers.")


def specforge(problem: Problem, attention: str, chunk_blocks: int = 128) -> Side:
    """`OnlineDFlashModel` of specforge; `chunk_blocks` is its `objective_chunk_blocks`, 128 by default; 0 keeps all logits
    instead of computing them twice.

    Does more than is compared: accuracy over all slots. Computes logits of the anchors' slots too, with weight 0.
    """
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    shape = problem.shape
    config = drafter_config(shape)
    config._attn_implementation = attention
    drafter = DFlashDraftModel(config)
    _load(drafter, problem)
    head = nn.Linear(shape.hidden, shape.vocab, bias=False, device="meta")
    head.weight = nn.Parameter(problem.head_VH, requires_grad=False)
    embedding = nn.Embedding(shape.vocab, shape.hidden, _weight=problem.head_VH, _freeze=True)
    model: Any = OnlineDFlashModel(
        drafter,
        head,
        embedding,
        mask_token_id=shape.mask_token_id,
        block_size=shape.block,
        attention_backend=attention,
        num_anchors=shape.anchors,
        loss_decay_gamma=DECAY,
        objective_chunk_blocks=chunk_blocks,
    ).train()
    anchors = (problem.anchors_N[None], torch.ones(1, shape.anchors, dtype=torch.bool))
    model._sample_anchor_positions = lambda *_: anchors
    ids, features = problem.ids_T[None], problem.features_TC[None]
    mask = problem.response_mask_T().long()[None]
    return Side(lambda: model(ids, features, mask)[0], _trained(drafter))


def speculators(problem: Problem, attention: str) -> Side:
    """`DFlashDraftModel` of speculators with its eager cross-entropy against the verifier's argmax.

    Does more than is compared: the verifier's logits, and accuracy and accepted length by position. Divides by the number of
    counted slots instead of the sum of their weights.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core

    shape = problem.shape
    config = drafter_config(shape)
    for field in ("block_size", "num_target_layers", "dflash_config"):
        delattr(config, field)
    config._attn_implementation = attention
    model: Any = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=shape.vocab,
            block_size=shape.block,
            aux_hidden_state_layer_ids=[layer + 1 for layer in shape.layer_ids()],
            mask_token_id=shape.mask_token_id,
        )
    )
    for frozen in (model.lm_head, model.verifier_lm_head, model.embed_tokens):
        frozen.weight = nn.Parameter(problem.head_VH, requires_grad=False)
    nn.init.ones_(model.verifier_norm.weight)
    _load(model, problem)
    model.train()
    anchors = (problem.anchors_N, torch.ones(shape.anchors, dtype=torch.bool))
    core.select_anchors = lambda *_: anchors
    ids, features, hidden = problem.ids_T[None], problem.features_TC[None], problem.hidden_TH[None]
    mask = problem.response_mask_T().long()[None]
    documents = torch.zeros(1, shape.length, dtype=torch.long)
    losses = resolve_loss_config("ce", "eager")
    weights = torch.exp(-torch.arange(shape.block - 1) / DECAY).sum().item() / (shape.block - 1)
    return Side(
        lambda: model(
            features, ids, mask, hidden, documents, loss_config=losses, gamma=DECAY, max_anchors=shape.anchors
        )[1],
        _trained(model),
        factor=1 / weights,
    )


def _load(model: nn.Module, problem: Problem) -> None:
    report = model.load_state_dict(problem.drafter, strict=False)
    missing = [name for name in report.missing_keys if name.startswith(PREFIXES)]
    if missing or report.unexpected_keys:
        raise RuntimeError(f"weights do not fit: missing {missing}, unexpected {report.unexpected_keys}")


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}

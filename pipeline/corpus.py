"""Prompts and documents of a run: the training mixture, its validation split, and held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datamodules.mixture import load_mixture, split_by_hash
from datamodules.prompts import Conversation, SourceSpec
from datamodules.responses import ResponseStore
from drafters.errors import UserError
from drafters.identity import TargetIdentity, require_same_target
from drafters.packing import Document
from pipeline.config import Config, SourceConfig

SPLITS = ("train", "heldout")


def source_specs(sources: Sequence[SourceConfig]) -> list[SourceSpec]:
    """Config sections as the data room's specs, with distinct names."""
    return [
        SourceSpec(
            path=s.path,
            dataset=s.dataset,
            config=s.dataset_config,
            split=s.split,
            domain=s.domain,
            limit=s.limit,
            weight=s.weight,
            name=f"{i}:{s.dataset or s.path}",
        )
        for i, s in enumerate(sources)
    ]


def conversations(config: Config, split: str) -> list[Conversation]:
    """Prompts of a split in mixture order."""
    if split == "heldout":
        sources = config.data.heldout
        return load_mixture(source_specs(sources), seed=config.seed).conversations if sources else []
    return load_mixture(
        source_specs(config.data.train), seed=config.seed, limit=config.data.limit
    ).conversations


def responses_directory(config: Config, split: str) -> Path:
    """Where the target's responses of a split are kept."""
    return config.output / "responses" / split


def load_documents(config: Config, split: str, identity: TargetIdentity) -> list[Document]:
    """Documents of a split, checked to be this target's.

    Raises:
        UserError: when they were not regenerated yet, or by another target.
    """
    directory = responses_directory(config, split)
    store = ResponseStore(directory)
    if not directory.exists():
        raise UserError(f"{directory}: no responses yet; run `draftsmith data regenerate` first")
    require_same_target(identity, TargetIdentity.from_json(store.meta.target), str(directory))
    return store.documents(drop_truncated=split == "train" and config.regenerate.truncated == "drop")


def train_and_validation(config: Config, identity: TargetIdentity) -> tuple[list[Document], list[Document]]:
    """Training documents and the validation ones split off by conversation.

    Validation decides checkpoints and the gate; the held-out prompts decide nothing and are only reported.
    """
    documents = load_documents(config, "train", identity)
    prompts = conversations(config, "train")
    _, held = split_by_hash(prompts, config.data.val_fraction, salt="validation")
    keys = {conversation.id for conversation in held}
    train = [d for d in documents if d.conversation_key not in keys]
    validation = [d for d in documents if d.conversation_key in keys]
    if not train:
        raise UserError("data: no training documents are left; check data.val_fraction and the responses")
    return train, validation

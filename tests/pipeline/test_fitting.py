"""Which documents and which part of the vocabulary a stage trains on, and what it refuses to resume."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from drafters.errors import UserError
from drafters.packing import Document
from pipeline.config import FitConfig
from pipeline.fitting import fit, stage_documents, training_vocabulary

DOCUMENTS = [Document([i, i + 1], [False, True], f"d{i}") for i in range(30)]


def test_a_stage_takes_a_share_of_the_documents_in_their_order() -> None:
    names = [d.document_id for d in stage_documents(FitConfig(max_documents=12), DOCUMENTS, seed=1)]
    assert len(set(names)) == 12
    assert names == [d.document_id for d in DOCUMENTS if d.document_id in names]
    assert names == [d.document_id for d in stage_documents(FitConfig(max_documents=12), DOCUMENTS, seed=1)]
    other = [d.document_id for d in stage_documents(FitConfig(max_documents=12), DOCUMENTS, seed=2)]
    assert names != other
    for settings in (FitConfig(), FitConfig(max_documents=30), FitConfig(max_documents=99)):
        assert stage_documents(settings, DOCUMENTS, seed=1) == DOCUMENTS


def test_the_vocabulary_of_a_stage_is_all_unless_it_asks_for_less() -> None:
    bundle: Any = SimpleNamespace(target=SimpleNamespace(config=SimpleNamespace(vocab_size=64)))
    assert training_vocabulary(FitConfig(), bundle, DOCUMENTS) is None
    assert training_vocabulary(FitConfig(vocabulary=64), bundle, DOCUMENTS) is None
    kept = training_vocabulary(FitConfig(vocabulary=40), bundle, DOCUMENTS)
    assert kept is not None
    assert torch.equal(kept.ids_U, torch.arange(40))


def test_a_checkpoint_from_before_the_acceptance_head_is_refused_with_the_cure(tmp_path: Path) -> None:
    checkpoint = tmp_path / "last.ckpt"
    head = nn.Linear(2, 1)
    torch.save({"state_dict": {}}, checkpoint)

    class Trainer:
        world_size, strategy = 1, None

        def fit(self, module: nn.Module, **_: Any) -> None:
            module.load_state_dict(
                {f"length_head.{name}": value for name, value in head.state_dict().items()}
            )

    trainer: Any = Trainer()
    module: Any = nn.ModuleDict({"length_head": head, "acceptance_head": nn.Linear(2, 1)})
    cure = r"last\.ckpt: does not fit this config .*start anew, .*--set length_head\.acceptance=false"
    with pytest.raises(UserError, match=cure):
        fit(trainer, module, None, str(checkpoint))
    other: Any = nn.ModuleDict({"length_head": head, "drafter": nn.Linear(2, 1)})
    with pytest.raises(UserError, match=r"does not fit this config \([^)]*\)[^;]*$"):
        fit(trainer, other, None, str(checkpoint))

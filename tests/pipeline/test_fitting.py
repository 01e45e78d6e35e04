"""Which documents and which part of the vocabulary a stage trains on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from drafters.packing import Document
from pipeline.config import FitConfig
from pipeline.fitting import stage_documents, training_vocabulary

DOCUMENTS = [Document([i, i + 1], [False, True], f"d{i}") for i in range(30)]


def test_a_stage_takes_a_share_of_the_documents_in_their_order() -> None:
    names = [d.document_id for d in stage_documents(FitConfig(max_documents=12), DOCUMENTS, seed=1)]
    assert len(set(names)) == 12
    assert names == [d.document_id for d in DOCUMENTS if d.document_id in names]
    assert names == [d.document_id for d in stage_documents(FitConfig(max_documents=12), DOCUMENTS, seed=1)]
    other = [d.document_id for d in stage_documents(FitConfig(max_documents=12), DOCUMENTS, seed=2)]
    assert names != other
    for fit in (FitConfig(), FitConfig(max_documents=30), FitConfig(max_documents=99)):
        assert stage_documents(fit, DOCUMENTS, seed=1) == DOCUMENTS


def test_the_vocabulary_of_a_stage_is_all_unless_it_asks_for_less() -> None:
    bundle: Any = SimpleNamespace(target=SimpleNamespace(config=SimpleNamespace(vocab_size=64)))
    assert training_vocabulary(FitConfig(), bundle, DOCUMENTS) is None
    assert training_vocabulary(FitConfig(vocabulary=64), bundle, DOCUMENTS) is None
    kept = training_vocabulary(FitConfig(vocabulary=40), bundle, DOCUMENTS)
    assert kept is not None
    assert torch.equal(kept.ids_U, torch.arange(40))

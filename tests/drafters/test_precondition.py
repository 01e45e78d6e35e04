"""Training `fc` in scaled coordinates changes how it learns, never what the drafter computes or exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize

from drafters.checkpoint import load_drafter, save_drafter
from drafters.dflash import DFlashDrafter
from drafters.fill import fill_blocks
from drafters.packing import Document, pack_documents
from drafters.precondition import feature_rms, plain_state, precondition
from drafters.target import Target


@pytest.fixture
def target(make_target: Callable[..., Target]) -> Target:
    return make_target()


def _documents(count: int = 3) -> list[Document]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 60, (12,), generator=generator).tolist() for _ in range(count)]
    return [Document(tokens, [False] * 3 + [True] * 9, f"d{i}") for i, tokens in enumerate(ids)]


def _hidden(drafter: DFlashDrafter, target: Target) -> torch.Tensor:
    batch = pack_documents(_documents(), anchors_per_document=0, anchor_source="all")
    output = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    return fill_blocks(drafter, target, batch, output.features_TC).hidden_NBH


def test_rms_is_that_of_all_tokens_but_the_first(target: Target) -> None:
    documents = _documents()
    rows = []
    for document in documents:
        ids = torch.tensor(document.token_ids)
        rows.append(target.forward_packed(ids, torch.arange(len(ids))).features_TC[1:])
    expected = torch.cat(rows).double().square().mean(dim=0).sqrt()
    torch.testing.assert_close(feature_rms(target, documents).double(), expected, rtol=1e-5, atol=1e-6)


def test_output_is_unchanged_and_gradient_steps_move_columns_in_proportion(
    target: Target, make_drafter: Callable[..., DFlashDrafter]
) -> None:
    drafter = make_drafter(target)
    before = _hidden(drafter, target)
    weight = drafter.fc.weight.detach().clone()
    rms_C = feature_rms(target, _documents())
    precondition(drafter, rms_C)
    torch.testing.assert_close(_hidden(drafter, target), before, rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.SGD([drafter.fc.parametrizations.weight.original], lr=1.0)
    drafter.fc.parametrizations.weight.original.grad = torch.ones_like(weight)
    optimizer.step()
    moved_C = (weight - drafter.fc.weight.detach()).mean(dim=0)
    torch.testing.assert_close(
        moved_C * rms_C, torch.full_like(rms_C, float((moved_C * rms_C).mean())), rtol=1e-3, atol=1e-4
    )


def test_export_folds_the_scale_under_the_plain_name(
    target: Target, make_drafter: Callable[..., DFlashDrafter], tmp_path: Path
) -> None:
    drafter = make_drafter(target)
    names = set(drafter.state_dict())
    precondition(drafter, feature_rms(target, _documents()))
    assert parametrize.is_parametrized(drafter.fc)
    assert set(plain_state(drafter)) == names
    expected = _hidden(drafter, target)
    save_drafter(tmp_path / "d", drafter, identity=target.identity, drafter_version="v", dtype=torch.float32)
    loaded = load_drafter(tmp_path / "d", dtype=torch.float32).drafter
    assert torch.equal(loaded.fc.weight, drafter.fc.weight)
    torch.testing.assert_close(_hidden(loaded, target), expected, rtol=1e-5, atol=1e-5)

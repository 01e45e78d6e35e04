"""Batches are a function of (seed, epoch, index): resuming, ranks, passes, documents left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from datamodules.offline import OfflineDataModule, OtherTrainingData, ReplayLoader
from datamodules.packed_loader import PackedLoader, PackingSpec, derived_generator
from drafters.errors import UserError
from drafters.packing import Document, PackedBatch

SPEC = PackingSpec(row_tokens=40, anchors_per_document=3, anchor_source="random", max_length=64)


def document(number: int, response: int = 8, prompt: int = 2, **fields: Any) -> Document:
    mask = [False] * prompt + [True] * response
    return Document([number] * len(mask), mask, f"d{number}", **fields)


def documents(count: int = 12) -> list[Document]:
    return [document(number, 5 + number % 6) for number in range(count)]


def loader(docs: list[Document] | None = None, spec: PackingSpec = SPEC, **settings: Any) -> PackedLoader:
    return PackedLoader(docs or documents(), spec, **({"seed": 1} | settings))


def fingerprint(batch: PackedBatch) -> tuple[Any, ...]:
    return tuple(batch.document_names), tuple(batch.input_ids_T.tolist()), tuple(batch.anchors_N.tolist())


def fingerprints(loader: PackedLoader, count: int | None = None) -> list[tuple[Any, ...]]:
    return [fingerprint(batch) for batch in islice(loader, count)]


def test_batches_depend_on_seed_and_epoch_alone() -> None:
    torch.manual_seed(0)
    first = fingerprints(loader())
    torch.manual_seed(1)
    torch.rand(5)
    state = torch.get_rng_state()
    assert fingerprints(loader()) == first
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert fingerprints(loader(seed=2)) != first
    second_epoch = fingerprints(loader(epoch=1))
    assert second_epoch != first
    running_on = loader(num_batches=2 * len(first))
    assert len(running_on) == 2 * len(first)
    assert fingerprints(running_on, len(first) + len(second_epoch)) == first + second_epoch


def test_an_iteration_goes_through_every_document_once() -> None:
    names = Counter(name for batch in loader() for name in batch.document_names)
    assert names == Counter(f"d{number}" for number in range(12))


def test_passes_are_shuffled_apart() -> None:
    per_batch = [batch.document_names for batch in loader(spec=replace(SPEC, row_tokens=1), passes=3)]
    assert all(len(names) == 1 for names in per_batch)
    order = [name for names in per_batch for name in names]
    sweeps = [order[:12], order[12:24], order[24:]]
    assert all(sorted(sweep) == sorted(sweeps[0]) for sweep in sweeps)
    assert sweeps[0] != sweeps[1] != sweeps[2]


def test_the_same_document_gets_other_anchors_at_every_visit() -> None:
    spec = replace(SPEC, row_tokens=1)
    visits = [fingerprint(batch)[2] for batch in islice(loader([document(0, 60)], spec, num_batches=8), 8)]
    assert len(set(visits)) > 4


def test_rows_respect_their_length_unless_one_document_is_longer() -> None:
    docs = [*documents(), document(50, 60)]
    for batch in loader(docs):
        assert batch.num_tokens <= 40 or len(batch.document_names) == 1


@pytest.mark.parametrize("taken", [1, 3, 7, 11])
def test_resume_in_the_middle_equals_going_on(taken: int) -> None:
    uninterrupted = fingerprints(loader(num_batches=100), 20)
    running = loader(num_batches=100)
    assert fingerprints(running, taken) == uninterrupted[:taken]
    resumed = loader(num_batches=100)
    resumed.load_state_dict(running.state_dict())
    assert fingerprints(resumed, 20 - taken) == uninterrupted[taken:]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_take_disjoint_batches_and_equally_many(world_size: int) -> None:
    docs = documents(30)
    everything = fingerprints(loader(docs))
    ranks = [fingerprints(loader(docs, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) == len(everything) // world_size == len(loader(docs, world_size=world_size)) > 1
    merged = [batch for batches in ranks for batch in batches]
    assert len(set(merged)) == len(merged)
    assert set(merged) <= set(everything)


def test_more_ranks_than_batches_still_get_one_each() -> None:
    ranks = [fingerprints(loader([document(0)], rank=rank, world_size=3)) for rank in range(3)]
    assert [len(batches) for batches in ranks] == [1, 1, 1]


def test_documents_of_one_name_are_all_visited() -> None:
    twins = [replace(document(number), document_id="same") for number in range(4)]
    seen = {int(t) for batch in loader(twins) for t in batch.input_ids_T}
    assert seen == {0, 1, 2, 3}


def test_documents_without_an_anchor_are_left_out() -> None:
    docs = [
        document(0, response=1),
        document(1, prompt=63),  # one response token inside the cap
        document(2),
        replace(document(3), round_starts=[]),
        replace(document(4), round_starts=[9]),  # only the last token, which predicts nothing
        replace(document(5), round_starts=[3, 6]),
    ]
    spec = replace(SPEC, anchor_source="rounds")
    batches = list(loader(docs, spec))
    assert sorted(name for batch in batches for name in batch.document_names) == ["d2", "d5"]
    assert all(batch.num_blocks for batch in batches)
    assert sorted(name for b in loader(docs) for name in b.document_names) == ["d2", "d3", "d4", "d5"]


def test_long_documents_are_cut() -> None:
    [batch] = list(loader([document(0, 200)]))
    assert batch.num_tokens == SPEC.max_length
    assert int(batch.anchors_N.max()) < SPEC.max_length - 1


def test_no_document_with_an_anchor_is_a_user_error() -> None:
    with pytest.raises(UserError, match="none of the 2 documents"):
        loader([document(0, response=1), document(1, response=1)])


def test_derived_generators_of_neighbours_are_unrelated() -> None:
    draws = {tuple(torch.rand(4, generator=derived_generator(0, i)).tolist()) for i in range(50)}
    draws |= {tuple(torch.rand(4, generator=derived_generator(i, 0)).tolist()) for i in range(1, 50)}
    assert len(draws) == 99


def test_replay_packs_of_all_ranks_hold_every_document_once() -> None:
    docs = [document(number, 500) for number in range(5)]  # two in a pack
    ranks = [ReplayLoader(docs, rank, 2) for rank in range(2)]
    assert [len(r) for r in ranks] == [2, 2]
    names = [d.document_id for r in ranks for pack in r for d in pack]
    assert sorted(names) == [f"d{number}" for number in range(5)]


def test_a_module_without_validation_documents_has_no_validation_loader() -> None:
    data = OfflineDataModule(documents(), [], SPEC, seed=1)
    assert data.val_dataloader() == []
    assert len(data.train_dataloader()) == len(loader())


@pytest.mark.parametrize(
    "other",
    [
        OfflineDataModule(documents(11), [], SPEC, seed=1),
        OfflineDataModule([document(99), *documents()[1:]], [], SPEC, seed=1),
        OfflineDataModule([document(0, 4, 3), *documents()[1:]], [], SPEC, seed=1),
        OfflineDataModule(documents()[::-1], [], SPEC, seed=1),
        OfflineDataModule(documents(), [], replace(SPEC, anchors_per_document=4), seed=1),
        OfflineDataModule(documents(), [], SPEC, seed=2),
    ],
    ids=["fewer", "another", "mask", "order", "packing", "seed"],
)
def test_a_run_is_not_resumed_with_other_batches(other: OfflineDataModule) -> None:
    state = OfflineDataModule(documents(), documents(2), SPEC, seed=1).state_dict()
    OfflineDataModule(documents(), [], SPEC, seed=1).load_state_dict(state)  # validation may change
    with pytest.raises(OtherTrainingData):
        other.load_state_dict(state)

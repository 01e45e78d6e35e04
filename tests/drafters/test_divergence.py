"""Divergence token by token against plain loops in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters.divergence import reverse_kl, token_divergence
from drafters.fill import block_filler, draft_head
from drafters.packing import pack_documents
from drafters.replay import replay


def test_reverse_kl_is_the_sum_over_the_vocabulary() -> None:
    generator = torch.Generator().manual_seed(3)
    draft, target = (torch.randn(300, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    heads = [torch.randn(11, 5, generator=generator, dtype=torch.float64) for _ in range(2)]
    found = reverse_kl(draft, heads[0], target, heads[1])
    for row in (0, 127, 128, 299):
        q = torch.softmax(heads[0] @ draft[row], dim=0)
        p = torch.softmax(heads[1] @ target[row], dim=0)
        assert float(found[row]) == pytest.approx(
            sum(float(a * torch.log(a / b)) for a, b in zip(q, p, strict=True))
        )
    assert float(reverse_kl(draft[:1], heads[0], draft[:1], heads[0])) == pytest.approx(0.0, abs=1e-12)


def test_every_drafted_token_is_judged_in_its_slot(trained: Any, kind: str) -> None:
    target, drafter = trained.target, trained.drafter
    document = trained.documents[0]
    (walked,) = replay(drafter, target, [document])
    found = token_divergence(drafter, target, document)
    last = len(document.token_ids) - 1
    expected = []
    logits = target.model(torch.tensor([document.token_ids])).logits[0].double()
    for start, accepted in zip(walked.round_starts, walked.accepted_per_round, strict=True):
        alone = replace(document, round_starts=[start])
        batch = pack_documents([alone], anchors_per_document=1, anchor_source="rounds")
        with torch.no_grad():
            (hidden_BH,) = block_filler(drafter, target, batch)(batch)
        for slot in range(1, drafter.block_size):
            if slot > accepted + 1 or start + slot > last:
                break
            q = (draft_head(drafter, target).double() @ hidden_BH[slot].double()).softmax(dim=0)
            p = logits[start + slot - 1].softmax(dim=0)
            value = float((q * (q.log() - p.log())).sum())
            expected.append((start + slot, slot, slot <= accepted, value))
    assert [(t.position, t.slot, t.accepted) for t in found] == [row[:3] for row in expected]
    assert [t.divergence for t in found] == pytest.approx([row[3] for row in expected], rel=1e-3, abs=1e-5)
    # each token once; those without an entry follow blocks that were accepted whole
    positions = [t.position for t in found]
    assert len(set(positions)) == len(positions)
    whole = [
        s + drafter.block_size
        for s, a in zip(walked.round_starts, walked.accepted_per_round, strict=True)
        if a == drafter.block_size - 1 and s + drafter.block_size <= last
    ]
    first = document.response_mask.index(True)
    assert set(range(first + 1, last + 1)) - set(positions) == set(whole)

"""The drafter must compute the same thing in training, where blocks are packed, and in the decoding loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafters.decoding import DecodingSession, ServingDrafter
from drafters.dflash import DFlashDrafter
from drafters.drafting import draft_blocks, embed_blocks
from drafters.fill import fill_blocks
from drafters.packing import Document, pack_documents
from drafters.policies import FixedPolicy
from drafters.target import Target
from drafters.verify import SamplingParams


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_training_logits_equal_those_of_the_decoding_loop(
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    make_target: Callable[..., Target],
    make_drafter: Callable[..., DFlashDrafter],
    make_prompt: Callable[..., list[int]],
) -> None:
    target = make_target(kind, dtype)
    drafter = make_drafter(target)
    sessions, blocks = [], []
    for seed, length in ((0, 6), (1, 1), (2, 11)):
        session = DecodingSession(
            target, make_prompt(seed, length), sampling=SamplingParams(), max_new_tokens=20
        )
        session.prefill()
        serving = ServingDrafter(drafter, FixedPolicy(), "v1")
        decoded = []
        while not session.finished:
            start = len(session.tokens) - 1
            hidden, embeddings = draft_blocks([session], drafter)[0], embed_blocks([session], drafter)
            assert torch.equal(embeddings[0, 0], target.embed(torch.tensor(session.tokens[start])))
            decoded.append((start, target.logits(hidden)))
            session.step(serving)
        sessions.append(session)
        blocks.append(decoded)

    documents = [
        Document(
            s.tokens,
            [i >= s.prompt_length for i in range(len(s.tokens))],
            f"d{i}",
            round_starts=[r.start for r in s.rounds],
        )
        for i, s in enumerate(sessions)
    ]
    batch = pack_documents(documents, anchors_per_document=99, anchor_source="rounds")
    output = target.forward_packed(batch.input_ids_T, batch.position_ids_T)
    with torch.no_grad():
        hidden_NBH = fill_blocks(drafter, target, batch, output.features_TC).hidden_NBH
    serve = [logits for decoded in blocks for _, logits in decoded]
    assert len(serve) == batch.num_blocks > 10
    train = target.logits(hidden_NBH)
    assert train.std() > 0.5, "logits must be large enough for the tolerance to mean something"
    torch.testing.assert_close(train, torch.stack(serve), rtol=0, atol=tolerance)

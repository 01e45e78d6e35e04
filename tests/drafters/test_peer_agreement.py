"""Our exported checkpoint in the `dflash` 0.1.0 implementation: same drafts, same rounds, same text."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from drafters.checkpoint import save_drafter
from drafters.decoding import DecodingSession, ServingDrafter
from drafters.fill import fill_blocks
from drafters.packing import Document, pack_documents
from drafters.policies import FixedPolicy
from drafters.verify import SamplingParams

peer_module = pytest.importorskip("dflash.model")
BLOCK = 5


@pytest.fixture
def peer(trained: Any, tmp_path: Path) -> Any:
    """The peer's drafter, loaded from our serving directory."""
    save_drafter(
        tmp_path / "d",
        trained.drafter,
        identity=trained.target.identity,
        drafter_version="v1",
        dtype=torch.float32,
    )
    config = Qwen3Config.from_pretrained(tmp_path / "d")
    config._attn_implementation = "sdpa"
    model, info = peer_module.DFlashDraftModel.from_pretrained(
        tmp_path / "d", config=config, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def test_the_peer_reads_the_same_settings(trained: Any, peer: Any) -> None:
    spec = trained.drafter.spec
    assert (peer.block_size, peer.mask_token_id, list(peer.target_layer_ids)) == (
        spec.block_size,
        spec.mask_token_id,
        spec.target_layer_ids,
    )
    assert not any(layer.self_attn.is_causal for layer in peer.layers)


def test_draft_hidden_states_agree_for_a_given_context(trained: Any, peer: Any) -> None:
    """One block after another without a cache; the peer gets raw features and true positions."""
    document = trained.documents[5]
    batch = pack_documents([document], anchors_per_document=6, generator=torch.Generator().manual_seed(0))
    ids = batch.input_ids_T
    with torch.no_grad():
        states = trained.target.model(ids[None], output_hidden_states=True).hidden_states
        features = peer_module.extract_context_feature(states, peer.target_layer_ids)
        ours_features = trained.target.forward_packed(ids, batch.position_ids_T).features_TC
        ours = fill_blocks(trained.drafter, trained.target, batch, ours_features).hidden_NBH
        for n, anchor in enumerate(batch.anchors_N.tolist()):
            block = torch.full((1, BLOCK), peer.mask_token_id)
            block[0, 0] = ids[anchor]
            theirs = peer(
                target_hidden=features[:, :anchor],
                noise_embedding=trained.target.embed(block),
                position_ids=torch.arange(anchor + BLOCK)[None],
            )[0]
            torch.testing.assert_close(ours[n], theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ending", ["length", "stop"])
def test_decoding_round_by_round_agrees(
    trained: Any,
    peer: Any,
    kind: str,
    ending: str,
    eos_case: Callable[[str], tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_module, "_cuda_time", time.perf_counter)
    eos_index, eos = eos_case(kind)
    indices, eos_ids = (range(6), []) if ending == "length" else ([eos_index], [eos])
    accepted_any = False
    for index in indices:
        prompt, limit = trained.prompts[index], 34
        their_drafts: list[list[int]] = []
        compute_logits = peer.compute_logits

        def record(hidden: torch.Tensor, head: Any, compute: Any = compute_logits) -> torch.Tensor:
            logits = compute(hidden, head)
            their_drafts.append(logits.argmax(dim=-1)[0].tolist())  # noqa: B023
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(peer, "compute_logits", record)
            theirs = peer_module.dflash_generate(
                peer, trained.target.model, torch.tensor([prompt]), limit, eos_ids or None, return_stats=True
            )
        session = DecodingSession(
            trained.target, prompt, sampling=SamplingParams(), max_new_tokens=limit, eos_ids=eos_ids
        )
        session.run(ServingDrafter(trained.drafter, FixedPolicy(), "v1"))
        assert theirs.output_ids[0].tolist() == session.tokens
        assert session.finish_reason == ending
        # near the limit the peer shrinks its block, which changes what a bidirectional block drafts
        rounds = [r for r in session.rounds if r.start + BLOCK <= len(prompt) + limit]
        assert len(rounds) >= 2
        assert theirs.acceptance_lengths[: len(rounds)] == [r.committed for r in rounds]
        assert their_drafts[: len(rounds)] == [r.draft_ids for r in rounds]
        if ending == "stop":
            assert len(rounds) == len(session.rounds) == len(theirs.acceptance_lengths)
        accepted_any |= any(r.accepted for r in rounds)
    assert accepted_any


def test_a_conversation_of_one_token_prompts_agrees(trained: Any, peer: Any) -> None:
    """The shortest context: the block at position 1 sees a single feature."""
    document = Document([3, 7, 9], [False, True, True], "d")
    batch = pack_documents([document], anchors_per_document=1, anchor_source="all")
    features = trained.target.forward_packed(batch.input_ids_T, batch.position_ids_T).features_TC
    with torch.no_grad():
        ours = fill_blocks(trained.drafter, trained.target, batch, features).hidden_NBH[0]
        block = torch.tensor([[7] + [peer.mask_token_id] * (BLOCK - 1)])
        theirs = peer(
            target_hidden=features[None, :1],
            noise_embedding=trained.target.embed(block),
            position_ids=torch.arange(1 + BLOCK)[None],
        )[0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)

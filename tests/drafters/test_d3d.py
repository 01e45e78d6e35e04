"""The D3D core against references: one block at a time through HF's own attention, HF's own loss, decoding with a cache."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen3Config

from drafters.batched_attention import plain_attention
from drafters.block_loss import next_token_loss
from drafters.checkpoint import file_sha256, load_drafter, save_drafter
from drafters.d3d import D3DDrafter, D3DSpec
from drafters.d3d_loss import d3d_loss
from drafters.decoding import DecodingSession, ServingDrafter, decode_round
from drafters.errors import UserError
from drafters.identity import TargetIdentity
from drafters.objectives import LossSpec, fixed_weights
from drafters.packing import Document, PackedBatch, pack_documents
from drafters.policies import FixedPolicy
from drafters.replay import replay
from drafters.verify import SamplingParams

VOCAB = 48
BLOCK = 4
MASK = VOCAB - 1
LENGTHS = [17, 12, 14]
PROMPT = 4
ANCHORS = [5, 8, 9, 15, 17 + 7, 29 + 6, 29 + 11]
"""The fourth block ends past its document."""
OWNER = [0, 0, 0, 0, 1, 2, 2]
STARTS = [0, 17, 29]


def make_drafter(kind: str, tied: bool = False, shift: bool = False) -> D3DDrafter:
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.d3d_config = {"block_size": BLOCK, "mask_token_id": MASK, "shift": shift}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return D3DDrafter(AutoModelForCausalLM.from_config(config).double().eval())


@pytest.fixture(params=[("llama", False), ("qwen3", False), ("llama", True)], ids=str)
def drafter(request: pytest.FixtureRequest) -> D3DDrafter:
    kind, shift = request.param
    return make_drafter(kind, shift=shift)


def make_batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(5)
    documents = [
        Document(
            torch.randint(0, MASK, (length,), generator=generator).tolist(),
            [i >= PROMPT for i in range(length)],
            f"d{length}",
        )
        for length in LENGTHS
    ]
    packed = pack_documents(documents, anchors_per_document=0, anchor_source="all")
    return replace(packed, anchors_N=torch.tensor(ANCHORS))


def with_token(batch: PackedBatch, index: int) -> PackedBatch:
    ids = batch.input_ids_T.clone()
    ids[index] = (ids[index] + 17) % MASK
    return replace(batch, input_ids_T=ids)


def one_block(drafter: D3DDrafter, batch: PackedBatch, number: int) -> torch.Tensor:
    """Hidden states [B, H] that predict the slots of one block behind its own prefix, by HF's SDPA and a mask written out."""
    first, anchor = STARTS[OWNER[number]], ANCHORS[number]
    prefix = batch.input_ids_T[first:anchor]
    block = torch.full((BLOCK,), MASK)
    block[0] = batch.input_ids_T[anchor]
    seen = torch.ones(len(prefix) + BLOCK, len(prefix) + BLOCK, dtype=torch.bool).tril()
    seen[-BLOCK:, -BLOCK:] = True
    with plain_attention(drafter.lm):
        output = drafter.lm.model(
            input_ids=torch.cat([prefix, block])[None],
            attention_mask=seen[None, None],
            position_ids=torch.arange(len(seen))[None],
            use_cache=False,
        )
    hidden: torch.Tensor = output.last_hidden_state[0, -BLOCK:]
    if not drafter.spec.shift:
        return hidden
    # the row before predicts; nothing predicts the anchor
    return torch.stack([torch.zeros_like(hidden[0]), *hidden[:-1]])


def served(batch: PackedBatch, number: int) -> Iterator[tuple[int, int]]:
    """(slot, token) pairs that count in a block: response tokens of its own document."""
    end = STARTS[OWNER[number]] + LENGTHS[OWNER[number]]
    for slot in range(1, BLOCK):
        if ANCHORS[number] + slot < end:
            yield slot, int(batch.input_ids_T[ANCHORS[number] + slot])


def test_each_token_reaches_exactly_the_blocks_anchored_at_or_after_it(drafter: D3DDrafter) -> None:
    batch = make_batch()
    with torch.no_grad():
        base = drafter(batch).hidden_NBH
        for token in range(batch.num_tokens):
            moved = (drafter(with_token(batch, token)).hidden_NBH - base).abs().amax(dim=(1, 2))
            for n, anchor in enumerate(ANCHORS):
                if STARTS[OWNER[n]] <= token <= anchor:
                    assert moved[n] > 1e-4, f"token {token} should reach block {n}"
                else:
                    assert moved[n] == 0, f"token {token} leaked into block {n}"


def test_blocks_and_documents_do_not_depend_on_each_other(drafter: D3DDrafter) -> None:
    batch = make_batch()
    with torch.no_grad():
        together = drafter(batch)
        for n, anchor in enumerate(ANCHORS):
            alone = drafter(replace(batch, anchors_N=torch.tensor([anchor])))
            torch.testing.assert_close(alone.hidden_NBH[0], together.hidden_NBH[n], atol=1e-6, rtol=0)
            torch.testing.assert_close(
                one_block(drafter, batch, n)[1:], together.hidden_NBH[n, 1:], atol=1e-5, rtol=0
            )
        for start, length in zip(STARTS, LENGTHS, strict=True):
            rows = slice(start, start + length)
            with plain_attention(drafter.lm):
                plain = drafter.lm.model(input_ids=batch.input_ids_T[rows][None]).last_hidden_state[0]
            torch.testing.assert_close(plain, together.hidden_TH[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_the_packed_loss_is_the_sum_of_its_blocks_and_of_hfs_next_token_loss(tied: bool, shift: bool) -> None:
    """Value and the gradient of every weight, the head's and the tied embedding's included."""
    drafter, batch, ar_weight = make_drafter("llama", tied, shift), make_batch(), 0.7
    spec = LossSpec(weighting="exponential", decay=1.5)
    loss = d3d_loss(drafter(batch), drafter.head_VH, batch, spec, ar_weight=ar_weight, chunk_rows=5)
    loss.value.backward()
    got = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}

    drafter.zero_grad()
    weights = fixed_weights(spec, BLOCK).double()
    total, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for n in range(len(ANCHORS)):
        logits = one_block(drafter, batch, n) @ drafter.head_VH.T
        for slot, token in served(batch, n):
            total = total + weights[slot] * F.cross_entropy(logits[slot], torch.tensor(token))
            weight_sum += float(weights[slot])
    summed, count = torch.zeros((), dtype=torch.float64), 0
    for start, length in zip(STARTS, LENGTHS, strict=True):
        ids = batch.input_ids_T[start : start + length][None]
        labels = ids.clone()
        labels[:, :PROMPT] = -100
        with plain_attention(drafter.lm):
            summed = summed + drafter.lm(input_ids=ids, labels=labels).loss * (length - PROMPT)
        count += length - PROMPT
    reference = total / weight_sum + ar_weight * summed / count
    reference.backward()
    torch.testing.assert_close(loss.value, reference, atol=1e-5, rtol=1e-5)
    assert loss.ar is not None
    torch.testing.assert_close(loss.ar.value.detach(), summed.detach() / count, atol=1e-5, rtol=1e-5)
    expected = {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}
    assert got.keys() == expected.keys() and any("embed" in name for name in got)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            got[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_without_the_next_token_loss_the_documents_still_count_through_the_blocks(
    drafter: D3DDrafter,
) -> None:
    batch = make_batch()
    output = drafter(batch)
    plain = d3d_loss(output, drafter.head_VH, batch, LossSpec(), ar_weight=0)
    both = d3d_loss(output, drafter.head_VH, batch, LossSpec(), ar_weight=2)
    assert plain.value == plain.diff.value and plain.ar is None
    ar = next_token_loss(output.hidden_TH, drafter.head_VH, batch)
    torch.testing.assert_close(both.value, plain.value + 2 * ar.value)


def test_soft_next_tokens_pull_towards_the_teacher_and_not_at_all_where_it_stands() -> None:
    """KL(p‖q) of every response token, written out; a copy of the teacher has nothing to learn."""
    drafter, batch = make_drafter("llama", shift=True), make_batch()
    teacher = copy.deepcopy(drafter)
    with torch.no_grad():
        noise = torch.randn(teacher.head_VH.shape, generator=torch.Generator().manual_seed(1))
        teacher.head_VH.add_(0.3 * noise)
        teacher_TH = teacher(batch).hidden_TH

    def ar(teacher_head_VH: torch.Tensor) -> torch.Tensor:
        loss = d3d_loss(
            drafter(batch),
            drafter.head_VH,
            batch,
            LossSpec("osd"),
            teacher_hidden_TH=teacher_TH,
            teacher_head_VH=teacher_head_VH,
        ).ar
        assert loss is not None
        return loss.value.detach()

    predicting = [
        t - 1
        for start, length in zip(STARTS, LENGTHS, strict=True)
        for t in range(start + PROMPT, start + length)
    ]
    p = (teacher_TH @ teacher.head_VH.T).log_softmax(-1)[predicting]
    q = (drafter(batch).hidden_TH @ drafter.head_VH.T).log_softmax(-1)[predicting]
    expected = (p.exp() * (p - q)).sum(-1).mean()
    assert expected > 0.01
    torch.testing.assert_close(ar(teacher.head_VH), expected.detach(), atol=1e-6, rtol=1e-5)
    assert ar(drafter.head_VH).abs() < 1e-6


def test_the_prefix_is_computed_once(drafter: D3DDrafter) -> None:
    """Rows of the linear layers: the documents and the block slots, however many blocks share a prefix."""
    batch = make_batch()
    per_row = sum(
        2 * module.weight.numel()
        for name, module in drafter.lm.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        drafter(batch)
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert products == (sum(LENGTHS) + len(ANCHORS) * BLOCK) * per_row


def test_drafting_with_a_cache_gives_the_blocks_that_were_trained(drafter: D3DDrafter) -> None:
    """Two requests of different lengths at once, round after round, as many tokens committed as it happens."""
    batch = make_batch()
    first, second = batch.input_ids_T[:17], batch.input_ids_T[17:29]
    caches = [DynamicCache(config=drafter.config) for _ in range(2)]
    encoded = [0, 0]
    with torch.no_grad():
        for anchors in ((5, 4), (6, 7), (10, 8), (14, 11)):
            committed = [
                text[start : anchor + 1]
                for text, start, anchor in zip((first, second), encoded, anchors, strict=True)
            ]
            drafted = drafter.draft(committed, encoded, caches)
            trained = drafter(replace(batch, anchors_N=torch.tensor([anchors[0], 17 + anchors[1]])))
            torch.testing.assert_close(drafted, trained.hidden_NBH, atol=1e-5, rtol=0)
            encoded = list(anchors)
            assert [cache.get_seq_length() for cache in caches] == encoded


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_size": 1, "mask_token_id": 3}, "block_size"),
        ({"block_size": 128, "mask_token_id": 3}, "context of 128"),
        ({"block_size": 4, "mask_token_id": VOCAB}, "mask_token_id"),
        ({"block_size": 4}, "mask_token_id is missing"),
        ({"block_size": 4, "mask_token_id": 1, "shift": "false"}, "shift"),
        (None, "not a D3D drafter"),
    ],
)
def test_a_config_that_cannot_draft_is_refused(fields: dict[str, Any] | None, said: str) -> None:
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=128)
    config.d3d_config = fields
    with pytest.raises(UserError, match=said):
        D3DSpec.from_config(config)


def decode(learnt: Any, documents: Sequence[Document]) -> list[DecodingSession]:
    """All documents' prompts in one batch of requests, greedily."""
    sessions = [
        DecodingSession(
            learnt.target,
            d.token_ids[: d.response_mask.index(True)],
            sampling=SamplingParams(),
            max_new_tokens=sum(d.response_mask),
        )
        for d in documents
    ]
    serving = ServingDrafter(learnt.drafter, FixedPolicy(), "d3d")
    while running := [session for session in sessions if not session.finished]:
        assert not decode_round(running, serving)
    return sessions


def test_greedy_decoding_is_the_targets_own_and_replay_foretells_it(learnt: Any) -> None:
    sessions = decode(learnt, learnt.documents)
    replayed = replay(learnt.drafter, learnt.target, learnt.documents)
    accepted = set()
    for document, session, foretold in zip(learnt.documents, sessions, replayed, strict=True):
        first = document.response_mask.index(True)
        assert session.output_ids == document.token_ids[first:]
        assert [r.start for r in session.rounds] == foretold.round_starts
        assert sum(r.committed for r in session.rounds) == foretold.committed
        accepted |= {r.accepted for r in session.rounds}
    assert {0, 4} <= accepted, "rounds should accept nothing, and everything, for this to mean much"


def test_a_swap_between_families_keeps_the_text(learnt: Any, make_trained: Callable[[str], Any]) -> None:
    document = learnt.documents[0]
    first = document.response_mask.index(True)
    session = DecodingSession(
        learnt.target,
        document.token_ids[:first],
        sampling=SamplingParams(),
        max_new_tokens=sum(document.response_mask),
    )
    drafters = [
        ServingDrafter(learnt.drafter, FixedPolicy(), "d3d"),
        ServingDrafter(make_trained("llama").drafter, FixedPolicy(), "dflash"),
    ]
    session.prefill()
    while not session.finished:
        session.step(drafters[len(session.rounds) // 2 % 2])
    assert session.output_ids == document.token_ids[first:]
    assert {r.drafter_version for r in session.rounds} == {"d3d", "dflash"}


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_an_ordinary_causal_lm(tied: bool, tmp_path: Path) -> None:
    drafter, batch = make_drafter("qwen3", tied), make_batch()
    identity = TargetIdentity("tiny", "r", "a" * 64)
    directory = save_drafter(
        tmp_path / "d", drafter, identity=identity, drafter_version="v1", dtype=torch.float64
    )
    loaded = load_drafter(directory, dtype=torch.float64)
    assert isinstance(loaded.drafter, D3DDrafter) and loaded.manifest["family"] == "d3d"
    assert loaded.drafter.spec == drafter.spec
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    for read in (loaded.drafter.lm, plain):
        for name, weight in drafter.lm.state_dict().items():
            assert torch.equal(read.state_dict()[name], weight), name
    with torch.no_grad():
        # equal weights elsewhere in memory may be added up in another order
        torch.testing.assert_close(
            loaded.drafter(batch).hidden_NBH, drafter(batch).hidden_NBH, atol=1e-12, rtol=0
        )
        ids = batch.input_ids_T[:17][None]
        with plain_attention(drafter.lm):
            torch.testing.assert_close(plain(ids).logits, drafter.lm(ids).logits, atol=1e-12, rtol=0)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    directory = save_drafter(
        tmp_path / "d",
        make_drafter("llama"),
        identity=TargetIdentity("tiny", "r", "a" * 64),
        drafter_version="v1",
    )
    weights, manifest = directory / "model.safetensors", directory / "manifest.json"
    tensors = load_file(weights)

    def damaged(change: Callable[[dict[str, torch.Tensor]], object]) -> str:
        copied = dict(tensors)
        change(copied)
        save_file(copied, weights, metadata={"format": "pt"})
        content = json.loads(manifest.read_text())
        content["files"]["model.safetensors"] = file_sha256(weights)
        manifest.write_text(json.dumps(content))
        with pytest.raises(UserError) as raised:
            load_drafter(directory)
        return str(raised.value)

    name = "model.layers.1.mlp.up_proj.weight"
    assert name in damaged(lambda t: t.pop(name))
    assert "extra.weight" in damaged(lambda t: t.update({"extra.weight": torch.ones(2)}))
    assert name in damaged(lambda t: t.update({name: torch.full_like(t[name], float("nan"))}))
    assert damaged(lambda t: t.update({name: t[name][:-1].clone()}))

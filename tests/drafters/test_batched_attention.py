"""The target's own attention: ragged rows equal request by request, folded heads equal HF's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from drafters.batched_attention import install, plain_attention, runs_batched
from drafters.decoding import DecodingSession, ServingDrafter, decode_round
from drafters.policies import FixedPolicy, LengthPolicy, Load
from drafters.target import Target
from drafters.verify import SamplingParams


def pieces(make_prompt: Callable[..., list[int]], seed: int, lengths: list[int]) -> list[torch.Tensor]:
    ids = make_prompt(seed, sum(lengths))
    return list(torch.tensor(ids).split(lengths))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_ragged_rows_equal_the_packed_forward(
    kind: str, make_target: Callable[..., Target], make_prompt: Callable[..., list[int]]
) -> None:
    target = make_target(kind, torch.float64)
    sequences = [
        pieces(make_prompt, seed, lengths) for seed, lengths in enumerate(([7, 1, 4], [3, 5, 1], [1, 1, 20]))
    ]
    caches = [DynamicCache(config=target.config) for _ in sequences]
    starts = [0, 0, 0]
    outputs: list[list[Any]] = [[], [], []]
    # the sequences enter at different times, so that a prompt is read beside running requests
    for turn, present in enumerate(([0], [0, 1], [2, 0, 1], [1, 2], [2])):
        rows = [sequences[i][len(outputs[i])] for i in present]
        got = target.forward_cached(rows, [starts[i] for i in present], [caches[i] for i in present])
        for i, row, output in zip(present, rows, got, strict=True):
            outputs[i].append(output)
            starts[i] += row.numel()
        assert len(got) == len(present), turn
    for sequence, parts in zip(sequences, outputs, strict=True):
        ids = torch.cat(sequence)
        expected = target.forward_packed(ids, torch.arange(ids.numel()))
        torch.testing.assert_close(torch.cat([p.hidden_TH for p in parts]), expected.hidden_TH)
        torch.testing.assert_close(torch.cat([p.features_TC for p in parts]), expected.features_TC)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_generation_of_a_padded_batch_is_hfs_own(
    kind: str, make_target: Callable[..., Target], make_prompt: Callable[..., list[int]]
) -> None:
    model = make_target(kind, torch.float64).model
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    prompts = [make_prompt(seed, length) for seed, length in enumerate((3, 25, 11))]
    ids = torch.tensor([[0] * (25 - len(p)) + p for p in prompts])
    options: dict[str, Any] = {
        "attention_mask": torch.tensor([[0] * (25 - len(p)) + [1] * len(p) for p in prompts]),
        "max_new_tokens": 12,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    assert runs_batched(model)
    ours = model.generate(ids, **options)
    with plain_attention(model):
        assert not runs_batched(model)
        theirs = model.generate(ids, **options)
    assert runs_batched(model)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits))


class ByPosition(FixedPolicy):
    """A verify_len that differs from request to request and from round to round."""

    def verify_len(self, hidden_NBH: torch.Tensor, embeddings_NBH: torch.Tensor, load: Load) -> torch.Tensor:
        # of the embeddings, which unlike hidden states do not depend on the batch at all
        return 1 + (embeddings_NBH[:, 0, 0] * 1e4).long().abs() % hidden_NBH.shape[1]


@pytest.mark.parametrize("policy", [FixedPolicy(), ByPosition()])
def test_requests_decoded_together_are_those_decoded_alone(trained: Any, policy: LengthPolicy) -> None:
    serving = ServingDrafter(trained.drafter, policy, "v1")
    sessions = [
        DecodingSession(trained.target, prompt, sampling=SamplingParams(), max_new_tokens=10 + 5 * i)
        for i, prompt in enumerate(trained.prompts[:4])
    ]
    rounds = 0
    while any(not s.finished for s in sessions):
        # one more joins every third round, while the others are under way
        present = [s for i, s in enumerate(sessions) if i <= rounds // 3 and not s.finished]
        if present:
            decode_round(present, serving)
        rounds += 1
    for i, session in enumerate(sessions):
        assert session.output_ids == trained.texts[i][: 10 + 5 * i]
        alone = DecodingSession(
            trained.target, trained.prompts[i], sampling=SamplingParams(), max_new_tokens=10 + 5 * i
        )
        alone.run(serving)
        assert [r.draft_ids for r in session.rounds] == [r.draft_ids for r in alone.rounds]
        assert [r.verify_len for r in session.rounds] == [r.verify_len for r in alone.rounds]
    assert any(r.accepted for s in sessions for r in s.rounds)


def test_one_session_that_fails_leaves_the_others_alone(trained: Any) -> None:
    serving = ServingDrafter(trained.drafter, FixedPolicy(), "v1")
    sessions = [
        DecodingSession(trained.target, prompt, sampling=SamplingParams(), max_new_tokens=12)
        for prompt in trained.prompts[:3]
    ]
    assert decode_round(sessions, serving) == {}

    def broken(*_: Any) -> Any:
        raise RuntimeError("degenerate distribution")

    sessions[1]._verify = broken  # type: ignore[method-assign]
    failed = decode_round(sessions, serving)
    assert list(failed) == [sessions[1]]
    with pytest.raises(RuntimeError, match="degenerate"):
        sessions[1].step(serving)
    while not (sessions[0].finished and sessions[2].finished):
        assert not decode_round([s for s in (sessions[0], sessions[2]) if not s.finished], serving)
    assert [sessions[i].output_ids for i in (0, 2)] == [trained.texts[i][:12] for i in (0, 2)]


def test_sliding_windows_are_left_to_hf(make_target: Callable[..., Target]) -> None:
    model = copy.deepcopy(make_target("qwen3").model)
    model.set_attn_implementation("sdpa")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    install(model)
    assert not runs_batched(model)


def test_a_target_on_other_attention_decodes_one_by_one(
    make_target: Callable[..., Target], make_prompt: Callable[..., list[int]]
) -> None:
    shared = make_target("llama", torch.float64)
    model = copy.deepcopy(shared.model)
    model.set_attn_implementation("eager")
    target = Target(model, shared.identity, [0, 1])
    assert not runs_batched(model)
    ids = [torch.tensor(make_prompt(seed, 6)) for seed in range(2)]
    caches = [DynamicCache(config=target.config) for _ in ids]
    for begin, end in ((0, 4), (4, 6)):
        outputs = target.forward_cached([i[begin:end] for i in ids], [begin, begin], caches)
    for row, output in zip(ids, outputs, strict=True):
        expected = target.forward_packed(row, torch.arange(6))
        torch.testing.assert_close(output.hidden_TH, expected.hidden_TH[4:])

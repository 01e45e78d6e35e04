"""Regeneration by a tiny random target, and multi-turn logic by a scripted one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from datamodules.chat import render_conversation, render_prompt
from datamodules.generation import stop_token_ids
from datamodules.prompts import Conversation
from datamodules.regenerate import RegenerationReport, regenerate
from datamodules.responses import ROWS_FILE, ResponseRow, ResponseStore, to_document
from drafters.errors import UserError
from drafters.identity import TargetIdentity, tokenizer_hash
from tests.datamodules.chat_fixtures import (
    CHATML,
    QWEN3,
    assistant,
    byte_level_tokenizer,
    masked_runs,
    system,
    user,
)

TOKENIZER = byte_level_tokenizer(CHATML)
TARGET = TargetIdentity("tiny", "r1", tokenizer_hash(TOKENIZER))
MAX_NEW_TOKENS = 24


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Random weights, fp32; ends its answers at tokens that it is known to produce, besides the usual one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        attention_dropout=0.5,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    seen = greedy(model, render_prompt(TOKENIZER, CONVERSATIONS[0].messages), [], MAX_NEW_TOKENS)
    model.generation_config = GenerationConfig(eos_token_id=[seen[9], TOKENIZER.eos_token_id])
    return model


def make(id: str, *turns: str, domain: str = "chat") -> Conversation:
    return Conversation(id, domain, [user(turn) for turn in turns], "test")


CONVERSATIONS = [
    make(f"c{i}", "hello " * (1 + 3 * i % 7) + str(i), domain="math" if i % 2 else "chat") for i in range(10)
]


def greedy(model: LlamaForCausalLM, prompt: list[int], stop: Sequence[int], count: int) -> list[int]:
    """Argmax decoding without cache, padding or `generate`."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] in stop:
                break
    return ids[len(prompt) :]


def run(
    model: Any,
    directory: Path,
    conversations: Sequence[Conversation] = CONVERSATIONS,
    tokenizer: Any = TOKENIZER,
    **changes: Any,
) -> RegenerationReport:
    settings: dict[str, Any] = {
        "target": replace(TARGET, tokenizer_hash=tokenizer_hash(tokenizer)),
        "max_new_tokens": MAX_NEW_TOKENS,
        "batch_size": 4,
    }
    return regenerate(model, tokenizer, conversations, ResponseStore(directory), **(settings | changes))


def rows(directory: Path) -> dict[str, ResponseRow]:
    return {row.document_id: row for row in ResponseStore(directory).rows()}


def test_batched_answers_equal_one_at_a_time_greedy(model: LlamaForCausalLM, tmp_path: Path) -> None:
    report = run(model, tmp_path)
    stop = stop_token_ids(model, TOKENIZER)
    found = rows(tmp_path)
    assert set(found) == {c.id for c in CONVERSATIONS}
    for conversation in CONVERSATIONS:
        row = found[conversation.id]
        assert row.prompt_ids == render_prompt(TOKENIZER, conversation.messages)
        assert row.response_ids == greedy(model, row.prompt_ids, stop, MAX_NEW_TOKENS)
        assert row.domain == conversation.domain
        ended = row.response_ids[-1] in stop
        assert row.finish_reason == ("stop" if ended else "length")
        assert ended or len(row.response_ids) == MAX_NEW_TOKENS
        assert not any(token in stop for token in row.response_ids[:-1])
    reasons = [row.finish_reason for row in found.values()]
    assert {"stop", "length"} == set(reasons), "the test needs both kinds"
    assert report.generated == len(CONVERSATIONS)
    assert report.truncated == reasons.count("length")
    assert report.new_tokens == sum(len(row.response_ids) for row in found.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_run_continues_to_the_same_store(
    model: LlamaForCausalLM, tmp_path: Path, temperature: float
) -> None:
    run(model, tmp_path / "whole", temperature=temperature, top_p=0.95, seed=5)

    def fail_late(report: RegenerationReport) -> None:
        if report.generated == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(
            model,
            tmp_path / "cut",
            temperature=temperature,
            top_p=0.95,
            seed=5,
            on_progress=fail_late,
        )
    path = tmp_path / "cut" / ROWS_FILE
    assert len(path.read_bytes().splitlines()) == 4
    torn = (tmp_path / "whole" / ROWS_FILE).read_bytes().splitlines(keepends=True)[4]
    path.write_bytes(path.read_bytes() + torn[:-20])
    report = run(model, tmp_path / "cut", temperature=temperature, top_p=0.95, seed=5)
    assert (report.already_done, report.generated) == (4, 6)
    assert path.read_bytes() == (tmp_path / "whole" / ROWS_FILE).read_bytes()
    again = run(model, tmp_path / "cut", temperature=temperature, top_p=0.95, seed=5)
    assert (again.already_done, again.generated) == (10, 0)


def test_sampling_depends_on_the_seed_and_leaves_the_random_state_alone(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    run(model, tmp_path / "a", temperature=1.0, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12)
    run(model, tmp_path / "b", temperature=1.0, seed=1)
    run(model, tmp_path / "c", temperature=1.0, seed=2)
    answers = [[row.response_ids for row in ResponseStore(tmp_path / name).rows()] for name in "abc"]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]


def test_greedy_settings_differ_in_nothing(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run(model, tmp_path, seed=1)
    assert run(model, tmp_path, seed=2, top_k=5).already_done == len(CONVERSATIONS)


def test_top_k_one_is_greedy(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run(model, tmp_path / "sampled", temperature=1.0, top_k=1)
    run(model, tmp_path / "greedy")
    sampled, greedy_rows = rows(tmp_path / "sampled"), rows(tmp_path / "greedy")
    assert {k: r.response_ids for k, r in sampled.items()} == {
        k: r.response_ids for k, r in greedy_rows.items()
    }


def test_knobs_of_the_model_do_not_bend_the_distribution(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run(model, tmp_path / "plain")
    plain = model.generation_config
    knobs = GenerationConfig(eos_token_id=plain.eos_token_id, repetition_penalty=3.0, min_length=99)
    model.generation_config = knobs
    model.train()
    try:
        run(model, tmp_path / "knobs")
        assert model.generation_config is knobs
        assert model.training
    finally:
        model.generation_config = plain
        model.eval()
    assert rows(tmp_path / "knobs") == rows(tmp_path / "plain")


def test_one_end_token_may_be_given_as_an_int(model: LlamaForCausalLM) -> None:
    config = model.generation_config
    try:
        model.generation_config = GenerationConfig(eos_token_id=3)
        assert stop_token_ids(model, TOKENIZER) == [3, TOKENIZER.eos_token_id]
        model.generation_config = GenerationConfig()
        assert stop_token_ids(model, TOKENIZER) == [TOKENIZER.eos_token_id]
        with pytest.raises(UserError, match="end token"):
            stop_token_ids(model, SimpleNamespace(eos_token_id=None))
    finally:
        model.generation_config = config


def test_refuses_another_target_or_tokenizer(model: LlamaForCausalLM, tmp_path: Path) -> None:
    run(model, tmp_path)
    before = (tmp_path / ROWS_FILE).read_bytes()
    with pytest.raises(UserError, match="responses of another target"):
        run(model, tmp_path, target=replace(TARGET, revision="r2"))
    with pytest.raises(UserError, match="sampling"):
        run(model, tmp_path, temperature=0.7)
    with pytest.raises(UserError, match="tokenizer is not the one"):
        run(model, tmp_path, target=replace(TARGET, tokenizer_hash="0" * 64))
    assert (tmp_path / ROWS_FILE).read_bytes() == before


def test_long_prompts_are_skipped_or_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    lengths = {c.id: len(render_prompt(TOKENIZER, c.messages)) for c in CONVERSATIONS}
    cap = sorted(lengths.values())[4]
    report = run(model, tmp_path / "skip", max_prompt_tokens=cap)
    kept = {key for key, length in lengths.items() if length <= cap}
    assert set(rows(tmp_path / "skip")) == kept
    assert report.skipped_long == len(CONVERSATIONS) - len(kept) > 0
    with pytest.raises(UserError, match=f"the limit is {cap}"):
        run(model, tmp_path / "error", max_prompt_tokens=cap, on_long_prompt="error")
    with pytest.raises(UserError, match="nothing to generate"):
        run(model, tmp_path / "none", max_prompt_tokens=1)


def test_prompts_leave_room_for_the_answer(model: LlamaForCausalLM, tmp_path: Path) -> None:
    long = make("long", "x" * 215)
    assert 256 - MAX_NEW_TOKENS < len(render_prompt(TOKENIZER, long.messages)) < 256
    assert run(model, tmp_path, [long, CONVERSATIONS[0]]).skipped_long == 1
    with pytest.raises(UserError, match="max_new_tokens: 256"):
        run(model, tmp_path / "b", max_new_tokens=256)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 0},
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_k": -1},
        {"conversations": []},
        {"conversations": [make("a", "one"), make("a", "two")]},
        {"conversations": [Conversation("a", "d", [assistant("hello")], "test")]},
    ],
    ids=str,
)
def test_bad_arguments(model: LlamaForCausalLM, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        run(model, tmp_path, **changes)


class ScriptedModel:
    """Gives answers from a table keyed by the text of the last user message."""

    device = torch.device("cpu")
    training = False
    config = LlamaConfig(max_position_embeddings=512)

    def __init__(self, tokenizer: Any, answers: dict[str, list[int]]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
        self.prompts: list[list[int]] = []

    def train(self, mode: bool = True) -> None:
        pass

    def eval(self) -> None:
        pass

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> torch.Tensor:
        limit = self.generation_config.max_new_tokens
        out = []
        for ids, mask, positions in zip(input_ids, attention_mask, position_ids, strict=True):
            assert mask.tolist() == sorted(mask.tolist()), "padding belongs on the left"
            assert positions[mask.bool()].tolist() == list(range(int(mask.sum())))
            prompt = ids[mask.bool()].tolist()
            self.prompts.append(prompt)
            asked = self.tokenizer.decode(prompt).split("user\n")[-1].split("<|im_end|>")[0]
            out.append(self.answers[asked][:limit])
        width = max(map(len, out))
        pad = self.generation_config.pad_token_id
        answers = torch.tensor([ids + [pad] * (width - len(ids)) for ids in out])
        return torch.cat([input_ids, answers], dim=1)


def spoken(tokenizer: Any, text: str, *, ended: bool = True) -> list[int]:
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*ids, tokenizer.eos_token_id] if ended else ids


def test_turns_become_one_document(tmp_path: Path) -> None:
    model = ScriptedModel(
        TOKENIZER,
        {"q1": spoken(TOKENIZER, "hello"), "q2": spoken(TOKENIZER, "he llo"), "r": spoken(TOKENIZER, "")},
    )
    # A given answer is replaced by the target's own.
    talk = Conversation(
        "talk",
        "chat",
        [system("be kind"), user("q1"), assistant("not this"), user("q2")],
        "test",
    )
    report = run(model, tmp_path, [talk, make("short", "r")])
    found = rows(tmp_path)
    assert list(found) == ["short", "talk"]
    document = to_document(found["talk"])
    said = [
        system("be kind"),
        user("q1"),
        assistant("hello"),
        user("q2"),
        assistant("he llo"),
    ]
    ids, mask = render_conversation(TOKENIZER, said)
    # The conversation ends with what was generated; the template's last newline is not part of it.
    assert document.token_ids == ids[:-1]
    assert document.response_mask == mask[:-1]
    assert found["short"].response_ids == [TOKENIZER.eos_token_id]
    assert found["short"].response_spans is None
    assert (report.generated, report.split, report.shortened) == (2, 0, 0)
    assert report.new_tokens == mask.count(True) + 1


def test_an_answer_that_does_not_tokenise_back_starts_a_new_document(tmp_path: Path) -> None:
    loose = [TOKENIZER.convert_tokens_to_ids(c) for c in "hello"] + [TOKENIZER.eos_token_id]
    assert loose != spoken(TOKENIZER, "hello")
    model = ScriptedModel(
        TOKENIZER, {"q1": loose, "q2": spoken(TOKENIZER, "he"), "q3": spoken(TOKENIZER, "ll")}
    )
    report = run(model, tmp_path, [make("talk", "q1", "q2", "q3")])
    found = rows(tmp_path)
    assert list(found) == ["talk", "talk#turn1"]
    assert {row.conversation_key for row in found.values()} == {"talk"}
    assert found["talk"].response_ids == loose
    second = found["talk#turn1"]
    history = [user("q1"), assistant("hello"), user("q2")]
    assert second.prompt_ids == render_prompt(TOKENIZER, history)
    document = to_document(second)
    assert masked_runs(TOKENIZER, document.token_ids, document.response_mask) == [
        "he<|im_end|>",
        "ll<|im_end|>",
    ]
    assert (report.generated, report.split) == (1, 1)


def test_a_template_that_drops_thoughts_splits_the_turns(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(QWEN3)
    thought = spoken(tokenizer, "<think>\nhe\n</think>\n\nhello")
    model = ScriptedModel(tokenizer, {"q1": thought, "q2": thought})
    run(model, tmp_path, [make("talk", "q1", "q2")], tokenizer)
    found = rows(tmp_path)
    assert list(found) == ["talk", "talk#turn1"]
    assert all(row.response_ids == thought for row in found.values())
    assert "think" not in tokenizer.decode(found["talk#turn1"].prompt_ids)


def test_a_truncated_answer_or_a_long_history_ends_the_conversation(tmp_path: Path) -> None:
    answers = {
        "long": spoken(TOKENIZER, "abcdefgh" * 4, ended=False),
        "q": spoken(TOKENIZER, "abcdefgh"),
    }
    model = ScriptedModel(TOKENIZER, answers)
    report = run(model, tmp_path / "a", [make("cut", "long", "q"), make("fine", "q", "q")])
    found = rows(tmp_path / "a")
    assert found["cut"].finish_reason == "length"
    assert len(found["cut"].response_ids) == MAX_NEW_TOKENS
    assert found["fine"].finish_reason == "stop"
    assert found["fine"].response_spans is not None
    assert (report.truncated, report.shortened) == (1, 1)

    cap = len(render_prompt(TOKENIZER, [user("q")]))
    report = run(model, tmp_path / "b", [make("fine", "q", "q")], max_prompt_tokens=cap)
    assert rows(tmp_path / "b")["fine"].response_ids == answers["q"]
    assert (report.shortened, report.skipped_long) == (1, 0)


def test_batches_go_by_prompt_length(tmp_path: Path) -> None:
    model = ScriptedModel(TOKENIZER, {c * n: spoken(TOKENIZER, "he") for c in "ab" for n in (1, 9, 5)})
    conversations = [make(c * n, c * n) for n in (9, 1, 5) for c in "ba"]
    run(model, tmp_path, conversations, batch_size=2)
    assert list(rows(tmp_path)) == ["a", "b", "aaaaa", "bbbbb", "aaaaaaaaa", "bbbbbbbbb"]
    assert [len(p) for p in model.prompts] == sorted(len(p) for p in model.prompts)

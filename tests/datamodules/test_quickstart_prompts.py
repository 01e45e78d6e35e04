"""The shipped quickstart prompts: schema, counts, and separation of training from held-out."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PROMPTS = Path(__file__).resolve().parents[2] / "configs" / "quickstart_prompts"
MINIMUM_TRAIN = {"math": 440, "chat": 500, "code": 220}
DOMAINS = tuple(MINIMUM_TRAIN)
MINIMUM_HELDOUT_PER_DOMAIN = 16
NGRAM = 5
MAX_JACCARD = 0.5


@dataclass(frozen=True)
class Prompt:
    prompt_id: str
    domain: str
    content: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\w+", self.content.lower()))

    @property
    def ngrams(self) -> set[tuple[str, ...]]:
        words = self.words
        return {words[i : i + NGRAM] for i in range(len(words) - NGRAM + 1)}

    @property
    def shape(self) -> tuple[str, ...]:
        """The words that are left once numbers and names are taken out."""
        text = re.sub(r"\d+", " ", self.content)
        # A capital that opens a sentence says nothing; elsewhere it is most likely a name.
        text = re.sub(r"(?<=[\w,;:'\"] )[A-Z]\w*", " ", text)
        return tuple(re.findall(r"\w+", text.lower()))


@cache
def load(name: str) -> tuple[Prompt, ...]:
    prompts = []
    for line in (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert set(row) == {"id", "domain", "messages"}, line
        assert len(row["messages"]) == 1, line
        message = row["messages"][0]
        assert set(message) == {"role", "content"}, line
        assert message["role"] == "user", line
        assert isinstance(message["content"], str), line
        assert message["content"].strip(), line
        prompts.append(Prompt(row["id"], row["domain"], message["content"]))
    return tuple(prompts)


def train() -> list[Prompt]:
    return [prompt for domain in DOMAINS for prompt in load(domain)]


def jaccard(left: Prompt, right: Prompt) -> float:
    a, b = set(left.words), set(right.words)
    return len(a & b) / len(a | b)


@pytest.mark.parametrize("domain", DOMAINS)
def test_counts_and_domains(domain: str) -> None:
    prompts = load(domain)
    heldout = [prompt for prompt in load("heldout") if prompt.domain == domain]
    assert len(prompts) >= MINIMUM_TRAIN[domain]
    assert {prompt.domain for prompt in prompts} == {domain}
    assert len(heldout) >= MINIMUM_HELDOUT_PER_DOMAIN
    assert all(prompt.prompt_id.startswith(f"heldout-{domain}-") for prompt in heldout)
    assert all(prompt.prompt_id.startswith(f"{domain}-") for prompt in prompts)


def test_heldout_covers_exactly_the_training_domains() -> None:
    assert {prompt.domain for prompt in load("heldout")} == set(DOMAINS)
    assert len(load("heldout")) >= 24


def test_ids_and_texts_are_unique_across_files() -> None:
    prompts = [*train(), *load("heldout")]
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert len({prompt.words for prompt in prompts}) == len(prompts)


def test_prompts_are_short() -> None:
    lengths = {p.prompt_id: len(p.content.split()) for p in [*train(), *load("heldout")]}
    assert {name: n for name, n in lengths.items() if not 8 <= n <= 45} == {}


def test_heldout_shares_no_ngram_with_training() -> None:
    sources: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for prompt in train():
        for ngram in prompt.ngrams:
            sources[ngram].append(prompt.prompt_id)
    shared = {
        (prompt.prompt_id, " ".join(ngram)): sources[ngram]
        for prompt in load("heldout")
        for ngram in prompt.ngrams
        if ngram in sources
    }
    assert shared == {}


def test_heldout_word_overlap_with_training_is_low() -> None:
    close = [
        (held.prompt_id, seen.prompt_id)
        for held in load("heldout")
        for seen in train()
        if jaccard(held, seen) > MAX_JACCARD
    ]
    assert close == []


@pytest.mark.parametrize("name", [*DOMAINS, "heldout"])
def test_no_two_prompts_fill_the_same_template(name: str) -> None:
    by_shape: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for prompt in load(name):
        by_shape[prompt.shape].append(prompt.prompt_id)
    assert [ids for ids in by_shape.values() if len(ids) > 1] == []

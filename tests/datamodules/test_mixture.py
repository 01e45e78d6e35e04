"""The weighted mixture and the held-out split."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from datamodules.mixture import (
    Mixture,
    WeightedSource,
    load_mixture,
    prompt_fingerprint,
    split_by_hash,
)
from datamodules.prompts import Conversation, SourceSpec
from drafters.errors import UserError


def conversation(text: str, *, id: str | None = None, answer: str | None = None) -> Conversation:
    messages = [{"role": "user", "content": text}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return Conversation(id or text, "default", messages, "test")


def source(name: str, weight: float, count: int) -> WeightedSource:
    return WeightedSource(name, weight, [conversation(f"{name} {i}") for i in range(count)])


def ids(mixture: Mixture) -> list[str]:
    return [c.id for c in mixture.build().conversations]


def test_every_prefix_keeps_the_proportions() -> None:
    weights = {"a": 5.0, "b": 2.0, "c": 1.5, "d": 0.5}
    mixture = Mixture([source(n, w, 400) for n, w in weights.items()], limit=500)
    counts: Counter[str] = Counter()
    for n, item in enumerate(ids(mixture), start=1):
        counts[item[0]] += 1
        for name, weight in weights.items():
            share = n * weight / 9.0
            assert share - 2 < counts[name] < share + 1
    assert counts == mixture.build().taken


def test_nothing_is_lost_or_repeated_when_sources_run_out() -> None:
    mixture = Mixture([source("a", 10.0, 5), source("b", 1.0, 40), source("c", 1.0, 40)])
    order = ids(mixture)
    assert len(order) == len(set(order)) == 85
    # Once the heavy source is empty the two others alternate.
    rest = [item[0] for item in order[10:]]
    assert all(x != y for x, y in pairwise(rest))


def test_the_order_depends_on_the_seed_only() -> None:
    sources = [source("a", 1.0, 30), source("b", 3.0, 30)]
    assert ids(Mixture(sources, seed=1)) == ids(Mixture(sources, seed=1))
    assert ids(Mixture(sources, seed=1)) != ids(Mixture(sources, seed=2))
    assert ids(Mixture(sources, seed=1, limit=7)) == ids(Mixture(sources, seed=1))[:7]


def test_equal_prompts_are_kept_once_across_sources() -> None:
    a = WeightedSource("a", 1.0, [conversation("What  is 2+2?", id="x", answer="4")])
    b = WeightedSource(
        "b",
        1.0,
        [
            conversation("what is\n2+2?", id="y"),
            conversation("What is 2+3?", id="z"),
            conversation("what is \uff12+2?", id="w"),
        ],
    )
    result = Mixture([a, b]).build()
    assert sorted(c.id for c in result.conversations) == ["x", "z"]
    assert result.duplicates == {"a": 0, "b": 2}
    assert result.taken == {"a": 1, "b": 1}


def test_a_system_message_makes_another_prompt() -> None:
    plain = conversation("hi")
    with_system = Conversation(
        "s", "default", [{"role": "system", "content": "be kind"}, *plain.messages], "test"
    )
    assert prompt_fingerprint(plain) != prompt_fingerprint(with_system)


def test_ids_that_collide_between_sources_stay_apart() -> None:
    a = WeightedSource("a", 1.0, [conversation("one", id="0")])
    b = WeightedSource("b", 1.0, [conversation("two", id="0")])
    assert sorted(ids(Mixture([a, b]))) == ["0", "b/0"]
    twice = WeightedSource("c", 1.0, [conversation("three", id="0"), conversation("four", id="0")])
    with pytest.raises(UserError, match="share the id"):
        Mixture([a, twice]).build()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_mixtures(weight: float) -> None:
    with pytest.raises(UserError, match="weight"):
        Mixture([source("a", weight, 1)])
    with pytest.raises(UserError, match="at least one source"):
        Mixture([])
    with pytest.raises(UserError, match="distinct names"):
        Mixture([source("a", 1.0, 1), source("a", 1.0, 1)])


def test_mixture_of_files(tmp_path: Path) -> None:
    for name in ("math", "chat"):
        rows = [json.dumps({"turns": [f"{name} {i}"], "domain": name}) for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    specs = [
        SourceSpec(path=tmp_path / "math.jsonl", weight=2.0),
        SourceSpec(path=tmp_path / "chat.jsonl", weight=1.0),
    ]
    result = load_mixture(specs, seed=3, limit=6)
    assert result.taken == {"math": 4, "chat": 2}


def test_the_split_is_a_property_of_the_prompt() -> None:
    items = [conversation(f"question {i}") for i in range(2000)]
    training, held_out = split_by_hash(items, 0.2, "salt")
    assert 320 < len(held_out) < 480
    assert sorted(c.id for c in training + held_out) == sorted(c.id for c in items)
    side = {c.id for c in held_out}
    renamed = [conversation(f"Question  {i}", id=f"other {i}", answer="x") for i in reversed(range(2000))]
    _, again = split_by_hash(renamed, 0.2, "salt")
    assert {c.id.replace("other", "question") for c in again} == side
    _, wider = split_by_hash(items, 0.4, "salt")
    assert side < {c.id for c in wider}
    _, other = split_by_hash(items, 0.2, "pepper")
    assert side != {c.id for c in other}


def test_split_limits() -> None:
    items = [conversation(str(i)) for i in range(50)]
    assert split_by_hash(items, 0.0, "s") == (items, [])
    assert split_by_hash(items, 1.0, "s") == ([], items)
    with pytest.raises(UserError, match="fraction"):
        split_by_hash(items, 1.5, "s")

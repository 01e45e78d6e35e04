"""The benchmarks known by name, and how users write others."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafters.errors import UserError
from pipeline.benchmark.catalogue import choose_benchmarks, read_catalogue

ADAFLASH = "MathQA GSM8K OpenCodeInstruct CodeAlpaca ShareGPT Blend MATH-500 AIME25"
D3D = "GSM8K MATH-500 AIME25 HumanEval MBPP LiveCodeBench-v6 MT-Bench"


def test_the_papers_benchmarks_are_there_and_each_says_how_rows_are_read() -> None:
    catalogue = read_catalogue()
    titles = {spec.title for spec in catalogue.values()}
    assert {*ADAFLASH.split(), *D3D.split(), "Spec-Bench"} <= titles
    for name, spec in catalogue.items():
        assert name == spec.title.lower() == spec.name
        ways = [spec.prompt, spec.turns, spec.conversations]
        assert sum(way is not None for way in ways) == (0 if spec.blend else 1), name
        if not spec.blend:
            assert spec.dataset and spec.split and (spec.domain or spec.domain_field), name
        if spec.prompt is not None:
            # a brace too few or too many shows when it is filled in
            fields = {part.partition("}")[0] for part in spec.prompt.replace("{{", "").split("{")[1:]}
            assert fields and "{" not in spec.prompt.format(**dict.fromkeys(fields, "x")).replace(
                "\\boxed{}", ""
            )


def test_files_keep_the_title_and_place_of_a_known_name(tmp_path: Path) -> None:
    path = tmp_path / "Own Set.jsonl"
    path.write_text('{"turns": ["a"]}\n')
    known, own, bare, hub, heldout = choose_benchmarks(
        [f"GSM8K={path}", f"own={path}", str(path), "org/sums:validation", "heldout"]
    )
    assert (known.name, known.title, known.group, known.path) == ("gsm8k", "GSM8K", "Math", path)
    assert (own.name, own.title, own.group) == ("own", "own", "")
    assert (bare.name, bare.path) == ("own set", path)
    assert (hub.dataset, hub.split, hub.prompt) == ("org/sums", "validation", None)
    assert heldout.name == "heldout"
    with pytest.raises(UserError, match="given twice"):
        choose_benchmarks(["gsm8k", f"gsm8k={path}"])

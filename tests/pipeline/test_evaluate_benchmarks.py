"""`evaluate` on benchmarks with the embedded engine: figures against brute force, files, resumption, comparison."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters.packing import Document
from drafters.replay import replay, total_acceptance_length
from pipeline.benchmark import measuring
from pipeline.benchmark.local_backend import LocalServer
from pipeline.cli import main
from pipeline.config import load_config
from pipeline.models import load_drafter_for, load_target
from pipeline.tracking import open_client

LINES = [
    {"id": "a", "domain": "math", "turns": ["What is 3 plus 4?", "And 5 more?"]},
    {"id": "b", "domain": "math", "turns": ["What is 9 plus 9?"]},
    {"id": "c", "domain": "chat", "turns": ["Дай прогноз", "Чем занят?"]},
    {"id": "d", "domain": "chat", "language": "Esperanto", "turns": ["Tell friend 3 about day 9."]},
    {"id": "e", "domain": "code", "turns": ["Write function f1 of 2 arguments."]},
    {"id": "f", "domain": "code", "turns": ["Write function f8 of 9 arguments."]},
]
METHODS = "ar,fixed,fixed:2,adaflash"
SETTINGS = [
    "--max-new-tokens", "14", "--set", "benchmark.warmup_tokens=2", "--set", "benchmark.context_buckets=[40, 70]",
    "--set", "policy.gamma=1.2"]  # fmt: skip


def case(methods: str = METHODS, concurrency: str = "1,3") -> list[str]:
    """Words of the evaluation that the tests look at."""
    chosen = ["--benchmark", "gsm8k=mine.jsonl", "--method", methods, "--concurrency", concurrency]
    return ["tiny.yaml", *chosen, *SETTINGS]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    return int(stop.value.code or 0)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def evaluated(whole_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated; copy it before changing anything."""
    directory = tmp_path_factory.mktemp("evaluated") / "run"
    shutil.copytree(whole_run, directory)
    (directory / "tiny.yaml").write_text(
        (directory / "tiny.yaml").read_text().replace(str(whole_run), str(directory))
    )
    write_lines(directory / "mine.jsonl", LINES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert call("evaluate", *case()) == 0
    return directory


@pytest.fixture
def copy(evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "copy"
    shutil.copytree(evaluated, directory)
    (directory / "tiny.yaml").write_text(
        (directory / "tiny.yaml").read_text().replace(str(evaluated), str(directory))
    )
    monkeypatch.chdir(directory)
    return directory


def report_of(directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((directory / "out/benchmark/report/report.json").read_text())
    return report


def rows_of(directory: Path) -> dict[tuple[str, int], tuple[dict[str, Any], list[dict[str, Any]]]]:
    """cell.json and answers by (method, concurrency)."""
    found = {}
    for place in (directory / "out/benchmark/cells").iterdir():
        cell = json.loads((place / "cell.json").read_text())
        answers = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
        found[cell["key"]["method"], cell["key"]["concurrency"]] = (cell, answers)
    return found


def figures_of(report: dict[str, Any], method: str, concurrency: int) -> dict[str, Any]:
    (found,) = [c for c in report["cells"] if (c["method"], c["concurrency"]) == (method, concurrency)]
    return dict(found)


def by_document(answers: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    turns: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        turns.setdefault(answer["document_id"], []).append(answer)
    return turns


def resampled(rows: list[tuple[float, ...]], statistic: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """Two-sided 95 % interval by an explicit loop, with the seed of the run."""
    data = np.array(rows)
    draws = np.random.default_rng(1).multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=2000)
    values = [statistic(data[np.repeat(np.arange(len(rows)), counts)].sum(axis=0)) for counts in draws]
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


@pytest.mark.parametrize("method", METHODS.split(","))
@pytest.mark.parametrize("concurrency", [1, 3])
def test_figures_are_those_of_the_answers(evaluated: Path, method: str, concurrency: int) -> None:
    found = figures_of(report_of(evaluated), method, concurrency)
    cell, answers = rows_of(evaluated)[method, concurrency]
    assert [(a["document_id"], a["turn"]) for a in answers] == [
        (line["id"], turn) for line in LINES for turn in range(len(line["turns"]))
    ]
    documents = by_document(answers)
    committed = sum(len(a["output_ids"]) - 1 for a in answers)
    rounds = sum(a["rounds"] for a in answers)
    tau = committed / rounds
    assert found["acceptance_length"]["point"] == pytest.approx(tau)
    tokens = sum(len(a["output_ids"]) for a in answers)
    assert found["tokens_per_s"]["point"] == pytest.approx(tokens / cell["wall_seconds"])
    assert found["latency_s"]["p90"] == pytest.approx(np.percentile([a["seconds"] for a in answers], 90))
    assert found["output_tokens"] == tokens and found["turns"] == 8 and found["conversations"] == 6

    rows = [
        (sum(len(a["output_ids"]) - 1 for a in turns), sum(a["rounds"] for a in turns))
        for turns in documents.values()
    ]
    low, high = resampled(rows, lambda sums: float(sums[0] / sums[1]))
    assert (found["acceptance_length"]["low"], found["acceptance_length"]["high"]) == pytest.approx(
        (low, high)
    )

    if method == "ar":
        assert tau == 1 and found["acceptance_rate"] is None and found["positions"] is None
        assert found["verify_len"] == 1 and found["speedup"]["point"] == 1
        return
    assert found["acceptance_rate"] == pytest.approx((tau - 1) / 3)
    assert found["verify_len"] == pytest.approx(np.mean([v for a in answers for v in a["verify_lens"]]))

    reached, accepted = [0] * 3, [0] * 3
    contexts = {0: [0, 0], 40: [0, 0], 70: [0, 0]}
    for a in answers:
        last = len(a["prompt_ids"]) + len(a["output_ids"]) - 1
        for start, right, length in zip(a["starts"], a["accepted"], a["verify_lens"], strict=True):
            for slot in (1, 2, 3):
                if slot <= right + 1 and slot < length and start + slot <= last:
                    reached[slot - 1] += 1
                    accepted[slot - 1] += slot <= right
            bucket = max(bound for bound in contexts if bound <= start)
            contexts[bucket][0] += min(right + 1, last - start)
            contexts[bucket][1] += 1
    assert (found["positions"]["reached"], found["positions"]["accepted"]) == (reached, accepted)
    assert found["positions"]["overall"] == pytest.approx([n / rounds for n in accepted])
    for bucket in found["by_context"]:
        expected = contexts.pop(bucket["from"])
        assert bucket["acceptance_length"]["point"] == pytest.approx(expected[0] / expected[1])
        assert bucket["rounds"] == expected[1]
    assert all(rounds == 0 for _, rounds in contexts.values())

    languages = {"a": "Latin script", "b": "Latin script", "c": "Cyrillic script", "d": "Esperanto"}
    for kind, names in (
        ("by_domain", {line["id"]: line["domain"] for line in LINES}),
        ("by_language", {line["id"]: languages.get(line["id"], "Latin script") for line in LINES}),
    ):
        assert set(found[kind]) == set(names.values())
        for name, group in found[kind].items():
            chosen = [a for a in answers if names[a["document_id"]] == name]
            expected = sum(len(a["output_ids"]) - 1 for a in chosen) / sum(a["rounds"] for a in chosen)
            assert group["acceptance_length"]["point"] == pytest.approx(expected)

    rates: dict[str, list[float]] = {}
    for turns in documents.values():
        one = sum(len(a["output_ids"]) - 1 for a in turns) / sum(a["rounds"] for a in turns)
        rates.setdefault(turns[0]["domain"], []).append((one - 1) / 3)
    for domain, spread in found["variance"]["within_domains"].items():
        assert spread["p50"] == pytest.approx(np.median(rates[domain]))
    taus = [group["acceptance_length"]["point"] for group in found["by_domain"].values()]
    between = found["variance"]["between_domains"]
    assert between["highest_over_lowest"] == pytest.approx(max(taus) / min(taus))
    assert between["standard_deviation"] == pytest.approx(np.std(taus))


def test_speedup_is_paired_with_plain_decoding_at_the_same_concurrency(evaluated: Path) -> None:
    report, rows = report_of(evaluated), rows_of(evaluated)
    sides = []
    for method in ("ar", "fixed"):
        cell, answers = rows[method, 3]
        share = cell["wall_seconds"] / sum(a["seconds"] for a in answers)
        sides.append(
            [
                (sum(len(a["output_ids"]) for a in turns), share * sum(a["seconds"] for a in turns))
                for turns in by_document(answers).values()
            ]
        )
    joined = [(*a, *b) for a, b in zip(*sides, strict=True)]
    total = np.array(joined).sum(axis=0)

    def quotient(sums: np.ndarray) -> float:
        return float((sums[2] / sums[3]) / (sums[0] / sums[1]))

    found = figures_of(report, "fixed", 3)["speedup"]
    assert found["point"] == pytest.approx(quotient(total))
    assert (found["low"], found["high"]) == pytest.approx(resampled(joined, quotient))
    tokens = [
        sum(len(a["output_ids"]) for a in rows[m, 3][1]) / rows[m, 3][0]["wall_seconds"]
        for m in ("ar", "fixed")
    ]
    assert found["point"] == pytest.approx(tokens[1] / tokens[0])


def test_greedy_text_is_the_same_whatever_the_method(evaluated: Path) -> None:
    texts = {
        key: [(a["prompt_ids"], a["output_ids"]) for a in answers]
        for key, (_, answers) in rows_of(evaluated).items()
    }
    assert len(texts) == 8
    assert all(text == texts["ar", 1] for text in texts.values())


def test_tau_of_whole_blocks_is_replay_tau(evaluated: Path) -> None:
    config = load_config(evaluated / "tiny.yaml")
    bundle = load_target(config)
    drafter = load_drafter_for(evaluated / "out/length_head/drafter", bundle).drafter
    _, answers = rows_of(evaluated)["fixed", 1]
    documents = [
        Document(
            a["prompt_ids"] + a["output_ids"],
            [False] * len(a["prompt_ids"]) + [True] * len(a["output_ids"]),
            f"{a['document_id']}#{a['turn']}",
        )
        for a in answers
    ]
    results = replay(drafter, bundle.target, documents)
    found = figures_of(report_of(evaluated), "fixed", 1)
    assert found["acceptance_length"]["point"] == pytest.approx(total_acceptance_length(results), rel=1e-12)
    assert [r.accepted_per_round for r in results] == [a["accepted"] for a in answers]
    for j in (1, 2, 3):
        assert found["positions"]["reached"][j - 1] == sum(r.reached_B[j] for r in results)
        assert found["positions"]["accepted"][j - 1] == sum(r.matched_B[j] for r in results)
    # the lengths of `adaflash` really differ, or its figures would say nothing here
    assert 1 < figures_of(report_of(evaluated), "adaflash", 1)["verify_len"] < 4


class References(HTMLParser):
    """Everything in a page that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in {"src", "href", "data", "srcset", "poster", "action", "background"}:
                self.found.append((name, value or ""))
            if name == "style" and "url(" in (value or ""):
                self.found.append((name, value or ""))


def test_the_page_needs_nothing_else(evaluated: Path) -> None:
    place = evaluated / "out/benchmark/report"
    text = (place / "report.html").read_text()
    page = References()
    page.feed(text)
    images = [value for name, value in page.found if name == "src"]
    assert len(images) == len(list(place.glob("*.png"))) >= 6
    assert all(value.startswith("data:image/png;base64,") for value in images)
    assert [item for item in page.found if item[0] != "src"] == []
    assert not page.tags & {"script", "link", "iframe", "object", "embed", "base"}
    style = re.findall(r"<style>(.*?)</style>", text, flags=re.S)
    assert not any("url(" in part or "@import" in part for part in style)
    heat = report_of(evaluated)["divergence"][0]["heat_map"]["tokens"]
    assert text.count("<span style='background:rgba(") == len(heat)
    assert heat[0]["divergence"] is None and any(token["divergence"] for token in heat)


def test_tables_agree_with_the_figures(evaluated: Path) -> None:
    place = evaluated / "out/benchmark/report"
    found = figures_of(report_of(evaluated), "adaflash", 3)
    with (place / "speedup.csv").open(newline="") as file:
        (row,) = [r for r in csv.reader(file) if r[:2] == ["adaflash [4]", "3"]]
    assert row[2:] == [f"{found['speedup']['point']:.2f}×", f"{found['acceptance_length']['point']:.2f}"]
    markdown = (place / "tables.md").read_text()
    assert "| Method [block size] | Conc. | GSM8K Speedup | GSM8K τ |" in markdown
    latex = (place / "tables.tex").read_text()
    assert r"\multicolumn{2}{c}{GSM8K}" in latex and latex.count(r"\begin{tabular}") == 4
    for line in latex.splitlines():
        assert not re.search(r"(?<!\\)[%#_]|τ|×", line), line
    with (place / "documents.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["method"], r["concurrency"]) == ("adaflash", "3")]
    assert sum(int(r["committed"]) for r in rows) / sum(int(r["rounds"]) for r in rows) == pytest.approx(
        found["acceptance_length"]["point"]
    )
    assert math.fsum(float(r["shared_seconds"]) for r in rows) == pytest.approx(found["wall_seconds"])


def test_everything_is_logged(evaluated: Path) -> None:
    config = load_config(evaluated / "tiny.yaml")
    client = open_client(f"sqlite:///{(evaluated / 'out/mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    assert experiment is not None
    (run,) = client.search_runs(
        [experiment.experiment_id], "tags.stage = 'benchmark' and status = 'FINISHED'"
    )
    logged = {item.path.partition("/")[2] for item in client.list_artifacts(run.info.run_id, "report")}
    assert logged == {p.name for p in (evaluated / "out/benchmark/report").iterdir()}
    name = next(key for key in run.data.metrics if key.endswith("fixed/c3.acceptance_length"))
    expected = figures_of(report_of(evaluated), "fixed", 3)["acceptance_length"]["point"]
    assert run.data.metrics[name] == pytest.approx(expected)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Methods by which a turn was answered, the warm-up's aside."""
    asked: list[str] = []
    complete = LocalServer.complete

    def noting(self: LocalServer, question: Any) -> Any:
        if question.max_new_tokens == 14:
            asked.append(self.method.label)
        return complete(self, question)

    monkeypatch.setattr(LocalServer, "complete", noting)
    return asked


def test_finished_cells_are_not_measured_again(copy: Path, questions: list[str]) -> None:
    before = report_of(copy)
    assert call("evaluate", *case()) == 0
    assert questions == []
    again = report_of(copy)
    # intervals come from the seed
    assert again == before

    # a cell that was lost is measured, and no other
    (lost,) = (copy / "out/benchmark/cells").glob("gsm8k--*--fixed-2--c3-*")
    (lost / "cell.json").unlink()
    assert call("evaluate", *case()) == 0
    assert questions == ["fixed:2"] * 8


@pytest.mark.parametrize(
    ("words", "methods"),
    [
        (["--set", "policy.gamma=2.0"], {"fixed", "fixed:2", "adaflash"}),
        (["--temperature", "0.7"], {"ar", "fixed", "fixed:2", "adaflash"}),
        (["--drafter", "out/train/drafter", "--limit", "6"], {"fixed", "fixed:2"}),
        (["--set", "benchmark.confidence=0.9"], set()),
    ],
)
def test_what_changed_is_measured_again(
    copy: Path, questions: list[str], words: list[str], methods: set[str]
) -> None:
    methods_asked = METHODS.removesuffix(",adaflash") if "--drafter" in words else METHODS
    assert call("evaluate", *case(methods_asked), *words) == 0
    assert set(questions) == methods


def test_other_prompts_are_measured_again(copy: Path, questions: list[str]) -> None:
    write_lines(copy / "mine.jsonl", [*LINES[:-1], {**LINES[-1], "turns": ["Write nothing."]}])
    assert call("evaluate", *case("fixed", "1")) == 0
    assert questions.count("fixed") == 8


@pytest.mark.parametrize("fact", ["machine", "commit"])
def test_another_machine_or_other_code_measures_again(
    copy: Path, questions: list[str], monkeypatch: pytest.MonkeyPatch, fact: str
) -> None:
    if fact == "machine":
        monkeypatch.setattr(measuring, "machine", lambda: {"node": "another"})
    else:
        monkeypatch.setattr(measuring, "git_state", lambda: ("f" * 40, False))
    assert call("evaluate", *case("fixed", "1")) == 0
    assert set(questions) == {"fixed"}


def test_a_run_that_was_cut_off_goes_on(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(copy / "out/benchmark")
    complete = LocalServer.complete
    answered: list[str] = []

    def breaking(self: LocalServer, question: Any) -> Any:
        if self.method.label == "fixed:2" and question.document_id == "e":
            raise KeyboardInterrupt
        answered.append(self.method.label)
        return complete(self, question)

    monkeypatch.setattr(LocalServer, "complete", breaking)
    assert call("evaluate", *case(concurrency="1")) == 130
    assert not (copy / "out/benchmark/report").exists()
    assert any((copy / "out/benchmark/cells").iterdir())
    answered.clear()
    monkeypatch.setattr(LocalServer, "complete", complete)
    noted: list[str] = []
    monkeypatch.setattr(
        LocalServer, "complete", lambda self, q: (noted.append(self.method.label), complete(self, q))[1]
    )
    assert call("evaluate", *case(concurrency="1")) == 0
    assert set(noted) == {"fixed:2", "adaflash"}


def test_sampling_is_reproducible_and_differs_between_conversations(copy: Path) -> None:
    write_lines(copy / "mine.jsonl", [{"id": n, "turns": ["What is 3 plus 4?"]} for n in ("x", "y")])
    words = [
        "tiny.yaml",
        "--benchmark",
        "gsm8k=mine.jsonl",
        "--method",
        "fixed",
        "--max-new-tokens",
        "14",
        "--temperature",
        "1",
    ]
    texts = []
    for _ in range(2):
        shutil.rmtree(copy / "out/benchmark", ignore_errors=True)
        assert call("evaluate", *words) == 0
        _, answers = rows_of(copy)["fixed", 1]
        texts.append([a["output_ids"] for a in answers])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_drafters_and_heldout_prompts(copy: Path) -> None:
    words = ["--drafter", "OSD=out/train/drafter", "--drafter", "ours=out/length_head/drafter"]
    assert call("evaluate", "tiny.yaml", *words, "--method", "fixed,adaflash", "--limit", "3") == 0
    report = report_of(copy)
    # only one of them has a length head
    assert [(c["drafter"], c["method"]) for c in report["cells"]] == [
        ("OSD", "fixed"), ("ours", "fixed"), ("ours", "adaflash"),
    ]  # fmt: skip
    assert report["benchmarks"]["heldout"]["conversations"] == 3
    assert {d["drafter"] for d in report["divergence"]} == {"OSD", "ours"}
    difference = report["cells"][1]["acceptance_length_difference"]
    points = [c["acceptance_length"]["point"] for c in report["cells"]]
    assert difference["point"] == pytest.approx(points[1] - points[0])
    assert report["cells"][0]["acceptance_length_difference"] is None
    assert report["cells"][0]["speedup"] is None  # plain decoding was not asked for


def test_dry_run_writes_nothing(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copy / "out/benchmark")
    assert call("evaluate", *case(), "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "gsm8k  mine.jsonl" in printed and "gsm8k, ar, concurrency 1" in printed
    assert printed.count("concurrency") == 8
    assert not (copy / "out/benchmark").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--benchmark", "gsm9k"], "--benchmark gsm9k: unknown; use one of mathqa, gsm8k, math-500,"),
        (["--benchmark", "mine=gone.jsonl"], "gone.jsonl: no such file"),
        (["--benchmark", "mine="], "write NAME, or NAME=PATH"),
        (["--benchmark", "x=mine.jsonl", "--benchmark", "x=mine.jsonl"], "given twice"),
        (["--benchmark", "x=bad.jsonl"], "bad.jsonl:1: not valid JSON"),
        (["--method", "fixed:99"], "--method fixed:99: drafter .* has blocks of 4"),
        (["--method", "magic"], "--method magic: unknown; use one of ar, fixed,"),
        (["--method", "ar,ar"], "--method ar: given twice"),
        (["--method", "d3d-async"], "is of family dflash, not d3d"),
        (["--method", "adaflash", "--drafter", "out/train/drafter"], "has no length head"),
        (["--method", "ar", "--drafter", "gone/dir"], "--drafter gone/dir: not a drafter directory"),
        (["--method", "ar", "--drafter", "77"], "--drafter 77: neither a drafter directory .* no version 77"),
        (
            ["--method", "ar", "--drafter", "x=out/train/drafter", "--drafter", "x=out/distill/drafter"],
            "x names two",
        ),
        (["--method", "ar", "--concurrency", "0"], "benchmark.concurrency.0: "),
        (["--method", "ar", "--max-new-tokens", "512"], "benchmark.max_new_tokens: 512 leaves no room"),
        (["--method", "ar", "--max-new-tokens", "511"], "prompts are longer than 1 tokens"),
        (["--backend", "sglang"], "--url: the backend sglang needs the address"),
        (["--backend", "tpu"], "benchmark.backend: "),
        (["--url", "http://127.0.0.1:1"], "urls are servers of the backend sglang"),
        (["--backend", "sglang", "--url", "http://127.0.0.1:9"], "--url http://127.0.0.1:9: .*no answer"),
        (["--method", "ar", "--no-thinking"], "thinking: the chat template"),
    ],
)
def test_bad_input(
    evaluated: Path,
    words: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(evaluated)
    Path("bad.jsonl").write_text("{\n")
    before = report_of(evaluated)
    capfd.readouterr()
    assert call("evaluate", "tiny.yaml", *words) == 2
    printed = capfd.readouterr().err
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and re.search(named, errors[0]), printed
    assert "Traceback" not in printed
    assert report_of(evaluated) == before

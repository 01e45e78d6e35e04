"""The whole loop on a tiny target: what it leaves behind, and that anyone can recompute its figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.checkpoint import drafter_digest, load_drafter, verify_manifest
from drafters.errors import UserError
from drafters.packing import Document
from drafters.replay import replay, total_acceptance_length
from pipeline.bootstrap import paired_bootstrap_ratio
from pipeline.config import Config, load_config
from pipeline.models import TargetBundle, load_target
from pipeline.registry import Registry
from pipeline.result import hash_config, mark_config
from pipeline.stages.rerun import StageRunner
from pipeline.stages.whole import run_whole
from serving_bridge.records import VerificationRecord
from serving_bridge.spool import SpoolReader
from tests.pipeline.tiny_run import snapshot


@pytest.fixture(scope="module")
def config(whole_run: Path) -> Config:
    return load_config(whole_run / "tiny.yaml")


@pytest.fixture(scope="module")
def bundle(config: Config) -> TargetBundle:
    return load_target(config)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def metrics_of(config: Config) -> dict[str, Any]:
    return read(config.output / "result.json")["metrics"]


def heldout(config: Config) -> list[Document]:
    """The documents as another reader of `heldout.jsonl` would build them."""
    rows = [json.loads(line) for line in (config.output / "heldout.jsonl").read_text().splitlines()]
    return [
        Document(
            row["prompt_ids"] + row["output_ids"],
            [False] * len(row["prompt_ids"]) + [True] * len(row["output_ids"]),
            row["id"],
            row["domain"],
        )
        for row in rows
    ]


def test_result_holds_the_figures_of_the_run(config: Config) -> None:
    metrics = metrics_of(config)
    assert metrics["lossless"] is True
    assert set(metrics["lossless_prompts"]) == {"fixed", "fixed_2", "adaflash", "hot_swap"}
    assert set(metrics["lossless_prompts"].values()) == {4}
    offline = metrics["offline"]
    assert offline["acceptance_length"] >= 1 and offline["prompts"] == 8
    assert offline["domains"] == ["chat", "math"]  # those trained on
    assert set(offline["by_domain"]) == {"chat", "code", "math"}
    online = metrics["online"]
    assert online["domain"] == "code" and online["prompts_compared"] == 4
    assert online["ratio"] == online["acceptance_length_after"] / online["acceptance_length_before"]
    assert metrics["registry"]["champion_version"] >= 1
    drill = metrics["gate"]["refused"][-1]
    assert drill["drafter_version"].startswith("tiny-drill-") and "acceptance length" in drill["reason"]
    stages = {"responses", "train", "distill", "length_head", "deploy", "online", "evaluate"}
    assert stages == set(metrics["stage_seconds"])
    speed = metrics["speed"]
    for name in ("tokens_per_s_ar", "tokens_per_s_fixed", "tokens_per_s_adaflash", "speedup_adaflash"):
        assert speed[name] > 0
    assert read(config.output / "result.json")["non_finite_metrics"] == []


def test_every_stage_left_its_result(config: Config) -> None:
    folders = ("responses", "train", "distill", "length_head", "deploy", "online", "evaluate", ".")
    hashes = {read(config.output / folder / "result.json")["config_hash"] for folder in folders}
    assert len(hashes) == 1
    drafters = (
        "train/drafter",
        "distill/drafter",
        "length_head/drafter",
        "drafter_offline",
        "drafter_online",
    )
    for name in drafters:
        verify_manifest(config.output / name)
    assert (config.output / "target" / "config.json").is_file()


def test_figures_can_be_recomputed_from_what_is_kept(config: Config, bundle: TargetBundle) -> None:
    metrics, documents = metrics_of(config), heldout(config)
    assert {d.domain for d in documents} == {"math", "chat", "code"} and len(documents) == 12
    results = {}
    for name in ("offline", "online"):
        drafter = load_drafter(config.output / f"drafter_{name}", dtype=torch.float32).drafter
        results[name] = replay(drafter, bundle.target, documents)
        by_domain = metrics[name]["by_domain"]
        for domain, reported in by_domain.items():
            found = total_acceptance_length([r for r in results[name] if r.domain == domain])
            assert found == pytest.approx(reported, abs=1e-12)
    trained_on = [r for r in results["offline"] if r.domain in metrics["offline"]["domains"]]
    assert total_acceptance_length(trained_on) == metrics["offline"]["acceptance_length"]
    before, after = ([r for r in results[n] if r.domain == "code"] for n in ("offline", "online"))
    online = metrics["online"]
    assert total_acceptance_length(before) == online["acceptance_length_before"]
    assert total_acceptance_length(after) == online["acceptance_length_after"]
    difference = paired_bootstrap_ratio(
        [r.committed for r in before],
        [r.rounds for r in before],
        [r.committed for r in after],
        [r.rounds for r in after],
    )
    assert (difference.point, difference.low) == (online["difference"], online["difference_low"])


def test_heldout_outputs_are_the_targets_own(config: Config, bundle: TargetBundle) -> None:
    for document in heldout(config)[::5]:
        start = document.response_mask.index(True)
        ids = torch.tensor([document.token_ids[:start]])
        output: Any = bundle.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=bundle.eos_ids,
            pad_token_id=0,
        )
        assert output[0].tolist() == document.token_ids


def test_kept_drafters_are_the_registered_ones(config: Config, bundle: TargetBundle) -> None:
    metrics = metrics_of(config)
    registry = Registry(f"sqlite:///{config.output / 'mlflow.db'}", metrics["registry"]["model_name"])
    champion = registry.champion()
    assert champion is not None and champion.version == metrics["registry"]["champion_version"]
    assert drafter_digest(config.output / "drafter_offline") == registry.get(1).tags["drafter_digest"]
    assert drafter_digest(config.output / "drafter_online") == champion.tags["drafter_digest"]
    for refused in metrics["gate"]["refused"]:
        assert registry.get(refused["version"]).tags["gate_reason"] == refused["reason"]


def served(config: Config) -> list[VerificationRecord]:
    reader = SpoolReader(config.output / "spool", "test", quarantine=False)
    return [delivery.record for delivery in reader.read(1000)]


def test_online_rounds_are_settled_and_every_record_admitted_once(config: Config) -> None:
    state = read(config.output / "online" / "state.json")
    assert state["phase"] == "collect"
    assert [o["round_index"] for o in state["outcomes"]] == [0, 1]
    result = read(config.output / "online" / "result.json")["metrics"]
    assert result["outcomes"] == [o["outcome"] for o in state["outcomes"]]
    assert result["counts"]["trained"] == 10 and result["quarantined"] == 0
    records = served(config)
    assert result["counts"]["held_out"] + result["counts"]["admitted"] <= 20
    assert len({r.request_id for r in records}) == len(records)
    assert {r.domain for r in records} <= {"code"}


def test_report_needs_nothing_but_itself(config: Config) -> None:
    page = (config.output / "report.html").read_text()
    sources = re.findall(r"""\b(?:src|href)\s*=\s*["']?([^"' >]+)""", page)
    assert len(sources) == 3 and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"<script|<link|@import|url\(", page)
    metrics = metrics_of(config)
    for shown in (
        f"{metrics['offline']['acceptance_length']:.3f}",
        f"{metrics['online']['acceptance_length_after']:.3f}",
        metrics["target"]["target_id"],
        "tiny-drill",
    ):
        assert shown in page


def test_running_again_keeps_what_is_finished(config: Config) -> None:
    before = snapshot(config.output)
    assert run_whole(config) == config.output / "report.html"
    after = snapshot(config.output)
    assert {name for name in before if after[name] != before[name]} <= {"report.html"}
    assert after.keys() == before.keys()


def test_results_of_another_configuration_are_not_mixed_with(config: Config) -> None:
    before = snapshot(config.output)
    with pytest.raises(UserError, match=r"responses/result\.json: made with another config"):
        run_whole(config.model_copy(update={"seed": 2}))
    assert snapshot(config.output) == before


def test_an_interrupted_stage_of_another_configuration_is_not_resumed(config: Config, tmp_path: Path) -> None:
    config = config.model_copy(update={"output": tmp_path})
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "last.ckpt").touch()
    work: list[bool] = []

    def interrupted(resume: bool) -> None:
        work.append(resume)
        raise KeyboardInterrupt

    mark_config(tmp_path / "train", hash_config(config.dump()))
    with pytest.raises(KeyboardInterrupt):
        StageRunner(config).run("train", interrupted)
    assert work == [True]
    other = config.model_copy(update={"seed": 2})
    with pytest.raises(UserError, match=r"last\.ckpt: left by a run with another config"):
        StageRunner(other).run("train", interrupted)
    assert work == [True]

"""What is measured and on which documents: splits, summaries, and a lossless check that can say no."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from drafters.checkpoint import load_drafter
from drafters.errors import UserError
from drafters.packing import Document
from drafters.replay import ReplayResult
from pipeline.config import Config, load_config
from pipeline.corpus import conversations, load_documents, train_and_validation
from pipeline.lossless import LosslessReport, check_lossless
from pipeline.measure import acceptance_summary
from pipeline.models import TargetBundle, load_target
from pipeline.simulation.traffic import Traffic
from pipeline.stages.evaluate import spread
from pipeline.stages.length_head import fit_length_head
from pipeline.stages.simulate import CostSource, TraceSource, simulate
from pipeline.stages.tune_policy import tune_policy
from serving_bridge.local_engine import LocalEngine
from serving_bridge.server import SwapError


@pytest.fixture(scope="module")
def config(whole_run: Path) -> Config:
    return load_config(whole_run / "tiny.yaml")


@pytest.fixture(scope="module")
def bundle(config: Config) -> TargetBundle:
    return load_target(config)


def check(
    config: Config, bundle: TargetBundle, documents: list[Document], names: list[str]
) -> LosslessReport:
    directories = [config.output / name for name in names]
    return check_lossless(config, bundle, directories, documents, LosslessReport())


def test_lossless_check_names_what_differs(config: Config, bundle: TargetBundle) -> None:
    documents = load_documents(config, "heldout", bundle.target.identity)[:5]
    wrong = documents[1]
    last = wrong.token_ids[-1]
    documents[1] = replace(wrong, token_ids=[*wrong.token_ids[:-1], (last + 1) % 200])
    report = check(config, bundle, documents, ["train/drafter", "length_head/drafter"])
    assert not report.lossless
    assert report.differing == {name: [wrong.document_id] for name in report.compared}
    assert report.compared == {"fixed": 5, "fixed_2": 5, "adaflash": 5, "hot_swap": 5}


def test_lossless_check_decodes_no_more_tokens_than_it_is_told(config: Config, bundle: TargetBundle) -> None:
    few = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"lossless_tokens": 3})})
    documents = load_documents(config, "heldout", bundle.target.identity)[:4]
    prompt, output = documents[0].prompt_and_output()
    assert len(output) > 4

    def changed_at(place: int) -> list[Document]:
        ids = [*prompt, *output]
        ids[len(prompt) + place] = (ids[len(prompt) + place] + 1) % 200
        return [replace(documents[0], token_ids=ids), *documents[1:]]

    names = ["train/drafter", "length_head/drafter"]
    assert check(few, bundle, changed_at(3), names).lossless
    assert not check(few, bundle, changed_at(2), names).lossless


def test_a_swap_that_fails_during_the_check_is_an_error(
    config: Config, bundle: TargetBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: LocalEngine, directory: Path) -> None:
        raise SwapError("refused")

    monkeypatch.setattr(LocalEngine, "swap", broken)
    documents = load_documents(config, "heldout", bundle.target.identity)[:4]
    with pytest.raises(SwapError, match="refused"):
        check(config, bundle, documents, ["train/drafter", "length_head/drafter"])


def test_nothing_compared_is_not_lossless() -> None:
    assert not LosslessReport().lossless
    # without a swap under running requests the claim is not proven
    assert not LosslessReport({"fixed": 2}, {"fixed": []}).lossless
    assert LosslessReport({"fixed": 2}, {"fixed": []}, swaps=1).lossless


def test_prompt_and_output_are_split_at_the_response() -> None:
    assert Document([1, 2, 3, 4], [False, False, True, True], "a").prompt_and_output() == ([1, 2], [3, 4])


def test_summary_sums_over_documents_and_leaves_out_those_without_rounds() -> None:
    results = [
        ReplayResult("a", "math", 9, 3, reached_B=[0, 3, 2, 2], matched_B=[0, 2, 2, 1]),
        ReplayResult("b", "code", 4, 4, reached_B=[0, 4, 0, 0], matched_B=[0, 0, 0, 0]),
        ReplayResult("c", "code", 0, 0, reached_B=[0] * 4, matched_B=[0] * 4),
    ]
    summary = acceptance_summary(results, 4)
    assert summary["acceptance_length"] == 13 / 7
    assert summary["acceptance_rate"] == pytest.approx((13 / 7 - 1) / 3)
    assert summary["by_domain"] == {"code": 1.0, "math": 3.0}
    assert summary["by_position"] == [2 / 7, 1.0, 0.5]
    assert summary["prompts"] == 2
    assert summary["acceptance_length_low"] <= 13 / 7 <= summary["acceptance_length_high"]
    never = acceptance_summary([replace(results[1])], 4)
    assert math.isnan(never["by_position"][1])


def test_validation_is_split_off_by_conversation(config: Config, bundle: TargetBundle) -> None:
    identity = bundle.target.identity
    train, validation = train_and_validation(config, identity)
    keys = [{d.conversation_key for d in part} for part in (train, validation)]
    assert not keys[0] & keys[1]
    assert keys[0] | keys[1] == {c.id for c in conversations(config, "train")}
    assert 0 < len(validation) < len(train)
    assert train_and_validation(config, identity) == (train, validation)
    heldout = {d.document_id for d in load_documents(config, "heldout", identity)}
    assert not heldout & {d.document_id for d in train + validation}


def test_truncated_answers_can_be_left_out_of_training_but_not_of_the_reference(
    config: Config, bundle: TargetBundle
) -> None:
    dropping = config.model_copy(
        update={"regenerate": config.regenerate.model_copy(update={"truncated": "drop"})}
    )
    identity = bundle.target.identity
    kept = load_documents(config, "train", identity)
    whole = [d for d in kept if d.token_ids[-1] in bundle.eos_ids]
    assert len(whole) < len(kept)
    if whole:
        assert load_documents(dropping, "train", identity) == whole
    else:
        with pytest.raises(UserError, match="truncated"):
            load_documents(dropping, "train", identity)
    reference = load_documents(config, "heldout", identity)
    assert load_documents(dropping, "heldout", identity) == reference


def test_responses_must_be_there(config: Config, bundle: TargetBundle, tmp_path: Path) -> None:
    elsewhere = config.model_copy(update={"output": tmp_path})
    with pytest.raises(
        UserError, match="responses/train: no responses yet; run `draftsmith data regenerate`"
    ):
        load_documents(elsewhere, "train", bundle.target.identity)


def test_spread_takes_documents_from_everywhere() -> None:
    documents = [Document([i], [True], str(i)) for i in range(10)]
    assert [d.document_id for d in spread(documents, 4)] == ["0", "2", "5", "7"]
    assert spread(documents, 10) == spread(documents, 99) == documents
    assert spread(documents, 0) == []


def test_an_acceptance_head_is_not_calibrated_on_what_it_was_fitted_to(
    config: Config, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(config.output, tmp_path / "out")
    alone = config.model_copy(
        update={
            "output": tmp_path / "out",
            "data": config.data.model_copy(update={"val_fraction": 0.0}),
            "length_head": config.length_head.model_copy(update={"steps": 2}),
        }
    )
    fitted = fit_length_head(alone, drafter=config.output / "distill" / "drafter")
    head = load_drafter(fitted).acceptance_head
    assert head is not None and head.calibration.tolist() == [1.0, 0.0]
    metrics = json.loads((fitted.parent / "result.json").read_text())["metrics"]
    assert metrics["blocks"] > 0 and "acceptance" not in metrics
    assert "not calibrated, for want of validation documents" in " ".join(capfd.readouterr().out.split())


def test_policies_are_tuned_by_load(config: Config) -> None:
    drafter = config.output / "length_head" / "drafter"
    output = tune_policy(config, drafter=drafter, loads=(1, 2))
    result = json.loads((output / "result.json").read_text())["metrics"]
    for load in ("load_1", "load_2"):
        rows = result[load]["candidates"]
        assert result[load]["best"] == rows[0]
        assert {row["policy"] for row in rows} == {"plain", "fixed", "adaflash", "survival", "throughput"}
        assert [row["tokens_per_s"] for row in rows] == sorted(
            (r["tokens_per_s"] for r in rows), reverse=True
        )
    assert {key: sorted(values) for key, values in result["tuned"].items()} == {
        "gamma_by_load": ["1", "2"],
        "threshold_by_load": ["1", "2"],
    }
    # with costs handed in nothing is measured
    kept = (output / "costs.json").read_bytes()
    again = tune_policy(config, drafter=drafter, loads=(2,), costs=output / "costs.json")
    assert json.loads((again / "costs.json").read_text()) == json.loads(kept)
    repeated = json.loads((again / "result.json").read_text())["metrics"]["load_2"]["candidates"]
    first = {(r["policy"], r["setting"]): r["tokens_per_s"] for r in result["load_2"]["candidates"]}
    assert {(r["policy"], r["setting"]): r["tokens_per_s"] for r in repeated} == pytest.approx(
        first, rel=0.05
    )


def test_serving_is_simulated_from_replayed_texts(config: Config) -> None:
    """With costs that were measured here, through every policy, and again from the traces that it left."""
    drafter = config.output / "length_head" / "drafter"
    table = tune_policy(config, drafter=drafter, loads=(1, 2)) / "costs.json"

    def rows(source: TraceSource) -> list[dict[str, float]]:
        output = simulate(
            config, source=source, costs=CostSource(table), traffic=Traffic(1), concurrency=(1, 2)
        )
        metrics = json.loads((output / "result.json").read_text())["metrics"]
        found: list[dict[str, float]] = metrics["rows"]
        return found

    made = rows(TraceSource(drafter=drafter))
    assert {row["policy"] for row in made} == {"plain", "fixed", "adaflash", "survival", "throughput"}
    assert {row["domain"] for row in made} == {"all domains", "math", "chat", "code"}
    whole = next(
        r for r in made if (r["domain"], r["setting"], r["concurrency"]) == ("all domains", "length 4", 1)
    )
    evaluated = json.loads((config.output / "evaluate" / "result.json").read_text())["metrics"]
    assert whole["acceptance_length"] == pytest.approx(evaluated["acceptance_length"])
    assert rows(TraceSource(config.output / "simulate" / "traces.safetensors")) == made

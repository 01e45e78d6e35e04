"""`draftsmith simulate`: from a file of traces or a log to tables, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic_traces import Process, draw
from drafters.step_cost import StepCosts
from pipeline.cli import main
from pipeline.config import PolicyConfig
from pipeline.simulation.report import plain_wins, recommended
from pipeline.simulation.trace_file import TraceSet, save_traces
from serving_bridge.spool import SpoolWriter
from tests.drafters.policy_samples import linear_costs
from tests.pipeline.tiny_run import write_config
from tests.serving_bridge.record_samples import make_record, make_round

QWEN = ["--model", "Qwen/Qwen3-8B", "--device", "h200"]


@pytest.fixture
def place(tmp_path: Path, migrated_database: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration, traces of two domains, and MLflow's tables."""
    write_config(tmp_path)
    (tmp_path / "out").mkdir()
    shutil.copyfile(migrated_database, tmp_path / "out" / "mlflow.db")
    process = Process(block_size=8, texts=4, tokens=24, prompt=20)
    traces = [*draw(process, 0, "math"), *draw(process, 1, "chat")]
    save_traces(tmp_path / "t.safetensors", TraceSet(traces, 8, "tiny@r0#0", "v7", "made up"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def simulate(place: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the command; its exit code, and what it printed."""

    def call(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stop:
            main(["simulate", "tiny.yaml", *words])
        printed = capfd.readouterr()
        return int(stop.value.code or 0), " ".join((printed.out + printed.err).split())

    return call


def metrics(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "out/simulate/result.json").read_text())["metrics"]
    return found


def test_traces_and_a_roofline_make_a_table(place: Path, simulate: Callable[..., tuple[int, str]]) -> None:
    code, printed = simulate("--traces", "t.safetensors", *QWEN, "--concurrency", "4,1", "--overhead-ms", "1")
    assert code == 0, printed
    found = metrics(place)
    rows = found["rows"]
    # three kinds of traffic, two concurrencies, plain + 5 fixed + 8 γ + 8 thresholds + throughput
    assert len(rows) == 3 * 2 * 23
    assert {r["setting"] for r in rows if r["policy"] == "fixed"} == {f"length {n}" for n in (2, 3, 4, 6, 8)}
    assert {row["domain"] for row in rows} == {"all domains", "chat", "math"}
    for row in rows:
        if row["policy"] == "plain":
            assert row["speedup"] == row["acceptance_length"] == row["verify_len"] == 1.0
        assert row["running"] == row["concurrency"]
        assert row["tokens_per_s_low"] * 0.9999 <= row["tokens_per_s"] <= row["tokens_per_s_high"] * 1.0001
        assert row["setting"] != "length 8" or row["tokens_per_s_low"] < row["tokens_per_s_high"]
        assert row["rows_per_round"] == pytest.approx(row["verify_len"] * row["concurrency"])
        assert 0 < row["latency_s"]["p50"] <= row["latency_s"]["p90"] <= row["latency_s"]["p99"]
    one, four = found["rounds"]
    assert (one["concurrency"], four["concurrency"]) == (1, 4)
    # an 8 B target in bfloat16 through 4.8 TB/s, and a millisecond
    assert 0.0041 < one["plain_s"] < 0.0045 and one["draft_s"] < one["verify_whole_s"] < 1.2 * one["plain_s"]
    plain = next(
        r for r in rows if (r["policy"], r["concurrency"], r["domain"]) == ("plain", 1, "all domains")
    )
    assert plain["tokens_per_s"] == pytest.approx(1 / one["plain_s"], rel=0.01)
    mixed = [r for r in rows if (r["policy"], r["domain"]) == ("adaflash", "all domains")]
    best = {n: max((r for r in mixed if r["concurrency"] == n), key=lambda r: r["speedup"]) for n in (1, 4)}
    gammas = PolicyConfig(gamma_by_load=found["tuned"]["gamma_by_load"]).gamma_by_load
    assert {n: f"gamma {gamma:g}" for n, gamma in gammas.items()} == {
        n: r["setting"] for n, r in best.items()
    }
    assert set(found["tuned"]["threshold_by_load"]) == {"1", "4"}
    table = (place / "out/simulate/table.md").read_text()
    assert "computed, not measured" in table and "made up; target tiny@r0#0, drafter v7" in table
    assert "| chat: speedup | τ | math: speedup | τ | all domains: speedup | τ |" in table
    for wording in ("plain decoding", "fixed, longest", "adaflash, γ = 1", "survival, best", "throughput"):
        assert wording in table
    # every line of a table has the cells of its head
    widths = [line.count("|") for line in table.splitlines() if line.startswith("|")]
    assert len(set(widths)) == 2
    assert (place / "out/simulate/speedup.png").read_bytes().startswith(b"\x89PNG")
    outputs = json.loads((place / "out/simulate/result.json").read_text())["outputs"]
    assert set(outputs) == {"table.md", "speedup.png"}


def test_the_same_seed_gives_the_same_figures(place: Path, simulate: Callable[..., tuple[int, str]]) -> None:
    words = [
        "--traces",
        "t.safetensors",
        *QWEN,
        "--concurrency",
        "2",
        "--policies",
        "adaflash:1.5,throughput",
    ]
    words += ["--rate", "30", "--prompts"]
    found = []
    for seed in (1, 1, 2):
        assert simulate(*words, "--set", f"seed={seed}")[0] == 0
        found.append(metrics(place)["rows"])
    assert found[0] == found[1] != found[2]
    (row,) = [r for r in found[0] if (r["policy"], r["domain"]) == ("adaflash", "all domains")]
    assert row["setting"] == "gamma 1.5" and 0 < row["running"] <= 2
    # the prompt is read first, in a pass of its own
    assert 0.003 < row["first_token_s"]["p50"] < row["latency_s"]["p50"]


def test_where_requests_come_at_their_own_rate_nothing_is_best(
    place: Path, simulate: Callable[..., tuple[int, str]]
) -> None:
    words = ["--policies", "fixed,adaflash,throughput", "--concurrency", "2,4", "--rate", "20"]
    code, printed = simulate("--traces", "t.safetensors", *QWEN, *words)
    assert code == 0 and "compare latencies" in printed and "best by load" not in printed
    found = metrics(place)
    assert found["tuned"] == found["plain_wins"] == {}
    assert all(row["speedup"] is None for row in found["rows"])
    table = (place / "out/simulate/table.md").read_text()
    assert "speedup |" not in table.split("## All settings")[0] and "compare latencies" in table
    for wording in ("plain decoding", "fixed, longest", "adaflash, γ = 1", "throughput"):
        assert f"| {wording} | 2 |" in table
    assert "fixed, best" not in table and "best γ" not in table
    assert (place / "out/simulate/speedup.png").read_bytes().startswith(b"\x89PNG")


def test_loads_at_which_no_setting_is_worth_it_are_named() -> None:
    rates = {
        ("plain", ""): (10.0, 20.0, 30.0),
        ("adaflash", "gamma 1"): (15.0, 25.0, 20.0),
        ("adaflash", "gamma 2"): (18.0, 19.0, 10.0),
        ("survival", "threshold 0.5"): (11.0, 21.0, 31.0),
    }
    rows = [
        {"policy": policy, "setting": setting, "concurrency": load, "tokens_per_s": rate}
        for (policy, setting), values in rates.items()
        for load, rate in zip((1, 8, 64), values, strict=True)
    ]
    assert plain_wins(rows) == {"adaflash": [64], "survival": []}
    assert list(recommended(rows)) == [
        "best by load: policy.gamma_by_load={1: 2.0, 8: 1.0, 64: 1.0}; but plain decoding is faster at 64 requests",
        "best by load: policy.threshold_by_load={1: 0.5, 8: 0.5, 64: 0.5}",
    ]


def test_a_measured_table_is_used_and_its_end_is_said(
    place: Path, simulate: Callable[..., tuple[int, str]]
) -> None:
    costs: StepCosts = linear_costs(fixed=0.02, row=0.001, draft=0.004, block_size=8)
    (place / "costs.json").write_text(json.dumps(costs.to_json()))
    words = ["--traces", "t.safetensors", "--costs", "costs.json", "--policies", "fixed:8"]
    code, printed = simulate(*words, "--concurrency", "1,4,16")
    assert code == 0 and "costs: measured table costs.json" in printed
    rows = {
        (r["policy"], r["concurrency"]): r for r in metrics(place)["rows"] if r["domain"] == "all domains"
    }
    # rounds of 4 requests: 0.02 + 0.004 s plain; 0.004 + 0.02 + 0.032 s with whole blocks
    assert rows["plain", 4]["tokens_per_s"] == pytest.approx(4 / 0.024, rel=0.01)
    tau = rows["fixed", 4]["acceptance_length"]
    assert rows["fixed", 4]["tokens_per_s"] == pytest.approx(4 * tau / 0.056, rel=0.01)
    assert rows["fixed", 4]["notes"] == [] and rows["fixed", 16]["notes"] == [
        "costs extrapolated beyond the table"
    ]
    assert "note: 16 requests: costs extrapolated beyond the table" in printed


def test_a_log_is_simulated_as_it_is(place: Path, simulate: Callable[..., tuple[int, str]]) -> None:
    writer = SpoolWriter(place / "spool")
    for name in ("a", "b"):
        writer.write(make_record(name))
    # from before there was a drafter: no rounds, and another block size by default
    writer.write(make_record("bare", rounds=[], target_id="another@r0#0"))
    # two tokens of this one were decoded plainly
    writer.write(make_record("gap", rounds=[make_round(3, 1), make_round(7, 1)]))
    writer.write(make_record("c", sampling=type(make_record().sampling)(temperature=1.0, top_p=1.0, top_k=0)))
    writer.close()
    words = ["--records", "spool", "--as-logged", *QWEN, "--concurrency", "1"]
    code, printed = simulate(*words)
    assert code == 0 and "blocks that serving did not draft are estimated" in printed
    assert "of 18 tokens, outside any round, left out" in printed
    assert metrics(place)["traces"]["responses"] == 3
    assert {r["policy"] for r in metrics(place)["rows"]} == {"plain", "fixed"}
    # its traces can be simulated again
    again = simulate("--traces", "out/simulate/traces.safetensors", *QWEN, "--concurrency", "1")
    assert again[0] == 0 and metrics(place)["traces"]["target_id"] == make_record().target_id
    writer = SpoolWriter(place / "spool")
    writer.write(make_record("d", target_id="another@r0#0"))
    writer.close()
    code, printed = simulate(*words)
    assert code == 2 and "records of 2 targets or block sizes" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "1,x"], "--concurrency: '1,x' is no list of numbers in 1..4096"),
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", ""], "--concurrency"),
        (["--policies", "fast"], "--policies: 'fast' is unknown"),
        (["--policies", "fixed:9"], "--policies: fixed:9 is outside 1..8"),
        (["--policies", "fixed:0"], "--policies: fixed:0 is not a setting"),
        (["--policies", "adaflash:-1"], "--policies: adaflash:-1 is not a setting"),
        (["--policies", "adaflash:inf"], "--policies: adaflash:inf is not a setting"),
        (["--policies", "throughput:2"], "--policies: throughput:2 is not a setting"),
        (["--rate", "0"], "--rate: 0.0 must be above 0"),
        (["--rate", "nan"], "--rate"),
        (["--device", "tpu"], "--device: tpu is unknown"),
        (["--model", "Nobody/Knows"], "the sizes of Nobody/Knows are not known"),
        (["--records", "spool"], "--traces: holds what --records"),
        (["--as-logged"], "--as-logged: takes the rounds of --records"),
        (["--costs", "absent.json"], "--costs absent.json: not a cost table"),
        (["--costs", "empty.json"], "the cost table has too few rounds"),
        (["--costs", "empty.json", "--device", "h100"], "--costs: is a measured table"),
    ],
)
def test_bad_options_are_one_line(
    place: Path, simulate: Callable[..., tuple[int, str]], words: list[str], message: str
) -> None:
    (place / "empty.json").write_text(json.dumps(StepCosts().to_json()))
    code, printed = simulate("--traces", "t.safetensors", *words)
    assert code == 2 and message in printed and "Traceback" not in printed
    assert not (place / "out/simulate/result.json").exists()


def test_a_policy_needs_its_head(place: Path, simulate: Callable[..., tuple[int, str]]) -> None:
    writer = SpoolWriter(place / "spool")
    writer.write(make_record())
    writer.close()
    for name, head in (
        ("adaflash", "length head"),
        ("survival:0.3", "acceptance head"),
        ("throughput", "acc"),
    ):
        code, printed = simulate("--records", "spool", "--as-logged", "--policies", name)
        assert code == 2 and f"needs a{'n' * (head[0] == 'a')} {head}" in printed
    code, printed = simulate("--records", "spool", "--as-logged", "--policies", "config")
    assert code == 2 and "--policies: adaflash needs a length head" in printed
    code, printed = simulate("--records", "nowhere", "--as-logged")
    assert code == 2 and "no greedy record" in printed
    code, printed = simulate("--concurrency", "1")
    assert code == 2 and "simulate: no drafter yet" in printed

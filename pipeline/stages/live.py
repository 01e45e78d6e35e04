"""`draftsmith run` against a real SGLang server: train, serve, learn from the traffic, swap, and survive a bad drafter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from datamodules.chat import render_prompt
from datamodules.mixture import load_mixture
from drafters.checkpoint import CONTENT, save_drafter
from pipeline.canary import CanaryVerdict, matching_prefix, watch
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.corpus import source_specs
from pipeline.fleet import client_for, connect, launch_of, log_place
from pipeline.models import TargetBundle, load_drafter_for
from pipeline.online import OnlineState, drafter_version_of
from pipeline.release import ReleaseDesk, gate_policy
from pipeline.stages.context import Stage, open_stage
from pipeline.stages.deploy import deploy_drafter
from pipeline.stages.length_head import fit_length_head
from pipeline.stages.online import distill_online, reader_at_end
from pipeline.stages.regenerate import regenerate_responses
from pipeline.stages.rerun import StageRunner
from pipeline.stages.train import train_drafter
from serving_bridge.load_generator import LoadGenerator, LoadRequest
from serving_bridge.records import VerificationRecord
from serving_bridge.sglang_process import running_server
from serving_bridge.sglang_server import SGLangServer
from serving_bridge.transport import LogReader
from serving_bridge.transports import open_reader

WINDOWS = 3
DRILL_REQUESTS = 40
UP_WITHIN_S = 300.0


def run_live(config: Config) -> Path:
    """Offline stages, then the live part; `<output>/result.json` holds its figures."""
    runner = StageRunner(config)
    output = config.output
    runner.run("responses", lambda _: regenerate_responses(config))
    runner.run("train", lambda resume: train_drafter(config, resume=resume))
    trained = output / "train" / "drafter"
    runner.run("length_head", lambda resume: fit_length_head(config, drafter=trained, resume=resume))
    runner.run("deploy", lambda _: deploy_drafter(config, drafter=output / "length_head" / "drafter"))
    return serve_live(config)


def serve_live(config: Config) -> Path:
    """Start SGLang with the champion, send it traffic, keep it fresh, then try to harm it."""
    with open_stage(config, "live", ".") as stage:
        bundle = stage.bundle
        desk = ReleaseDesk(
            stage.registry(), bundle, gate_policy(config.gate, config.seed), config.output / "versions"
        )
        champion = desk.registry.champion()
        assert champion is not None
        launch = launch_of(
            config, desk.checkpoint(champion.version), config.sglang.launch.model or bundle.source
        )
        url = f"http://127.0.0.1:{launch.port}"
        requests = traffic(config, bundle)
        drill, requests = requests[:DRILL_REQUESTS], requests[DRILL_REQUESTS:]
        with (
            stage.result.section("live"),
            running_server(launch, config.output / "server.log", UP_WITHIN_S),
        ):
            say(f"SGLang serves {champion.tags.get('drafter_version')} at {url}")
            # a registered reader at the start, or retention would delete what the figures are about
            report = report_reader(config)
            report.commit(report.cursor)
            load = load_for(config, bundle, url, len(requests))
            load.start(requests)
            server = connect(config, [url])[0]
            with threads_beside(launch.threads):
                distill_online(
                    config,
                    log=log_place(config),
                    resume=True,
                    servers=lambda _: [server],
                    should_stop=lambda: load.over,
                )
            load.join()
            records = all_records(config)
            verdict = canary_drill(config, stage, desk, server, drill)
            status = server.client.plugin_status() or {}
        stage.result.metrics |= summarise(config, records, load, verdict, status)
        metrics = stage.result.metrics
        rows = [[str(n + 1), f"{tau:.3f}"] for n, tau in enumerate(metrics["tau_by_window"])]
        show_table("live acceptance length by third of the traffic", ["third", "τ"], rows)
        return stage.output


@contextlib.contextmanager
def threads_beside(serving: int) -> Iterator[None]:
    """Leave the server its threads: pools that together exceed the cores slow each other down by far more than their share."""
    total = torch.get_num_threads()
    torch.set_num_threads(max(1, total - serving))
    try:
        yield
    finally:
        torch.set_num_threads(total)


def traffic(config: Config, bundle: TargetBundle) -> list[LoadRequest]:
    """The traffic prompts in token ids."""
    prompts = load_mixture(
        source_specs(config.traffic.sources), seed=config.seed, limit=config.traffic.limit
    ).conversations
    return [
        LoadRequest(f"traffic/{p.id}", render_prompt(bundle.tokenizer, p.messages), p.id, p.domain)
        for p in prompts
    ]


def load_for(config: Config, bundle: TargetBundle, url: str, total: int) -> LoadGenerator:
    """A load generator that reports on its way."""

    def report(done: int) -> None:
        if done % 25 == 0 or done == total:
            say(f"answered {done}/{total} requests")

    return LoadGenerator(
        lambda: client_for(config, url),
        config.serve.max_new_tokens,
        bundle.eos_ids,
        config.serve.max_running,
        report,
    )


def all_records(config: Config) -> list[VerificationRecord]:
    """What the server logged so far, oldest first."""
    reader = report_reader(config)
    records = []
    while deliveries := reader.read(512):
        records += [delivery.record for delivery in deliveries]
    return sorted(records, key=lambda record: record.time)


def report_reader(config: Config) -> LogReader:
    """The reader of this demo's own figures."""
    return open_reader(log_place(config), "report", quarantine=False)


def canary_drill(
    config: Config, stage: Stage, desk: ReleaseDesk, server: SGLangServer, requests: Sequence[LoadRequest]
) -> CanaryVerdict:
    """Put a useless drafter past the gate into the server, and see that live traffic gives it away.

    Its weights are noise of the champion's size: finite, of the right shape, with true checksums.
    """
    champion = desk.registry.champion()
    assert champion is not None
    good = desk.checkpoint(champion.version)
    loaded = load_drafter_for(good, desk.bundle)
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for parameter in loaded.drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.float().std(unbiased=False).clamp_min(1e-3))
    bad = save_drafter(
        damaged_drafter(config),
        loaded.drafter,
        identity=desk.bundle.target.identity,
        drafter_version=f"{config.name}-damaged-{CONTENT}",
        length_head=loaded.length_head,
        acceptance_head=loaded.acceptance_head,
    )
    reader = reader_at_end(log_place(config))
    server.swap(bad)
    load = load_for(config, desk.bundle, server.client.url, len(requests))
    load.start(requests)
    verdict = watch(
        reader, drafter_version_of(bad), good, desk.bundle, config.canary, should_stop=lambda: load.over
    )
    if not verdict.passed:
        server.swap(good)
    load.join()
    say(f"damaged drafter: {'kept' if verdict.passed else 'rolled back'}: {verdict.reason}")
    return verdict


def damaged_drafter(config: Config) -> Path:
    """Where the drill's drafter lies."""
    return config.output / "versions" / "damaged"


def summarise(
    config: Config,
    records: Sequence[VerificationRecord],
    load: LoadGenerator,
    verdict: CanaryVerdict,
    status: dict[str, Any],
) -> dict[str, Any]:
    """The figures of the live part."""
    state = OnlineState.load(config.output / "online" / "state.json")
    log = status.get("records") or {}
    thirds = [
        records[len(records) * n // WINDOWS : len(records) * (n + 1) // WINDOWS] for n in range(WINDOWS)
    ]
    return {
        "swaps": [vars(note) for note in state.swaps],
        "accepted_swaps": sum(outcome.outcome == "champion" for outcome in state.outcomes),
        "outcomes": [{"outcome": o.outcome, "reason": o.reason} for o in state.outcomes],
        "pause_ms": [note.pause_ms for note in state.swaps],
        "tau_by_window": [live_acceptance_length(third) for third in thirds],
        "requests": load.done,
        "failed_requests": load.failures,
        "records_read": len(records),
        "records_written": log.get("written"),
        "records_dropped": log.get("dropped"),
        "rolled_back": []
        if verdict.passed or verdict.live is None
        else [
            {
                "drafter": drafter_version_of(damaged_drafter(config)),
                "reason": verdict.reason,
                "records": verdict.records,
            }
        ],
        "verified_rows": status.get("verified_rows"),
        "drafted_rows": status.get("drafted_rows"),
    }


def live_acceptance_length(records: Sequence[VerificationRecord]) -> float:
    """Replay τ of what was really drafted: whole logged blocks against the served text, whatever was verified."""
    matched = rounds = 0
    for record in records:
        text = [*record.prompt_ids, *record.output_ids]
        for r in record.rounds:
            following = text[r.start + 1 :]
            if not following:
                continue
            # the target's own token is not committed where the text ends inside the block
            matched += min(matching_prefix(r.draft_ids, following) + 1, len(following))
            rounds += 1
    return matched / max(1, rounds)

"""`draftsmith run`: the whole loop of a preset, from prompts to an improved drafter in service."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from datamodules.chat import render_prompt
from datamodules.mixture import load_mixture
from drafters.checkpoint import CONTENT, save_drafter
from drafters.errors import UserError
from drafters.packing import Document
from drafters.replay import replay
from drafters.verify import SamplingParams
from pipeline.bootstrap import paired_bootstrap_ratio
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.corpus import conversations, source_specs, train_and_validation
from pipeline.lineage import DataWindow
from pipeline.measure import acceptance_summary
from pipeline.models import TargetBundle, keep_copy, load_drafter_for
from pipeline.policies import policy_factory
from pipeline.release import ReleaseDesk, gate_policy
from pipeline.report import write_report
from pipeline.result import RESULT_FILE
from pipeline.stages.context import Stage, open_stage
from pipeline.stages.deploy import deploy_drafter
from pipeline.stages.distill import distill_offline
from pipeline.stages.evaluate import (
    evaluate_drafter,
    heldout_documents,
    lossless_in_float32,
    write_heldout,
)
from pipeline.stages.length_head import fit_length_head
from pipeline.stages.online import distill_online
from pipeline.stages.regenerate import regenerate_responses
from pipeline.stages.rerun import StageRunner
from pipeline.stages.train import train_drafter
from serving_bridge.local_engine import Completion, LocalEngine, Request
from serving_bridge.spool import SpoolWriter
from serving_bridge.transport import BufferedWriter


def run_whole(config: Config) -> Path:
    """Every stage in order, then traffic, online rounds, and the comparison before and after.

    `<output>/result.json` holds the figures, `report.html` the plots; `drafter_offline/`, `drafter_online/`, `target/` and
    `heldout.jsonl` are kept so that anyone can recompute them.
    """
    check_whole(config)
    show_budget(config)
    runner = StageRunner(config)
    output = config.output
    runner.run("responses", lambda _: regenerate_responses(config))
    runner.run("train", lambda resume: train_drafter(config, resume=resume))
    trained, distilled = output / "train" / "drafter", output / "distill" / "drafter"
    runner.run("distill", lambda resume: distill_offline(config, drafter=trained, resume=resume))
    runner.run("length_head", lambda resume: fit_length_head(config, drafter=distilled, resume=resume))
    offline = output / "length_head" / "drafter"
    runner.run("deploy", lambda _: deploy_drafter(config, drafter=offline))
    runner.run("online", lambda resume: serve_and_learn(config, resume=resume))
    runner.run("evaluate", lambda _: evaluate_drafter(config, drafter=offline, lossless=False))
    runner.run(".", lambda _: conclude(config, runner.seconds))
    return write_report(config)


def show_budget(config: Config) -> None:
    """What the run expects to take, before it starts."""
    budget = config.budget_minutes
    if budget:
        rows = [[stage, f"{minutes:g}"] for stage, minutes in budget.items()]
        show_table("time budget", ["stage", "minutes"], [*rows, ["total", f"{sum(budget.values()):g}"]])


def check_whole(config: Config) -> None:
    """Refuse at the start what the run would need only near its end.

    Raises:
        UserError: naming the key.
    """
    if not config.traffic.sources:
        raise UserError("traffic.sources: the whole run needs prompts to serve while it learns online")
    load_mixture(source_specs(config.traffic.sources), seed=config.seed, limit=config.traffic.limit)
    domains = sorted({conversation.domain for conversation in conversations(config, "heldout")})
    if not domains:
        raise UserError("data.heldout: the whole run needs held-out prompts to measure on")
    if config.traffic.domain is not None and config.traffic.domain not in domains:
        raise UserError(
            f"traffic.domain: no held-out prompt has the domain {config.traffic.domain!r}; "
            f"data.heldout has {', '.join(domains)}"
        )


def serve_and_learn(config: Config, *, resume: bool = False) -> Path:
    """The embedded engine serves the traffic prompts while the online trainer follows its records."""
    spool = config.output / "spool"
    service = _Service(config, spool)
    threads = torch.get_num_threads()
    sharing = [] if config.serve.threads is None else [ShareThreads(service, threads, config.serve.threads)]
    try:
        return distill_online(
            config,
            log=spool,
            resume=resume,
            servers=service.start,
            should_stop=lambda: service.traffic_over,
            callbacks=sharing,
        )
    finally:
        service.stop()
        torch.set_num_threads(threads)


class ShareThreads(L.Callback):
    """Divides the CPU between engine and trainer; whichever of them has no work leaves it to the other.

    Args:
        service: the engine and its users.
        total: threads in all.
        serving: the engine's part while both work.
    """

    def __init__(self, service: _Service, total: int, serving: int) -> None:
        self.service = service
        self.total = total
        self.serving = serving

    def on_train_batch_start(self, *_: Any) -> None:
        assert self.service.engine is not None
        self.service.engine.threads = self.serving
        rest = self.total if self.service.traffic_over else max(1, self.total - self.serving)
        if torch.get_num_threads() != rest:
            torch.set_num_threads(rest)

    def on_train_epoch_end(self, *_: Any) -> None:
        # the round is settled, and the trainer waits for records
        assert self.service.engine is not None
        self.service.engine.threads = self.total


@dataclass
class _Service:
    """Engine, log writer and a thread that plays the users."""

    config: Config
    spool: Path
    engine: LocalEngine | None = None
    writer: BufferedWriter | None = None
    completions: list[Completion] = field(default_factory=list)
    _users: threading.Thread | None = None

    def start(self, stage: Stage) -> Sequence[LocalEngine]:
        config, bundle = self.config, stage.bundle
        desk = ReleaseDesk(
            stage.registry(), bundle, gate_policy(config.gate, config.seed), config.output / "versions"
        )
        champion = desk.registry.champion()
        assert champion is not None
        self.writer = BufferedWriter(
            SpoolWriter(
                self.spool,
                max_bytes=config.serve.spool_max_bytes,
                max_age_s=config.serve.spool_max_age_s,
            )
        )
        self.engine = LocalEngine(
            bundle.target,
            desk.checkpoint(champion.version),
            policy=policy_factory(config.policy),
            eos_ids=bundle.eos_ids,
            writer=self.writer,
            max_running=config.serve.max_running,
            # until the trainer has something to do
            threads=torch.get_num_threads(),
        )
        self._users = threading.Thread(target=self._play, args=(bundle,), name="users", daemon=True)
        self._users.start()
        return [self.engine]

    @property
    def traffic_over(self) -> bool:
        return self._users is not None and not self._users.is_alive()

    def _play(self, bundle: TargetBundle) -> None:
        assert self.engine is not None and self.writer is not None
        config = self.config
        prompts = load_mixture(
            source_specs(config.traffic.sources), seed=config.seed, limit=config.traffic.limit
        ).conversations
        futures = [
            self.engine.submit(
                Request(
                    # not the prompt's own id: the same prompt may have been answered for training
                    request_id=f"traffic/{prompt.id}",
                    conversation_key=prompt.id,
                    prompt_ids=render_prompt(bundle.tokenizer, prompt.messages),
                    max_new_tokens=config.serve.max_new_tokens,
                    sampling=SamplingParams(config.serve.temperature, seed=config.seed),
                    domain=prompt.domain,
                )
            )
            for prompt in prompts
        ]
        for number, future in enumerate(futures, start=1):
            try:
                self.completions.append(future.result())
            except CancelledError:
                return  # the engine stopped: the online rounds are over
            except UserError as error:
                say(f"a request failed: {error}")
            if number % 25 == 0 or number == len(futures):
                say(f"served {number}/{len(futures)} requests, drafter {self.engine.drafter_version}")
        self.writer.flush(10.0)

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.stop()
        if self.writer is not None:
            self.writer.close()


def conclude(config: Config, times: dict[str, float]) -> Path:
    """The comparison before and after, the gate drill, and the lossless check over both drafters."""
    with open_stage(config, "run", ".") as stage:
        bundle = stage.bundle
        documents = heldout_documents(stage)
        desk = ReleaseDesk(
            stage.registry(), bundle, gate_policy(config.gate, config.seed), config.output / "versions"
        )
        champion = desk.registry.champion()
        assert champion is not None
        offline = keep_copy(
            config.output / "drafter_offline", config.output / "length_head" / "drafter", bundle
        )
        online = keep_copy(config.output / "drafter_online", desk.checkpoint(champion.version), bundle)
        with stage.result.section("gate_drill"):
            refused = gate_drill(stage, desk, online)
        with stage.result.section("replay"):
            comparison = compare_on_heldout(config, bundle, offline, online, documents)
        with stage.result.section("lossless"):
            # the online drafter may still be the offline one; the one from scratch surely differs
            swapped = [config.output / "train" / "drafter", online]
            report = lossless_in_float32(config, swapped, documents)
        say(f"lossless: {report.lossless}, {report.swaps} swaps, compared {report.compared}")
        write_heldout(config.output / "heldout.jsonl", documents)
        stage.result.metrics |= {
            "lossless": report.lossless,
            "lossless_prompts": report.compared,
            "lossless_differing": report.differing,
            "swaps_under_load": report.swaps,
            "requests_across_a_swap": report.requests_across_a_swap,
            **comparison,
            "registry": {"model_name": desk.registry.model_name, "champion_version": champion.version},
            "gate": {"refused": refused},
            "speed": json.loads((config.output / "evaluate" / RESULT_FILE).read_text())["metrics"].get(
                "speed"
            ),
            "stage_seconds": dict(times),
        }
        for path in (offline, online, config.output / "heldout.jsonl"):
            stage.result.add_output(path)
        return stage.output


def gate_drill(stage: Stage, desk: ReleaseDesk, champion: Path) -> list[dict[str, Any]]:
    """All refusals of the run, after one that is provoked: a challenger that is finite and whole, but worse.

    It is the champion with noise of half of each weight's size: what a bad training run would look like to
    every checksum.
    """
    config, bundle = stage.config, stage.bundle
    loaded = load_drafter_for(champion, bundle)
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for parameter in loaded.drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(0.5 * parameter.float().std(unbiased=False).to(parameter) * noise)
    worse = save_drafter(
        stage.config.output / "versions" / "drill",
        loaded.drafter,
        identity=bundle.target.identity,
        drafter_version=f"{config.name}-drill-{CONTENT}",
        length_head=loaded.length_head,
        acceptance_head=loaded.acceptance_head,
    )
    _, validation = train_and_validation(config, bundle.target.identity)
    desk.submit(
        worse,
        validation,
        run_id=stage.tracked.run_id,
        lineage=stage.lineage(DataWindow("gate drill", {})),
    )
    return [
        {
            "version": version.version,
            "drafter_version": version.tags.get("drafter_version"),
            "reason": version.tags.get("gate_reason"),
        }
        for version in desk.registry.list_versions()
        if version.tags.get("gate_outcome") == "refused"
    ]


@torch.no_grad()
def compare_on_heldout(
    config: Config, bundle: TargetBundle, offline: Path, online: Path, documents: Sequence[Document]
) -> dict[str, Any]:
    """τ of the offline drafter on all held-out prompts, and before/after on the traffic's domain."""
    dtype = bundle.target.dtype
    before_drafter = load_drafter_for(offline, bundle, dtype=dtype).drafter
    after_drafter = load_drafter_for(online, bundle, dtype=dtype).drafter
    before = replay(before_drafter, bundle.target, documents)
    after = replay(after_drafter, bundle.target, documents)
    block_size = before_drafter.block_size
    domain = config.traffic.domain
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if domain in (None, b.domain) and b.rounds]
    difference = paired_bootstrap_ratio(
        [b.committed for b, _ in pairs],
        [b.rounds for b, _ in pairs],
        [a.committed for _, a in pairs],
        [a.rounds for _, a in pairs],
    )
    tau_before = acceptance_summary([b for b, _ in pairs], block_size)["acceptance_length"]
    tau_after = acceptance_summary([a for _, a in pairs], block_size)["acceptance_length"]
    trained_on = {conversation.domain for conversation in conversations(config, "train")}
    seen = [r for r in before if r.domain in trained_on]
    offline_summary = acceptance_summary(seen or before, block_size)
    offline_summary["by_domain"] = acceptance_summary(before, block_size)["by_domain"]
    online_summary = acceptance_summary(after, block_size)
    show_table(
        "acceptance length on held-out prompts",
        ["domain", "offline", "online", "ratio"],
        [
            [
                name,
                f"{offline_summary['by_domain'][name]:.3f}",
                f"{online_summary['by_domain'][name]:.3f}",
                f"{online_summary['by_domain'][name] / offline_summary['by_domain'][name]:.3f}",
            ]
            for name in offline_summary["by_domain"]
        ],
    )
    return {
        # the headline figure is over the domains trained on; `by_domain` shows the others too
        "offline": {**offline_summary, "domains": sorted(trained_on)},
        "online": {
            **{k: v for k, v in online_summary.items() if k != "acceptance_length"},
            "domain": domain,
            "prompts_compared": len(pairs),
            "acceptance_length_before": tau_before,
            "acceptance_length_after": tau_after,
            "ratio": tau_after / tau_before,
            "difference": difference.point,
            "difference_low": difference.low,
        },
    }

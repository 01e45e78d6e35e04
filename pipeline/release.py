"""From a trained drafter to a champion, or to a refusal with a reason: register, gate, and what they judge on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from drafters.checkpoint import drafter_digest
from drafters.errors import UserError
from drafters.packing import Document
from drafters.replay import ReplayResult, replay, total_acceptance_length
from pipeline.config import GateConfig
from pipeline.gate import GatePolicy, Verdict, judge
from pipeline.lineage import Lineage, sums_by_domain
from pipeline.models import TargetBundle, load_drafter_for
from pipeline.registry import RegisteredVersion, Registry


def gate_policy(config: GateConfig, seed: int) -> GatePolicy:
    """The gate room's policy."""
    return GatePolicy(
        confidence=config.confidence,
        min_documents=config.min_documents,
        max_domain_drop=config.max_domain_drop,
        bootstrap_samples=config.bootstrap_samples,
        seed=seed,
    )


@dataclass
class ReleaseDesk:
    """Registers drafters of one target and judges them against the champion.

    Replays are kept by (drafter, document), so a champion is not replayed again on documents it has seen.
    """

    registry: Registry
    bundle: TargetBundle
    policy: GatePolicy
    workspace: Path
    _replays: dict[tuple[str, str], ReplayResult] = field(default_factory=dict)

    def submit(
        self,
        directory: Path,
        documents: Sequence[Document],
        *,
        run_id: str,
        tags: Mapping[str, str] | None = None,
        guards: Sequence[Document] = (),
        lineage: Lineage | None = None,
    ) -> tuple[int, Verdict]:
        """Register a checkpoint as challenger and judge it; a refusal is recorded with its reason.

        Args:
            directory: serving checkpoint.
            documents: held-out recent traffic, never trained on.
            run_id: MLflow run that made it.
            tags: further registry tags.
            guards: documents of other domains, judged only for a drop.
            lineage: what made it; its parent and baseline are filled in here.

        Returns:
            version number and verdict. Promotion is the caller's, after swap and canary.
        """
        champion = self.registry.champion()
        traffic = {document.document_id for document in documents}
        documents = [*documents, *guards]
        self._forget_replays(champion, directory, documents)
        if champion is not None:
            tags = {"parent_version": str(champion.version), **(tags or {})}
        challenger_results, finite = self._replay_checked(directory, documents)
        if lineage is not None:
            lineage = replace(
                lineage,
                parent=None if champion is None else champion.version,
                baseline=sums_by_domain([r for r in challenger_results if r.document_id in traffic]),
            )
        version = self.registry.register(
            directory,
            run_id=run_id,
            tags=tags,
            metrics=_tau_by_domain(challenger_results),
            lineage=lineage,
        )
        if champion is not None and champion.version == version:
            return version, Verdict(False, f"version {version} is the champion already")
        self.registry.set_challenger(version)
        champion_results = (
            None if champion is None else self._replay(self.checkpoint(champion.version), documents)
        )
        verdict = judge(
            champion_results,
            challenger_results,
            self.policy,
            weights_finite=finite,
            reload_equal=self._reloads_equal(directory, version),
            guards={document.document_id for document in guards},
        )
        if not verdict.accepted:
            self.registry.refuse(version, verdict.reason)
        return version, verdict

    def checkpoint(self, version: int) -> Path:
        """A local copy of a registered version, downloaded once and verified at every call."""
        return self.registry.download(version, self.workspace / f"version-{version}")

    def forget_versions(self, keep: int) -> None:
        """Delete local copies but those of champion, previous champion, candidate and the latest `keep` versions."""
        kept = (self.registry.champion(), self.registry.previous_champion(), self.registry.candidate())
        named = {v.version for v in kept if v}
        copies = {int(p.name.removeprefix("version-")): p for p in self.workspace.glob("version-[0-9]*")}
        for number in sorted(copies)[:-keep]:
            if number not in named:
                shutil.rmtree(copies[number], ignore_errors=True)

    def _reloads_equal(self, directory: Path, version: int) -> bool:
        return drafter_digest(self.checkpoint(version)) == drafter_digest(directory)

    def _forget_replays(
        self, champion: RegisteredVersion | None, directory: Path, documents: Sequence[Document]
    ) -> None:
        """Drop what this submission cannot ask for, so that a service of many rounds does not grow."""
        digests = {drafter_digest(directory), champion.tags.get("drafter_digest") if champion else None}
        names = {document.document_id for document in documents}
        self._replays = {k: r for k, r in self._replays.items() if k[0] in digests and k[1] in names}

    def _replay_checked(
        self, directory: Path, documents: Sequence[Document]
    ) -> tuple[list[ReplayResult], bool]:
        try:
            return self._replay(directory, documents), True
        except UserError as error:
            if "not finite" in str(error):
                return [], False
            raise

    @torch.no_grad()
    def _replay(self, directory: Path, documents: Sequence[Document]) -> list[ReplayResult]:
        digest = drafter_digest(directory)
        missing = [d for d in documents if (digest, d.document_id) not in self._replays]
        if missing:
            target = self.bundle.target
            loaded = load_drafter_for(directory, self.bundle, dtype=target.dtype)
            for result in replay(loaded.drafter, target, missing):
                self._replays[digest, result.document_id] = result
        return [self._replays[digest, d.document_id] for d in documents]


def _tau_by_domain(results: Sequence[ReplayResult]) -> dict[str, Any]:
    domains = sorted({r.domain for r in results})
    taus = {f"tau_{d}": total_acceptance_length([r for r in results if r.domain == d]) for d in domains}
    return {"tau": total_acceptance_length(results), **taus}

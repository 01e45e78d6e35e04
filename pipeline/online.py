"""The online state machine: what happens to each drafter that an online round produces.

register *challenger* → gate → swap → canary → *champion* | refused | rolled back | superseded. The phase is on disk before
each step, so that a start after a crash finds out where things stood: the registry is asked again (registering equal weights
gives the same version), the server is brought to the champion, and the round is settled. A stop that is asked for before the
canary's verdict is answered in the same way: the champion serves, and the next start judges the round again.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from datamodules.streaming import StreamingDataModule
from drafters.checkpoint import CONTENT, save_drafter
from drafters.errors import UserError
from drafters.packing import Document
from lightning_modules.opd import OPDModule
from pipeline.canary import CanaryVerdict, watch
from pipeline.config import CanaryConfig
from pipeline.console import say
from pipeline.gate import Verdict
from pipeline.lineage import DataWindow, Lineage
from pipeline.registry import RegisteredVersion
from pipeline.release import ReleaseDesk
from pipeline.result import write_json
from pipeline.swaps import SwapNote, bring_to, drafter_version_of, swap_back
from serving_bridge.server import DraftServer, ServerLost, SwapError
from serving_bridge.transport import LogReader

KEPT_ROUNDS = 4
"""Rounds whose drafter stays on this disk."""

Outcome = Literal["champion", "waiting", "refused", "rolled_back", "swap_failed", "superseded"]
"""`waiting`: the gate accepts it, a person is to promote it. `superseded`: a person moved the champion meanwhile."""
Phase = Literal["collect", "register", "gate", "swap", "canary"]


@dataclass
class RoundOutcome:
    """How a round ended."""

    round_index: int
    version: int
    outcome: Outcome
    reason: str
    gate: dict[str, Any] = field(default_factory=dict)
    canary: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class OnlineState:
    """Persisted progress."""

    phase: Phase = "collect"
    round_index: int = -1
    version: int | None = None
    outcomes: list[RoundOutcome] = field(default_factory=list)
    swaps: list[SwapNote] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> OnlineState:
        """From disk, or a fresh one."""
        if not path.is_file():
            return cls()
        data = json.loads(path.read_text())
        outcomes = [RoundOutcome(**item) for item in data.pop("outcomes")]
        swaps = [SwapNote(**item) for item in data.pop("swaps", [])]
        return cls(**data, outcomes=outcomes, swaps=swaps)


class OnlinePublisher:
    """Settles rounds; the `Publisher` that the training callback is given.

    Args:
        directory: `<output>/online`; state and every round's checkpoint live here.
        desk: registry and gate.
        servers: running servers to keep on the champion; may be empty (registry only).
        guard_documents: offline validation documents, so that the gate sees forgetting in other domains.
        canary_reader: gives a reader of the log at its present end, for the canary; None skips the canary.
        canary: its settings.
        run_id: MLflow run for artifacts.
        name: prefix of drafter versions.
        lineage: of what is registered here, but for its data.
        deploy: whether an accepted challenger becomes champion; else it becomes candidate, for a person to promote.
    """

    def __init__(
        self,
        directory: Path,
        desk: ReleaseDesk,
        servers: Sequence[DraftServer],
        *,
        guard_documents: Sequence[Document],
        canary_reader: Callable[[], LogReader] | None,
        canary: CanaryConfig,
        run_id: str,
        name: str,
        should_stop: Callable[[], bool] = lambda: False,
        lineage: Lineage | None = None,
        deploy: bool = True,
    ) -> None:
        self.directory = directory
        self.desk = desk
        self.servers = servers
        self.guard_documents = guard_documents
        self.canary_reader = canary_reader
        self.canary = canary
        self.run_id = run_id
        self.name = name
        self.should_stop = should_stop
        self.lineage = lineage or Lineage()
        self.deploy = deploy
        self.state_path = directory / "state.json"
        self.state = OnlineState.load(self.state_path)

    @property
    def published_rounds(self) -> int:
        """Rounds whose outcome is settled."""
        return len(self.state.outcomes)

    def reconcile(self) -> None:
        """Bring every server to the champion, and let it go on: a crash may have left it paused, or on another drafter.

        Raises:
            UserError: naming a server that does not answer or will not swap.
        """
        champion = self.desk.registry.champion()
        checkpoint = None if champion is None else self.desk.checkpoint(champion.version)
        bring_to(self.servers, checkpoint, self.state.swaps.append)

    def publish(self, module: OPDModule, datamodule: StreamingDataModule, round_index: int) -> None:
        """Settle one round; see `Publisher`."""
        self._follow()
        self._enter("register", round_index)
        directory = self._export(module, round_index)
        counts = dict(datamodule.stream.counts)
        champion = self.desk.registry.champion()
        self._enter("gate", round_index)
        version, verdict = self.desk.submit(
            directory,
            datamodule.stream.holdout,
            guards=self.guard_documents,
            run_id=self.run_id,
            lineage=replace(self.lineage, data=_data_window(datamodule, round_index)),
        )
        self.state.version = version
        made_here = drafter_version_of(directory)
        if (
            champion is not None
            and champion.version == version
            and champion.tags.get("drafter_version") == made_here
        ):
            # a crash came between promotion and this: `reconcile` has seen to the servers
            self._settle(
                RoundOutcome(round_index, version, "champion", verdict.reason), verdict, None, counts
            )
            return
        if not verdict.accepted:
            self._settle(RoundOutcome(round_index, version, "refused", verdict.reason), verdict, None, counts)
            return
        if not self.deploy:
            self.desk.registry.accept(version, verdict.reason)
            reason = f"{verdict.reason}; not deployed: `draftsmith registry promote` makes it champion"
            self._settle(RoundOutcome(round_index, version, "waiting", reason), verdict, None, counts)
            return
        previous = None if champion is None else self.desk.checkpoint(champion.version)
        checkpoint = self.desk.checkpoint(version)
        reader = self.canary_reader() if self.canary_reader is not None and self.servers else None
        if reader is not None and previous is not None and self.should_stop():
            self._put_off(round_index, "told to stop before the canary")
            return
        if self._superseded(champion, round_index, version, verdict, None, counts):
            return
        # one server proves a challenger before the others get it
        first, rest = self.servers[:1], self.servers[1:]
        canary: CanaryVerdict | None = None
        try:
            self._enter("swap", round_index)
            self._swap_all(first, checkpoint, previous)
            if reader is not None and previous is not None:
                self._enter("canary", round_index)
                canary = self._watch(reader, checkpoint, previous)
                if canary.stopped:
                    self._bring_back(first, previous)
                    self._put_off(round_index, canary.reason)
                    return
                if not canary.passed:
                    # servers first: the registry may be the very thing that fails
                    try:
                        self._bring_back(first, previous)
                    finally:
                        self.desk.registry.refuse(version, f"rolled back by the canary: {canary.reason}")
                    outcome = RoundOutcome(round_index, version, "rolled_back", canary.reason)
                    self._settle(outcome, verdict, canary, counts)
                    return
                self._require_still_served(first, checkpoint, previous)
            self._swap_all(rest, checkpoint, previous, undo=first)
        except ServerLost as error:
            # says nothing of the drafter, so it is not refused; the next start or round finds out what the server runs
            self._settle(
                RoundOutcome(round_index, version, "swap_failed", str(error)), verdict, canary, counts
            )
            return
        except SwapError as error:
            self.desk.registry.refuse(version, f"swap failed: {error}")
            self._settle(
                RoundOutcome(round_index, version, "swap_failed", str(error)), verdict, canary, counts
            )
            return
        except Exception:
            # nobody may go on serving what was not judged to the end
            if previous is not None:
                self._bring_back(first, previous)
            raise
        if self._superseded(champion, round_index, version, verdict, canary, counts):
            return
        reason = verdict.reason if canary is None else f"{verdict.reason}; canary: {canary.reason}"
        self.desk.registry.promote(version, reason=reason)
        self._settle(RoundOutcome(round_index, version, "champion", reason), verdict, canary, counts)

    def _put_off(self, round_index: int, reason: str) -> None:
        """Leave the round where the next start judges it again."""
        self._enter("gate", round_index)
        say(f"round {round_index} is not settled: {reason}; the next start goes on with it")

    def _superseded(
        self,
        judged: RegisteredVersion | None,
        round_index: int,
        version: int,
        verdict: Verdict,
        canary: CanaryVerdict | None,
        counts: dict[str, int],
    ) -> bool:
        """Whether somebody moved the champion since the challenger was judged: that stands, and the round is settled."""
        now = self.desk.registry.champion()
        if now is None or judged is None or now.version in (judged.version, version):
            return False
        self._follow()
        reason = (
            f"the champion became version {now.version} meanwhile; judged against version {judged.version}"
        )
        outcome = RoundOutcome(round_index, version, "superseded", reason)
        self._settle(outcome, verdict, canary, counts)
        return True

    def _follow(self) -> None:
        """Servers that were restarted meanwhile run the drafter of their command line: bring them to the champion."""
        try:
            self.reconcile()
        except UserError as error:
            say(f"not all servers follow: {error}")

    def _watch(self, reader: LogReader, checkpoint: Path, previous: Path) -> CanaryVerdict:
        return watch(
            reader,
            drafter_version_of(checkpoint),
            previous,
            self.desk.bundle,
            self.canary,
            should_stop=self.should_stop,
        )

    def _require_still_served(self, servers: Sequence[DraftServer], checkpoint: Path, previous: Path) -> None:
        """A server that died under the challenger has proven nothing, though no record spoke against it.

        Raises:
            ServerLost: when a server does not tell, or came back with another drafter; it was given the old champion, if it
                would take it.
        """
        wanted = drafter_version_of(checkpoint)
        try:
            found = [server.drafter_version for server in servers]
        except SwapError as error:
            problem = str(error)
        else:
            if all(version == wanted for version in found):
                return
            problem = f"a server that was to prove {wanted} now serves {', '.join(found)}: it was restarted"
        with contextlib.suppress(UserError):
            self._bring_back(servers, previous)
        raise ServerLost(problem)

    def _swap_all(
        self,
        servers: Sequence[DraftServer],
        checkpoint: Path,
        previous: Path | None,
        undo: Sequence[DraftServer] = (),
    ) -> None:
        """All servers, or none: a failure puts the ones already swapped back, and those of `undo`."""
        swapped: list[DraftServer] = list(undo)
        try:
            for server in servers:
                report = server.swap(checkpoint)
                swapped.append(server)
                self.state.swaps.append(SwapNote.of(report))
                say(f"swapped {report.old_version} → {report.new_version}, paused {report.pause_ms:.1f} ms")
        except SwapError:
            if previous is not None:
                self._bring_back(swapped, previous)
            raise

    def _bring_back(self, servers: Sequence[DraftServer], champion: Path) -> None:
        """Swap servers to the champion, as many as will.

        Raises:
            UserError: for those that would not, after all were tried.
        """
        swap_back(servers, champion, self.state.swaps.append)

    def _export(self, module: OPDModule, round_index: int) -> Path:
        directory = self.directory / "rounds" / f"{round_index:04d}"
        return save_drafter(
            directory,
            module.drafter,
            identity=module.target.identity,
            drafter_version=f"{self.name}-r{round_index + 1}-{CONTENT}",
            length_head=module.length_head,
            acceptance_head=module.acceptance_head,
        )

    def _enter(self, phase: Phase, round_index: int) -> None:
        self.state.phase, self.state.round_index = phase, round_index
        self._save()

    def _settle(
        self,
        outcome: RoundOutcome,
        verdict: Verdict,
        canary: CanaryVerdict | None,
        counts: dict[str, int],
    ) -> None:
        outcome.gate = verdict.details
        outcome.canary = asdict(canary) if canary is not None else {}
        outcome.counts = counts
        self.state.outcomes.append(outcome)
        self.state.phase, self.state.version = "collect", None
        self._save()
        self._forget_old_rounds()
        say(f"round {outcome.round_index}: version {outcome.version} {outcome.outcome}: {outcome.reason}")

    def _forget_old_rounds(self) -> None:
        """Local copies of drafters are in the registry as well; a service of months must not fill its disk with them."""
        rounds = sorted((self.directory / "rounds").glob("[0-9]*"))
        for old in rounds[:-KEPT_ROUNDS]:
            shutil.rmtree(old, ignore_errors=True)
        self.desk.forget_versions(KEPT_ROUNDS)

    def _save(self) -> None:
        write_json(self.state_path, asdict(self.state))


def _data_window(datamodule: StreamingDataModule, round_index: int) -> DataWindow:
    label, window = f"online round {round_index}", datamodule.stream.window
    if window is None:
        return DataWindow(label, {})
    return DataWindow(label, window.domains, window.since, window.until)

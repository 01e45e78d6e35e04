"""What becomes of an online round: gate, swap, canary, promotion; and after a crash at any point."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pipeline.online
import pipeline.release
from datamodules.streaming import RoundWindow
from drafters.errors import UserError
from pipeline.canary import CanaryVerdict
from pipeline.config import CanaryConfig
from pipeline.online import OnlinePublisher, OnlineState
from pipeline.registry import Registry
from pipeline.release import ReleaseDesk
from serving_bridge.server import ServerLost, SwapError, SwapReport
from tests.pipeline.release_desk import (
    Desks,
    checkpoint_of,
    desks,
    documents,
    drafter_of,
    shared_tracking,
)
from tests.serving_bridge.tiny_serving import tiny_target

__all__ = ["desks", "shared_tracking"]

NAME = "tiny"
FIRST = "offline"


class Crash(BaseException):
    """The process is gone."""


def plain(drafter_version: str) -> str:
    """A version without the digest at its end."""
    return re.sub(r"-[0-9a-f]{8}$", "", drafter_version)


class FakeServer:
    """Serves what it is told; `refuses` holds versions it will not swap to."""

    def __init__(self, drafter_version: str) -> None:
        self.drafter_version = drafter_version
        self.swaps: list[str] = []
        self.refuses: set[str] = set()
        self.silent: set[str] = set()
        self.dies = False
        self.resumed = 0

    def resume(self) -> None:
        self.resumed += 1

    def swap(self, directory: Path) -> SwapReport:
        new = json.loads((directory / "manifest.json").read_text())["drafter_version"]
        if self.dies:
            raise Crash
        if plain(new) in self.silent:
            raise ServerLost("http://10.0.0.1: no answer")
        if plain(new) in self.refuses:
            raise SwapError(f"will not serve {plain(new)}")
        old, self.drafter_version = self.swaps[-1] if self.swaps else FIRST, new
        self.swaps.append(plain(new))
        return SwapReport(old, new, "d", "t", 0.1)


class FakeCanary:
    """Stands in for watching live traffic."""

    def __init__(self) -> None:
        self.verdict = CanaryVerdict(True, "live is fine", 1.7, 1.5, 12)
        self.watched: list[tuple[str, str]] = []
        self.on_watch: Callable[[], object] = lambda: None
        self.dies = False

    def __call__(
        self, reader: Any, drafter_version: str, baseline: Path, *rest: Any, **options: Any
    ) -> CanaryVerdict:
        if self.dies:
            raise Crash
        self.on_watch()
        self.watched.append((plain(drafter_version), baseline.name))
        return self.verdict


class Scene:
    """A champion of acceptance length 1.5 on two servers, and publishers as processes would make them."""

    def __init__(self, desks: Desks, directory: Path, canary: FakeCanary) -> None:
        self.desks, self.directory, self.canary = desks, directory, canary
        directory.mkdir()
        self.servers = [FakeServer(FIRST), FakeServer(FIRST)]
        desk = desks.open()
        first = checkpoint_of(directory / "first", 1.5, FIRST)
        version, verdict = desk.submit(first, documents(), run_id=desks.run_id, tags={})
        desk.registry.promote(version, reason=verdict.reason)

    def publisher(self, servers: list[FakeServer] | None = None) -> OnlinePublisher:
        return OnlinePublisher(
            self.directory,
            self.desks.open(),
            self.servers if servers is None else servers,
            guard_documents=documents(4, "chat", "extra"),
            canary_reader=lambda: SimpleNamespace(),  # type: ignore[arg-type, return-value]
            canary=CanaryConfig(),
            run_id=self.desks.run_id,
            name=NAME,
        )

    @property
    def registry(self) -> Registry:
        return self.desks.registry

    def champion(self) -> int:
        found = self.registry.champion()
        assert found is not None
        return found.version

    def serving(self) -> list[str]:
        return [plain(server.drafter_version) for server in self.servers]


@pytest.fixture
def scene(desks: Desks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    canary = FakeCanary()
    monkeypatch.setattr(pipeline.online, "watch", canary)
    return Scene(desks, tmp_path / "online", canary)


def settle(publisher: OnlinePublisher, quality: float, round_index: int = 0, seed: int = 1) -> None:
    """Publish a round whose training made a drafter of this quality."""
    module: Any = SimpleNamespace(
        drafter=drafter_of(quality, seed), target=tiny_target(), length_head=None, acceptance_head=None
    )
    window = RoundWindow(1.7e9, 1.7e9 + 60, {"code": 9})
    stream = SimpleNamespace(holdout=documents(6, "code", "held"), counts={"admitted": 9}, window=window)
    datamodule: Any = SimpleNamespace(stream=stream)
    publisher.publish(module, datamodule, round_index)


def test_one_server_proves_a_challenger_before_the_others_get_it(scene: Scene) -> None:
    seen: list[list[str]] = []
    scene.canary.on_watch = lambda: seen.append(scene.serving())
    publisher = scene.publisher()
    settle(publisher, 1.75)
    assert seen == [["tiny-r1", FIRST]]
    for state in (publisher.state, scene.publisher().state):
        assert [plain(note.new_version) for note in state.swaps] == ["tiny-r1", "tiny-r1"]


def test_what_the_canary_rejects_reaches_no_other_server(scene: Scene) -> None:
    scene.canary.verdict = CanaryVerdict(False, "live is bad", 1.0, 1.5, 12)
    publisher = scene.publisher()
    settle(publisher, 1.75)
    assert scene.servers[0].swaps == ["tiny-r1", FIRST]
    assert scene.servers[1].swaps == []
    assert publisher.state.outcomes[0].outcome == "rolled_back"


def test_a_later_server_that_refuses_takes_the_proven_one_back(scene: Scene) -> None:
    scene.servers[1].refuses = {"tiny-r1"}
    publisher = scene.publisher()
    settle(publisher, 1.75)
    assert scene.serving() == [FIRST, FIRST]
    assert publisher.state.outcomes[0].outcome == "swap_failed"
    assert scene.champion() == 1


def test_a_server_that_is_down_at_the_start_is_named(scene: Scene) -> None:
    class Down(FakeServer):
        @property  # type: ignore[override]
        def drafter_version(self) -> str:
            raise ServerLost("http://10.0.0.1: no answer")

        @drafter_version.setter
        def drafter_version(self, value: str) -> None:
            pass

    with pytest.raises(UserError, match=r"10\.0\.0\.1: no answer.*--resume"):
        scene.publisher([Down(FIRST)]).reconcile()


def test_accepted_drafter_is_swapped_watched_and_promoted(scene: Scene) -> None:
    publisher = scene.publisher()
    settle(publisher, 1.75)
    assert scene.serving() == ["tiny-r1", "tiny-r1"]
    assert scene.canary.watched == [("tiny-r1", "version-1")]
    assert scene.champion() == 2
    previous = scene.registry.previous_champion()
    assert previous is not None and previous.version == 1
    (outcome,) = publisher.state.outcomes
    assert (outcome.outcome, outcome.version, outcome.counts) == ("champion", 2, {"admitted": 9})
    assert outcome.gate["documents"] == 6  # held-out traffic decides
    assert outcome.gate["guard_documents"] == 4  # offline documents only guard their domains
    assert outcome.canary["live"] == 1.7 and "live is fine" in outcome.reason
    assert OnlineState.load(publisher.state_path) == publisher.state
    tags = scene.registry.get(2).tags
    assert tags["data_window"] == "online round 0: 9 documents, 2023-11-14 22:13 UTC to 2023-11-14 22:14 UTC"
    assert plain(tags["drafter_version"]) == "tiny-r1"
    lineage = scene.registry.lineage(2)
    assert lineage is not None and lineage.parent == 1
    assert set(lineage.baseline) == {"code"}  # what drift is measured against has no guards in it


def test_accepted_drafter_waits_where_a_person_promotes(scene: Scene) -> None:
    publisher = scene.publisher()
    publisher.deploy = False
    settle(publisher, 1.75)
    (outcome,) = publisher.state.outcomes
    assert outcome.outcome == "waiting" and "registry promote" in outcome.reason
    assert scene.champion() == 1 and scene.serving() == [FIRST, FIRST]
    waiting = scene.registry.candidate()
    assert waiting is not None and waiting.version == 2 and waiting.tags["gate_outcome"] == "accepted"
    publisher.deploy = True
    settle(publisher, 1.25, round_index=1, seed=2)
    assert scene.registry.candidate() == scene.registry.get(2)  # the next challenger takes nothing from it
    scene.registry.promote(2, reason="by hand")
    assert scene.registry.candidate() is None


def test_two_runs_of_one_name_do_not_share_versions(scene: Scene, desks: Desks, tmp_path: Path) -> None:
    """Else a server on the other run's drafter would pass for one that is in step."""
    settle(scene.publisher(), 1.75)
    mine = scene.servers[0].drafter_version
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    other = OnlinePublisher(
        elsewhere,
        desks.open(),
        scene.servers,
        guard_documents=[],
        canary_reader=None,
        canary=CanaryConfig(),
        run_id=desks.run_id,
        name=NAME,
    )
    settle(other, 2.0, seed=2)
    theirs = scene.servers[0].drafter_version
    assert plain(mine) == plain(theirs) == "tiny-r1" and mine != theirs


def test_refused_drafter_is_never_served(scene: Scene) -> None:
    publisher = scene.publisher()
    settle(publisher, 1.25)
    (outcome,) = publisher.state.outcomes
    assert outcome.outcome == "refused" and "is not above 0" in outcome.reason
    assert [server.swaps for server in scene.servers] == [[], []]
    assert scene.champion() == 1 and not scene.canary.watched
    assert scene.registry.get(2).tags["gate_reason"] == outcome.reason


def test_rounds_follow_each_other(scene: Scene) -> None:
    publisher = scene.publisher()
    for round_index, quality in enumerate([1.75, 1.25, 2.0]):
        settle(publisher, quality, round_index)
        publisher = scene.publisher()
        assert publisher.published_rounds == round_index + 1
    assert [o.outcome for o in publisher.state.outcomes] == ["champion", "refused", "champion"]
    assert scene.serving() == ["tiny-r3", "tiny-r3"] and scene.champion() == 4
    assert scene.canary.watched == [("tiny-r1", "version-1"), ("tiny-r3", "version-2")]


def test_a_swap_that_one_server_refuses_is_undone_on_the_others(scene: Scene) -> None:
    scene.servers[1].refuses = {"tiny-r1"}
    publisher = scene.publisher()
    settle(publisher, 1.75)
    assert scene.servers[0].swaps == ["tiny-r1", FIRST] and scene.servers[1].swaps == []
    assert scene.serving() == [FIRST, FIRST]
    (outcome,) = publisher.state.outcomes
    assert outcome.outcome == "swap_failed" and "will not serve tiny-r1" in outcome.reason
    refused = scene.registry.get(2)
    assert refused.tags["gate_outcome"] == "refused" and refused.tags["gate_reason"].startswith("swap failed")
    assert refused.aliases == () and scene.champion() == 1


def test_a_server_that_falls_silent_says_nothing_of_the_drafter(scene: Scene) -> None:
    scene.servers[0].silent = {"tiny-r1"}
    publisher = scene.publisher()
    settle(publisher, 1.75)
    (outcome,) = publisher.state.outcomes
    assert outcome.outcome == "swap_failed" and "no answer" in outcome.reason
    assert scene.registry.get(2).tags.get("gate_outcome") != "refused"
    assert scene.champion() == 1


def test_a_server_restarted_during_the_canary_proves_nothing(scene: Scene) -> None:
    def restart() -> None:
        scene.servers[0].drafter_version = "of the command line"

    scene.canary.on_watch = restart
    publisher = scene.publisher()
    settle(publisher, 1.75)
    (outcome,) = publisher.state.outcomes
    assert outcome.outcome == "swap_failed" and "restarted" in outcome.reason
    assert scene.champion() == 1 and scene.serving() == [FIRST, FIRST]
    assert scene.registry.get(2).tags.get("gate_outcome") != "refused"  # the drafter is not to blame


@pytest.mark.parametrize("error", [ServerLost("no answer"), SwapError("HTTP 502")])
def test_a_server_that_does_not_tell_what_it_serves_proves_nothing(scene: Scene, error: SwapError) -> None:
    class Mute(FakeServer):
        mute = False

        @property  # type: ignore[override]
        def drafter_version(self) -> str:
            if self.mute:
                raise error
            return self.version

        @drafter_version.setter
        def drafter_version(self, value: str) -> None:
            self.version = value

    server = Mute(FIRST)

    def fall_silent() -> None:
        server.mute = True

    scene.canary.on_watch = fall_silent
    publisher = scene.publisher([server])
    settle(publisher, 1.75)
    (outcome,) = publisher.state.outcomes
    assert outcome.outcome == "swap_failed" and str(error) in outcome.reason
    assert scene.champion() == 1
    assert scene.registry.get(2).tags.get("gate_outcome") != "refused"


@pytest.mark.parametrize("when", ["before the swap", "in the canary"])
def test_a_stop_before_the_verdict_puts_the_round_off(scene: Scene, when: str) -> None:
    publisher = scene.publisher()
    if when == "before the swap":
        publisher.should_stop = lambda: True
    else:
        scene.canary.verdict = CanaryVerdict(False, "told to stop after 0 of 4 records", stopped=True)
    settle(publisher, 1.75)
    assert publisher.published_rounds == 0
    assert scene.serving() == [FIRST, FIRST] and scene.champion() == 1
    assert scene.servers[0].swaps == ([] if when == "before the swap" else ["tiny-r1", FIRST])
    state = OnlineState.load(publisher.state_path)
    assert (state.phase, state.outcomes) == ("gate", [])
    assert scene.registry.get(2).tags.get("gate_outcome") != "refused"

    scene.canary.verdict = CanaryVerdict(True, "live is fine", 1.7, 1.5, 12)
    publisher = scene.publisher()
    publisher.reconcile()
    settle(publisher, 1.75)
    (outcome,) = publisher.state.outcomes
    assert (outcome.outcome, outcome.version) == ("champion", 2)
    assert len(scene.registry.list_versions()) == 2 and scene.serving() == ["tiny-r1", "tiny-r1"]


def test_a_stop_does_not_matter_where_no_canary_watches(scene: Scene) -> None:
    publisher = scene.publisher(servers=[])
    publisher.should_stop = lambda: True
    settle(publisher, 1.75)
    assert publisher.state.outcomes[0].outcome == "champion"


@pytest.mark.parametrize("when", ["at the gate", "in the canary"])
def test_a_promotion_by_hand_meanwhile_stands(
    scene: Scene, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(scene.publisher(), 1.75)
    settle(scene.publisher(), 2.0, round_index=1, seed=2)
    assert scene.champion() == 3

    def by_hand() -> None:
        scene.registry.rollback("slow on code")

    if when == "at the gate":
        submit = ReleaseDesk.submit

        def submit_and_move(*arguments: Any, **options: Any) -> Any:
            found = submit(*arguments, **options)
            by_hand()
            return found

        monkeypatch.setattr(ReleaseDesk, "submit", submit_and_move)
    else:
        scene.canary.on_watch = by_hand
    publisher = scene.publisher()
    settle(publisher, 2.5, round_index=2, seed=3)
    outcome = publisher.state.outcomes[-1]
    assert (outcome.outcome, outcome.version) == ("superseded", 4)
    assert "version 2 meanwhile" in outcome.reason
    assert scene.champion() == 2 and scene.serving() == ["tiny-r1", "tiny-r1"]
    assert scene.registry.get(4).tags.get("gate_outcome") != "refused"


def test_whatever_breaks_before_the_verdict_the_challenger_does_not_stay(scene: Scene) -> None:
    def broken() -> None:
        raise OSError("the registry's disk is full")

    scene.canary.on_watch = broken
    with pytest.raises(OSError, match="disk is full"):
        settle(scene.publisher(), 1.75)
    assert scene.serving() == [FIRST, FIRST]


def test_a_server_restarted_with_its_own_drafter_follows_at_the_next_round(scene: Scene) -> None:
    publisher = scene.publisher()
    settle(publisher, 1.75)
    scene.servers[1].drafter_version = FIRST
    settle(publisher, 1.5, round_index=1, seed=2)
    assert publisher.state.outcomes[-1].outcome == "refused"
    assert scene.serving() == ["tiny-r1", "tiny-r1"]
    assert all(server.resumed for server in scene.servers)


def test_old_rounds_leave_the_disk(scene: Scene) -> None:
    publisher = scene.publisher()
    for number in range(7):
        settle(publisher, 1.75 + number / 16, round_index=number, seed=number)
    kept = {p.name for p in (scene.directory / "rounds").iterdir()}
    assert kept == {"0003", "0004", "0005", "0006"}
    copies = {p.name for p in publisher.desk.workspace.glob("version-*")}
    assert {f"version-{scene.champion()}", f"version-{scene.champion() - 1}"} <= copies and len(copies) <= 6


def test_canary_brings_all_servers_back(scene: Scene) -> None:
    scene.canary.verdict = CanaryVerdict(False, "live 1.1 is below the floor 1.4", 1.1, 1.5, 12)
    publisher = scene.publisher()
    settle(publisher, 1.75)
    assert [server.swaps for server in scene.servers] == [["tiny-r1", FIRST], []]
    (outcome,) = publisher.state.outcomes
    assert outcome.outcome == "rolled_back" and outcome.reason == scene.canary.verdict.reason
    assert outcome.canary["live"] == 1.1 and outcome.gate["challenger"] == 1.75
    refused = scene.registry.get(2)
    assert "below the floor" in refused.tags["gate_reason"] and refused.tags["gate_outcome"] == "refused"
    assert refused.aliases == () and scene.champion() == 1


def test_a_server_stuck_on_the_challenger_is_an_error_that_names_the_remedy(scene: Scene) -> None:
    scene.canary.verdict = CanaryVerdict(False, "live is poor", 1.1, 1.5, 12)
    scene.servers[0].refuses = {FIRST}
    with pytest.raises(UserError, match=r"1 of 1 servers.*--resume"):
        settle(scene.publisher(), 1.75)
    assert scene.serving() == ["tiny-r1", FIRST]  # the other one was never given it
    assert scene.registry.get(2).tags["gate_outcome"] == "refused" and scene.champion() == 1

    publisher = scene.publisher()
    assert publisher.published_rounds == 0
    with pytest.raises(UserError, match="1 of 1 servers"):
        publisher.reconcile()
    scene.servers[0].refuses = set()
    publisher.reconcile()
    assert scene.serving() == [FIRST, FIRST]


def test_first_champion_needs_no_canary(scene: Scene, tmp_path: Path) -> None:
    publisher = scene.publisher()
    publisher.desk.registry = Registry(scene.desks.tracking.tracking_uri, "an-empty-model")
    publisher.desk.workspace = tmp_path / "elsewhere"
    publisher.reconcile()  # nothing to bring servers to
    settle(publisher, 1.25)
    champion = publisher.desk.registry.champion()
    assert champion is not None and champion.version == 1
    assert scene.serving() == ["tiny-r1", "tiny-r1"] and not scene.canary.watched


def test_without_servers_the_gate_alone_decides(scene: Scene) -> None:
    publisher = scene.publisher(servers=[])
    settle(publisher, 1.75)
    assert publisher.state.outcomes[0].outcome == "champion" and scene.champion() == 2
    assert not scene.canary.watched


def test_a_round_that_changed_nothing_is_no_new_champion(scene: Scene) -> None:
    publisher = scene.publisher()
    settle(publisher, 1.5)
    (outcome,) = publisher.state.outcomes
    assert (outcome.outcome, outcome.version) == ("refused", 1)
    assert "champion already" in outcome.reason
    assert len(scene.registry.list_versions()) == 1 and scene.champion() == 1
    assert [server.swaps for server in scene.servers] == [[], []]


def test_the_canary_watches_the_name_that_is_served(scene: Scene) -> None:
    publisher = scene.publisher()
    settle(publisher, 1.75)
    settle(publisher, 2.0, 1)
    settle(publisher, 1.75, 2)  # equal to version 2, refused now
    # with a champion gone bad, the weights of version 2 win again under their old name
    publisher.desk.registry.rollback("bad")
    publisher.desk.registry.promote(1)
    publisher.reconcile()
    settle(publisher, 1.75, 3)
    assert scene.serving() == ["tiny-r1", "tiny-r1"]
    assert scene.canary.watched[-1] == ("tiny-r1", "version-1")


def test_reconcile_touches_only_servers_that_are_off(scene: Scene) -> None:
    scene.servers[1].drafter_version = "tiny-r9"
    scene.publisher().reconcile()
    assert [server.swaps for server in scene.servers] == [[], [FIRST]]


Patch = pytest.MonkeyPatch


def die(*arguments: Any, **options: Any) -> Any:
    raise Crash


def dies_after(function: Callable[..., Any]) -> Callable[..., Any]:
    def run_and_die(*arguments: Any, **options: Any) -> Any:
        function(*arguments, **options)
        raise Crash

    return run_and_die


def in_export(scene: Scene, patch: Patch) -> None:
    patch.setattr(pipeline.online, "save_drafter", die)


def after_registration(scene: Scene, patch: Patch) -> None:
    patch.setattr(pipeline.release, "judge", die)


def after_gate(scene: Scene, patch: Patch) -> None:
    patch.setattr(ReleaseDesk, "submit", dies_after(ReleaseDesk.submit))


def between_swaps(scene: Scene, patch: Patch) -> None:
    scene.servers[1].dies = True


def in_canary(scene: Scene, patch: Patch) -> None:
    scene.canary.dies = True


def before_promotion(scene: Scene, patch: Patch) -> None:
    patch.setattr(Registry, "promote", die)


def after_promotion(scene: Scene, patch: Patch) -> None:
    patch.setattr(Registry, "promote", dies_after(Registry.promote))


def before_the_outcome_is_saved(scene: Scene, patch: Patch) -> None:
    write = pipeline.online.write_json

    def write_unless_settled(path: Path, content: Any) -> None:
        if content["phase"] == "collect":
            raise Crash
        write(path, content)

    patch.setattr(pipeline.online, "write_json", write_unless_settled)


def repair(scene: Scene) -> None:
    scene.canary.dies = False
    for server in scene.servers:
        server.dies = False


@pytest.mark.parametrize(
    "crash",
    [
        in_export,
        after_registration,
        after_gate,
        between_swaps,
        in_canary,
        before_promotion,
        after_promotion,
        before_the_outcome_is_saved,
    ],
)
def test_a_crash_anywhere_settles_the_round_once(
    crash: Callable[[Scene, Patch], None], scene: Scene, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        crash(scene, patch)
        with pytest.raises(Crash):
            settle(scene.publisher(), 1.75)
    repair(scene)

    publisher = scene.publisher()
    publisher.reconcile()
    serving = "tiny-r1" if scene.champion() == 2 else FIRST
    assert scene.serving() == [serving, serving]
    assert publisher.published_rounds == 0
    settle(publisher, 1.75)

    (outcome,) = scene.publisher().state.outcomes
    assert (outcome.outcome, outcome.version, outcome.round_index) == ("champion", 2, 0)
    assert scene.publisher().state.phase == "collect"
    assert [v.version for v in scene.registry.list_versions()] == [1, 2]
    assert scene.champion() == 2 and scene.serving() == ["tiny-r1", "tiny-r1"]
    assert scene.registry.challenger() is None
    assert scene.registry.get(2).tags["gate_outcome"] == "accepted"


def after_refusal(scene: Scene, patch: Patch) -> None:
    patch.setattr(Registry, "refuse", dies_after(Registry.refuse))


@pytest.mark.parametrize("crash", [after_registration, after_refusal, before_the_outcome_is_saved])
def test_a_crash_around_a_refusal_settles_it_once(
    crash: Callable[[Scene, Patch], None], scene: Scene, monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        crash(scene, patch)
        with pytest.raises(Crash):
            settle(scene.publisher(), 1.25)
    publisher = scene.publisher()
    publisher.reconcile()
    settle(publisher, 1.25)
    (outcome,) = scene.publisher().state.outcomes
    assert (outcome.outcome, outcome.version) == ("refused", 2)
    assert len(scene.registry.list_versions()) == 2 and scene.champion() == 1
    assert scene.serving() == [FIRST, FIRST]


@pytest.mark.parametrize("crash", [after_refusal, before_the_outcome_is_saved])
def test_a_crash_around_a_rollback_leaves_the_champion_in_service(
    crash: Callable[[Scene, Patch], None], scene: Scene, monkeypatch: Patch
) -> None:
    scene.canary.verdict = CanaryVerdict(False, "live is poor", 1.1, 1.5, 12)
    with monkeypatch.context() as patch:
        crash(scene, patch)
        with pytest.raises(Crash):
            settle(scene.publisher(), 1.75)
    publisher = scene.publisher()
    publisher.reconcile()
    assert scene.serving() == [FIRST, FIRST] and scene.champion() == 1
    settle(publisher, 1.75)
    (outcome,) = scene.publisher().state.outcomes
    assert outcome.outcome == "rolled_back" and scene.serving() == [FIRST, FIRST]
    assert len(scene.registry.list_versions()) == 2 and scene.champion() == 1

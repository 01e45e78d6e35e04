"""`draftsmith prune`: layers removed one by one, the least missed first, each removal repaired and followed by recovery.

What was decided is on disk before it is acted on, so that a run that was cut off goes on where it stopped: in the middle of a
recovery from its checkpoint, else with the next removal.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import lightning as L

from datamodules.offline import OfflineDataModule
from datamodules.packed_loader import PackedLoader
from drafters.checkpoint import CONTENT, drafter_digest, save_drafter
from drafters.errors import UserError
from drafters.fill import Drafter
from drafters.layers import layers_of, mlp_output, remove_layer
from drafters.packing import Document
from drafters.prune import replay_without_each_layer
from drafters.repair import Repair, fit_repairs
from drafters.replay import ReplayResult, replay, total_acceptance_length
from lightning_modules.callbacks.export import ExportBest
from lightning_modules.recovery import RecoveryModule
from pipeline import ranks
from pipeline.config import Config
from pipeline.console import say, show_table
from pipeline.corpus import responses_directory, train_and_validation
from pipeline.fitting import (
    CHECKPOINT,
    export_on_success,
    fit,
    loss_spec,
    optim_spec,
    packing_spec,
    stage_documents,
    stage_trainer,
)
from pipeline.launch import across_ranks
from pipeline.lineage import DataWindow
from pipeline.measure import round_ms
from pipeline.models import keep_copy, load_drafter_for, prepare_training
from pipeline.result import hash_config, write_json
from pipeline.stages.context import Stage, open_stage

STATE = "state.json"
DECIDING: Mapping[str, bool | set[str]] = {"seed": True, "prune": True, "data": {"row_tokens", "max_length"}}
"""Of the configuration; drafter and documents are compared by content."""


@dataclass
class Removal:
    """A layer that goes: its place among the layers before.

    `importance[i]` is τ without layer `measured[i]`, repaired if the run repairs. `tau_unrecovered` is τ of the bare removal,
    `tau_start` τ from which recovery starts: with the repair, unless that made it worse.
    """

    removed: int
    measured: list[int]
    importance: list[float]
    tau_unrecovered: float
    tau_start: float


@dataclass
class PruneStep:
    """A kept checkpoint: layers left, τ right after the removal and after recovery, and what a round takes with it."""

    layers: int
    removal: Removal
    tau: float
    round_ms: float


@dataclass
class PruneState:
    """Persisted progress; `pending` is a removal whose recovery has not ended.

    `drafter` is the digest of the unpruned one, `settings` the hash of what it is pruned by.
    """

    drafter: str
    settings: str
    tau_whole: float | None = None
    round_ms_whole: float | None = None
    steps: list[PruneStep] = field(default_factory=list)
    pending: Removal | None = None

    @classmethod
    def load(cls, path: Path) -> PruneState:
        """Raises:
        UserError: when there is none.
        """
        if not path.is_file():
            raise UserError(f"{path}: nothing to resume; run without --resume")
        try:
            data = json.loads(path.read_text())
            pending = data["pending"]
            return cls(
                data["drafter"],
                data["settings"],
                data["tau_whole"],
                data["round_ms_whole"],
                [PruneStep(**{**s, "removal": Removal(**s["removal"])}) for s in data["steps"]],
                None if pending is None else Removal(**pending),
            )
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}: damaged, or of another version of draftsmith; run without --resume to start anew"
            ) from None


@across_ranks
def prune_drafter(config: Config, *, drafter: Path, resume: bool = False) -> Path:
    """Prune down to `prune.layers`, or until τ would fall below the floor; the result is `<output>/prune/drafter`.

    Args:
        config: the run.
        drafter: the unpruned drafter, teacher of every recovery.
        resume: go on where an earlier call was cut off.
    """
    with open_stage(config, "prune") as stage:
        run = _Pruning(stage, drafter, resume)
        run.go()
        directory = stage.output / "drafter"
        if ranks.is_first():
            keep_copy(directory, run.current, stage.bundle)
        stage.result.add_output(directory)
        return directory


class _Pruning:
    def __init__(self, stage: Stage, drafter: Path, resume: bool) -> None:
        self.stage, self.config, self.settings = stage, stage.config, stage.config.prune
        self.bundle, self.whole = stage.bundle, drafter
        self.path = stage.output / STATE
        with ranks.first_alone() as first:
            if first and not resume:
                self.path.unlink(missing_ok=True)
                for old in stage.output.glob("layers-*"):
                    shutil.rmtree(old)
        deciding = self.config.model_dump(mode="json", include=DECIDING)
        # when to stop may be said anew
        deciding["prune"] = {k: v for k, v in deciding["prune"].items() if k not in ("layers", "retention")}
        fresh = PruneState(drafter_digest(drafter), hash_config(deciding))
        self.state = PruneState.load(self.path) if resume else fresh
        for field_name, what in (("drafter", "of another drafter"), ("settings", "with other settings")):
            if getattr(self.state, field_name) != getattr(fresh, field_name):
                raise UserError(f"{self.path}: left by pruning {what}; run without --resume to start anew")
        train, validation = train_and_validation(self.config, self.bundle.target.identity)
        if not validation:
            raise UserError("data.val_fraction: pruning measures on validation documents, and there are none")
        self.train = stage_documents(self.settings, train, self.config.seed)
        self.measured = validation[: self.settings.measure_documents]
        stage.result.add_input(responses_directory(self.config, "train"))
        stage.result.add_input(drafter)
        self.depth = len(layers_of(load_drafter_for(drafter, self.bundle).drafter))
        wanted = self.settings.layers
        if wanted is not None and wanted >= self.depth:
            raise UserError(f"prune.layers: {wanted} is not below the {self.depth} layers of {drafter}")
        L.seed_everything(self.config.seed, verbose=False)
        ranks.wait_for_all()  # until all have read what the first will write

    @property
    def current(self) -> Path:
        """The latest kept checkpoint."""
        return self._directory(self.state.steps[-1].layers) / "drafter" if self.state.steps else self.whole

    def _directory(self, layers: int) -> Path:
        return self.stage.output / f"layers-{layers:03d}"

    def go(self) -> None:
        """Remove and recover until a stop."""
        if self.state.tau_whole is None:
            self.state.tau_whole = self._tau(self.whole)
            self.state.round_ms_whole = self._round_ms(self.whole)
            self._save()
        floor = self.settings.retention * self.state.tau_whole
        say(f"{self.depth} layers, acceptance length {self.state.tau_whole:.3f}, floor {floor:.3f}")
        left = self.depth - len(self.state.steps)
        while left > (self.settings.layers or 1):
            removal = self._choose()
            tau = self._recover(removal, left - 1)
            say(
                f"{left - 1} layers: layer {removal.removed} removed, acceptance length "
                f"{removal.tau_unrecovered:.3f}, repaired {removal.tau_start:.3f}, recovered {tau:.3f}"
            )
            if tau < floor:
                say(f"that is below the floor of {floor:.3f}; {left} layers stay")
                break
            left -= 1
            kept = self._directory(left) / "drafter"
            # before it is noted: what was registered twice is one version, what was not is none
            self._register(kept, tau)
            self.state.steps.append(PruneStep(left, removal, tau, self._round_ms(kept)))
            self.state.pending = None
            self._save()
        self.stage.result.metrics |= {
            "layers": left,
            "tau_whole": self.state.tau_whole,
            "round_ms_whole": self.state.round_ms_whole,
            "tau": self.state.steps[-1].tau if self.state.steps else self.state.tau_whole,
            "steps": [asdict(step) for step in self.state.steps],
        }
        rows = [
            [
                str(s.layers),
                str(s.removal.removed),
                f"{s.removal.tau_unrecovered:.3f}",
                f"{s.removal.tau_start:.3f}",
                f"{s.tau:.3f}",
                f"{s.round_ms:.1f}",
            ]
            for s in self.state.steps
        ]
        show_table(
            "pruning", ["layers", "removed", "τ bare", "τ repaired", "τ recovered", "ms per round"], rows
        )
        if ranks.is_first():
            _plot(self.state, self.depth, self.stage.output / "prune.png")

    def _choose(self) -> Removal:
        if self.state.pending is None:
            target, section = self.bundle.target, self.stage.result.section
            loaded = load_drafter_for(self.current, self.bundle, dtype=target.dtype)
            drafter = loaded.drafter
            with section("repair"):
                repairs = self._repairs(drafter)
            depth = len(layers_of(drafter))
            measured = ranks.decided_by_first(lambda: self._candidates(depth, repairs))
            with section("importance"):
                importance = self._without_each(drafter, measured, repairs)
                start = max(importance)
                removed = measured[importance.index(start)]
                repair = repairs.get(removed)
                bare = self._without_each(drafter, [removed], {})[0] if repair is not None else start
            if repair is None or bare > start:
                remove_layer(drafter, removed)
            else:
                remove_layer(drafter, removed, repair.weight_HI)
            with ranks.first_alone() as first:
                if first:
                    save_drafter(
                        self._start(depth - 1),
                        drafter,
                        identity=loaded.identity,
                        drafter_version=f"{self.config.name}-prune-{depth - 1}-start-{CONTENT}",
                    )
            self.state.pending = Removal(removed, measured, importance, bare, max(bare, start))
            self._save()
        return self.state.pending

    def _without_each(
        self, drafter: Drafter, candidates: Sequence[int], repairs: Mapping[int, Repair]
    ) -> list[float]:
        def sweep(documents: Sequence[Document]) -> list[tuple[ReplayResult, ...]]:
            swept = replay_without_each_layer(drafter, self.bundle.target, documents, candidates, repairs)
            return list(zip(*swept, strict=True))

        by_document = ranks.spread(self.measured, sweep)
        return [total_acceptance_length(results) for results in zip(*by_document, strict=True)]

    def _repairs(self, drafter: Drafter) -> dict[int, Repair]:
        if not self.settings.repair:
            return {}
        batches = PackedLoader(self.train, packing_spec(self.config, self.settings), seed=self.config.seed)
        # one epoch at most: the same rows again would teach nothing
        drawn = islice(batches, self.settings.repair_batches)
        layers = layers_of(drafter)
        repairs = fit_repairs(drafter, self.bundle.target, drawn, range(len(layers)))
        width = mlp_output(layers[0]).in_features
        rows = min((repair.rows for repair in repairs.values()), default=width)
        if rows < width:
            say(
                f"prune.repair_batches: repairs are fitted on {rows} rows, fewer than an MLP is wide ({width}); "
                "more batches or documents would make them better"
            )
        return repairs

    def _candidates(self, depth: int, repairs: Mapping[int, Repair]) -> list[int]:
        """The layers to measure: all, or those whose removal a repair makes up for best."""
        if self.settings.candidates is None or not repairs:
            return list(range(depth))
        return sorted(sorted(repairs, key=lambda layer: repairs[layer].residual)[: self.settings.candidates])

    def _start(self, layers: int) -> Path:
        """The checkpoint that a recovery starts from."""
        return self._directory(layers) / "start"

    def _recover(self, removal: Removal, layers: int) -> float:
        """τ after recovery; the checkpoint is in the directory of this many layers."""
        output = self._directory(layers)
        checkpoint = str(output / CHECKPOINT) if (output / CHECKPOINT).is_file() else None
        student = load_drafter_for(self._start(layers), self.bundle)
        teacher = load_drafter_for(self.whole, self.bundle, dtype=self.bundle.target.dtype).drafter
        module = RecoveryModule(
            prepare_training(
                student.drafter, self.bundle, self.train, freeze_mlp=self.config.drafter.freeze_mlp
            ),
            teacher,
            self.bundle.target,
            loss_spec(self.settings.loss),
            optim_spec(self.settings.optim, self.settings.steps),
            label_share=self.settings.label_share,
            ar_weight=self.settings.loss.ar_weight,
        )
        with (
            self.stage.result.section("recovery"),
            export_on_success(output / "drafter", checkpoint) as pending,
        ):
            export = ExportBest(
                pending,
                self.bundle.target.identity,
                f"{self.config.name}-prune-{layers}-{CONTENT}",
                # recovery never hands on a worse drafter than it started from
                measure_start=True,
            )
            trainer = stage_trainer(
                output,
                self.settings,
                logger=self.stage.logger(),
                callbacks=[export],
                validate=True,
                processes=self.config.trainer,
            )
            datamodule = OfflineDataModule(
                self.train, self.measured, packing_spec(self.config, self.settings), seed=self.config.seed
            )
            fit(trainer, module, datamodule, checkpoint)
        return export.best

    def _register(self, directory: Path, tau: float) -> None:
        if not ranks.is_first():
            return
        self.stage.registry().register(
            directory,
            run_id=self.stage.tracked.run_id,
            metrics={"tau": tau},
            lineage=self.stage.lineage(DataWindow.of("pruned, offline", self.train)),
        )

    def _tau(self, directory: Path) -> float:
        target = self.bundle.target
        drafter = load_drafter_for(directory, self.bundle, dtype=target.dtype).drafter
        results = ranks.spread(self.measured, lambda some: replay(drafter, target, some))
        return total_acceptance_length(results)

    def _round_ms(self, directory: Path) -> float:
        drafter = load_drafter_for(directory, self.bundle, dtype=self.bundle.target.dtype).drafter
        return ranks.decided_by_first(lambda: round_ms(self.bundle, drafter, self.measured[0]))

    def _save(self) -> None:
        if ranks.is_first():
            write_json(self.path, asdict(self.state))


def _plot(state: PruneState, depth: int, path: Path) -> None:
    """τ with and without recovery, and τ per second of rounds, against layers."""
    from matplotlib.figure import Figure

    assert state.tau_whole is not None and state.round_ms_whole is not None
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    quality, speed = figure.subplots(1, 2)
    layers = [depth, *(step.layers for step in state.steps)]
    taus = [state.tau_whole, *(s.tau for s in state.steps)]
    times = [state.round_ms_whole, *(s.round_ms for s in state.steps)]
    quality.plot(layers, taus, marker="o", label="recovered")
    quality.plot(layers[1:], [s.removal.tau_start for s in state.steps], marker=".", label="repaired")
    quality.plot(
        layers[1:], [s.removal.tau_unrecovered for s in state.steps], marker="x", label="bare removal"
    )
    quality.set_ylabel("acceptance length")
    quality.legend()
    speed.plot(layers, [1000 * tau / ms for tau, ms in zip(taus, times, strict=True)], marker="o")
    speed.set_ylabel("tokens per second, one request")
    for axes in (quality, speed):
        axes.invert_xaxis()
        axes.set_xlabel("layers")
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=110)

"""What every stage does around its own work: a result file, an MLflow run, the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import ranks
from pipeline.config import Config
from pipeline.console import heading, say
from pipeline.lineage import DataWindow, Lineage
from pipeline.models import TargetBundle, describe_target, load_target
from pipeline.registry import Registry, model_name_for
from pipeline.result import RESULT_FILE, StageRun, git_state, stage_run, unwritten_run
from pipeline.tracking import TrackedRun, Tracking

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger


@dataclass
class Stage:
    """A stage under way."""

    config: Config
    output: Path
    result: StageRun
    run: TrackedRun | None
    loaded: TargetBundle | None = None

    @property
    def tracked(self) -> TrackedRun:
        """The MLflow run, which the first process has."""
        assert self.run is not None
        return self.run

    def logger(self) -> Logger | bool:
        """Lightning's logger into that run; none in other processes."""
        return tracking_for(self.config).lightning_logger(self.run.run_id) if self.run is not None else False

    @cached_property
    def bundle(self) -> TargetBundle:
        """The target, loaded on first use unless the stage was given it."""
        with self.result.section("load_target"):
            bundle = self.loaded or load_target(self.config)
        self.result.metrics["target"] = describe_target(bundle)
        return bundle

    def registry(self) -> Registry:
        """The registered model of this target and family."""
        return registry_for(self.config, self.bundle.target.identity.target_id)

    def lineage(self, data: DataWindow | None) -> Lineage:
        """For a drafter that this stage registers."""
        commit, dirty = git_state()
        return Lineage(
            stage=self.result.stage,
            config_hash=self.result.config_hash,
            git_commit=commit,
            git_dirty=dirty,
            data=data,
        )


def tracking_for(config: Config) -> Tracking:
    """MLflow at the configured URI, by default a SQLite file in the output directory."""
    uri = config.tracking.uri or f"sqlite:///{(config.output / 'mlflow.db').resolve()}"
    config.output.mkdir(parents=True, exist_ok=True)
    return Tracking(uri, config.tracking.experiment)


def registry_for(config: Config, target_id: str) -> Registry:
    """The registry of a (target, family)."""
    name = config.tracking.model_name or model_name_for(target_id, config.drafter.family)
    return Registry(tracking_for(config).tracking_uri, name)


@contextmanager
def open_stage(
    config: Config, name: str, folder: str | None = None, *, bundle: TargetBundle | None = None
) -> Iterator[Stage]:
    """Run a stage: on success `<output>/<folder>/result.json` is written and logged to MLflow, by the first process.

    `bundle` is the target, where the caller has loaded it already.

    Raises:
        UserError: when several processes run what is not made for it.
    """
    output = config.output / (folder or name)
    ranks.require_connection(name)
    if not ranks.is_first():
        yield Stage(config, output, unwritten_run(name, output, config.dump()), None, bundle)
        return
    heading(name)
    tracking = tracking_for(config)
    tracking.initialise()
    with tracking.run(f"{config.name}-{name}", {"stage": name}) as tracked:
        tracked.log_config(config.dump())
        with stage_run(name, output, config.dump()) as result:
            yield Stage(config, output, result, tracked, bundle)
        tracked.log_result(output / RESULT_FILE)
    assert result.result is not None
    say(f"{name}: done in {result.result.wall_seconds:.0f} s, {output / RESULT_FILE}")

"""`draftsmith distill --online`: continual distillation from verification records."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L

from datamodules.packed_loader import PackingSpec
from datamodules.streaming import StreamingDataModule, StreamSpec
from drafters.errors import UserError
from lightning_modules.callbacks.publish import PublishRounds
from lightning_modules.callbacks.round_vocabulary import RoundVocabulary
from lightning_modules.opd import OPDModule
from pipeline.config import Config, OnlineConfig
from pipeline.console import say
from pipeline.corpus import train_and_validation
from pipeline.fitting import (
    CHECKPOINT,
    fit,
    loss_spec,
    online_trainer,
    optim_spec,
    require_trainable,
    resume_path,
)
from pipeline.lock import trainer_lock
from pipeline.models import TargetBundle, load_drafter_for, prepare_training
from pipeline.online import OnlinePublisher
from pipeline.release import ReleaseDesk, gate_policy
from pipeline.stages.context import Stage, open_stage, tracking_for
from serving_bridge.redis_stream_address import BrokerError
from serving_bridge.server import DraftServer
from serving_bridge.transport import LogReader
from serving_bridge.transports import LOG_ERRORS, LogPlace, is_stream, open_reader, retain

READER = "trainer"
CANARY_READER = "canary"


def distill_online(
    config: Config,
    *,
    log: LogPlace,
    drafter: Path | None = None,
    resume: bool = False,
    servers: Callable[[Stage], Sequence[DraftServer]] = lambda stage: (),
    should_stop: Callable[[], bool] = lambda: False,
    callbacks: Sequence[L.Callback] = (),
) -> Path:
    """`online_rounds`, with the lock that keeps other trainers out of this output directory."""
    with trainer_lock(config.output / "online"):
        return online_rounds(
            config,
            log=log,
            drafter=drafter,
            resume=resume,
            servers=servers,
            should_stop=should_stop,
            callbacks=callbacks,
        )


def online_rounds(
    config: Config,
    *,
    log: LogPlace,
    drafter: Path | None = None,
    resume: bool = False,
    servers: Callable[[Stage], Sequence[DraftServer]] = lambda stage: (),
    should_stop: Callable[[], bool] = lambda: False,
    callbacks: Sequence[L.Callback] = (),
    settings: OnlineConfig | None = None,
    bundle: TargetBundle | None = None,
    deploy: bool = True,
) -> Path:
    """Run online rounds until told to stop, idle for too long, or `online.max_rounds` is reached.

    The caller holds the trainer's lock.

    Args:
        config: the run.
        log: where serving leaves verification records: a spool directory or a `redis://` address.
        drafter: weights to start from; None takes the registered champion.
        resume: continue `<output>/online/last.ckpt` if it is there.
        servers: running servers to keep on the champion, given the stage (the embedded engine shares its target).
        should_stop: polled while waiting; SIGTERM stops as well.
        callbacks: further ones for the trainer, called after its own: at the end of a round it is settled.
        settings: in place of `config.online`, which the run still records.
        bundle: the target, if it is loaded already.
        deploy: whether an accepted challenger becomes champion, in registry and servers.
    """
    with (
        open_stage(config, "online", bundle=bundle) as stage,
        stop_on_sigterm() as terminated,
        log_errors(log),
    ):
        settings = settings or config.online
        # a service is started by the same command each time, the first included
        checkpoint = resume_path(stage.output, resume and (stage.output / CHECKPOINT).exists())
        if checkpoint is None and (stage.output / CHECKPOINT).exists():
            raise UserError(
                f"{stage.output / CHECKPOINT}: an earlier online run stands here; add --resume to continue it, "
                "or choose another --output"
            )

        def stopping() -> bool:
            return should_stop() or terminated()

        bundle = stage.bundle
        train, validation = train_and_validation(config, bundle.target.identity)
        desk = ReleaseDesk(
            stage.registry(), bundle, gate_policy(config.gate, config.seed), config.output / "versions"
        )
        start = drafter or champion_checkpoint(desk)
        loaded = load_drafter_for(start, bundle)
        require_trainable(loaded.drafter, settings, "online")
        L.seed_everything(config.seed, verbose=False)
        module = OPDModule(
            prepare_training(loaded.drafter, bundle, train, freeze_mlp=config.drafter.freeze_mlp),
            bundle.target,
            loss_spec(settings.loss),
            optim_spec(settings.optim, None),
            loaded.length_head.train() if loaded.length_head is not None else None,
            acceptance_head=loaded.acceptance_head.train() if loaded.acceptance_head is not None else None,
            feature_cache_bytes=settings.feature_cache_mib * 2**20,
            ar_weight=settings.loss.ar_weight,
        )
        publisher = OnlinePublisher(
            stage.output,
            desk,
            servers(stage),
            guard_documents=validation,
            canary_reader=lambda: reader_at_end(log),
            canary=config.canary,
            run_id=stage.tracked.run_id,
            name=config.name,
            should_stop=terminated,
            lineage=stage.lineage(None),
            deploy=deploy,
        )
        publisher.reconcile()
        reader = open_reader(log, READER)
        reader.commit(reader.cursor)
        datamodule = StreamingDataModule(
            reader,
            stream_spec(settings),
            PackingSpec(1, settings.anchors_per_document, settings.anchor_source, settings.max_length),
            target_id=bundle.target.identity.target_id,
            seed=config.seed,
            offline=train if settings.replay_buffer.seed_offline else (),
            should_stop=stopping,
        )
        trainer = online_trainer(
            stage.output,
            settings,
            logger=tracking_for(config).lightning_logger(stage.tracked.run_id),
            callbacks=[
                PublishRounds(publisher, stage.output / CHECKPOINT),
                Retention(log),
                *([] if settings.vocabulary is None else [RoundVocabulary(settings.vocabulary)]),
                terminated,
                *callbacks,
            ],
        )
        with stage.result.section("rounds"):
            fit(trainer, module, datamodule, checkpoint)
        outcomes = publisher.state.outcomes
        say("online rounds: " + ", ".join(f"{o.round_index} {o.outcome}" for o in outcomes))
        stage.result.metrics |= {
            "rounds": len(outcomes),
            "outcomes": [o.outcome for o in outcomes],
            "reasons": [o.reason for o in outcomes],
            "versions": [o.version for o in outcomes],
            "counts": datamodule.stream.counts,
            "quarantined": reader.quarantined,
        }
        return stage.output


def champion_checkpoint(desk: ReleaseDesk) -> Path:
    """The champion's local copy.

    Raises:
        UserError: when nothing is registered yet.
    """
    champion = desk.registry.champion()
    if champion is None:
        raise UserError(
            f"registry {desk.registry.model_name}: no champion yet; run `draftsmith deploy` first or give --drafter"
        )
    return desk.checkpoint(champion.version)


def stream_spec(settings: OnlineConfig) -> StreamSpec:
    """The data room's rules."""
    replay = settings.replay_buffer
    return StreamSpec(
        trigger=settings.trigger,
        passes=settings.passes,
        holdout_fraction=settings.holdout_fraction,
        holdout_capacity=settings.holdout_capacity,
        buffer_capacity=replay.capacity,
        buffer_share=replay.share,
        max_age_rounds=replay.max_age_rounds,
        max_record_age_s=settings.max_record_age_s,
        poll_s=settings.poll_s,
        idle_timeout_s=settings.idle_timeout_s,
    )


def reader_at_end(log: LogPlace) -> LogReader:
    """A reader past everything readable so far."""
    reader = open_reader(log, CANARY_READER, quarantine=False)
    while reader.read(256):
        pass
    return reader


class Retention(L.Callback):
    """Deletes the part of the log that every registered reader has behind it."""

    def __init__(self, log: LogPlace) -> None:
        self.log_place = log

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        retain(self.log_place)


class StopBetweenRounds(L.Callback):
    """SIGTERM ends the loop once the current round is published, or at once while it waits for records.

    Lightning's own handler, which it puts in front of others at the start, would leave in the middle of a round.
    """

    def __init__(self) -> None:
        self._terminated = threading.Event()

    def __call__(self) -> bool:
        return self._terminated.is_set()

    def receive(self, *_: Any) -> None:
        """The signal handler."""
        self._terminated.set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.receive)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self()


@contextmanager
def stop_on_sigterm() -> Iterator[StopBetweenRounds]:
    """Answer SIGTERM with a `StopBetweenRounds`; only in the main thread."""
    stop = StopBetweenRounds()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, stop.receive)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def log_errors(log: LogPlace) -> Iterator[None]:
    """What the log's own room raises, as errors for users."""
    try:
        yield
    except (*LOG_ERRORS, BrokerError) as error:
        raise UserError(str(error)) from error
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        if is_stream(log) or error.filename is None or not Path(error.filename).is_relative_to(log):
            raise
        raise UserError(f"--spool {log}: cannot be used as a spool ({error})") from error

"""Training runs for the crash tests, to be run in a process of their own, which may kill itself with SIGKILL."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch

from datamodules.offline import OfflineDataModule
from datamodules.packed_loader import PackingSpec
from datamodules.streaming import StreamingDataModule, StreamSpec
from drafters.packing import PackedBatch
from drafters.training_vocabulary import TrainingVocabulary
from lightning_modules.block_training import BlockTrainingModule
from lightning_modules.callbacks.export import ExportBest
from lightning_modules.callbacks.publish import PublishRounds
from lightning_modules.callbacks.round_vocabulary import RoundVocabulary
from lightning_modules.opd import OPDModule
from pipeline.config import FitConfig, LossConfig, OnlineConfig
from pipeline.fitting import CHECKPOINT, fit, loss_spec, online_trainer, optim_spec, stage_trainer
from pipeline.stages.online import Retention, stop_on_sigterm
from serving_bridge.spool import SpoolReader
from tests.lightning_modules.training_samples import (
    TARGET_ID,
    make_documents,
    make_drafter,
    make_head,
    make_target,
)

KILLED = -signal.SIGKILL
NEVER = 1000


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class KillAt(L.Callback):
    """Sends the process a signal at a hook, when the number of batches begun in all is `batch`."""

    def __init__(self, hook: str, batch: int, signal_number: int = signal.SIGKILL) -> None:
        self.hook, self.batch, self.signal = hook, batch, signal_number

    def _reached(self, hook: str, trainer: L.Trainer) -> None:
        if hook == self.hook and trainer.fit_loop.total_batch_idx + 1 == self.batch:
            os.kill(os.getpid(), self.signal)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._reached("batch_start", trainer)

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._reached("validation_start", trainer)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._reached("train_end", trainer)


class FinalState(L.Callback):
    """Writes everything that a resumed run must have in common with an uninterrupted one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loader = trainer.train_dataloader
        offline = isinstance(trainer.datamodule, OfflineDataModule)  # type: ignore[attr-defined]
        torch.save(
            {
                "weights": pl_module.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
                "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
                "random": torch.get_rng_state(),
                "step": trainer.global_step,
                "loader": loader.state_dict() if offline else None,
            },
            self.path,
        )


class NoisyTraining(BlockTrainingModule):
    """Draws from torch's generator, so that a lost random state shows in the weights."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (0.5 + torch.rand(()))


class NoisyDistillation(OPDModule):
    """The same for distillation."""

    def training_step(self, batch: PackedBatch, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (0.5 + torch.rand(()))


OFFLINE = FitConfig(
    steps=11,
    accumulate=1,
    checkpoint_every=4,
    validate_every=4,
    precision="32-true",
    optim={"lr": 1e-2, "warmup_steps": 3},
)


def run_offline(directory: Path, changes: dict[str, Any], kill: tuple[str, int] | None) -> None:
    """Train, from `last.ckpt` if it is there, and write `final.pt` and `history.json`."""
    torch.set_num_threads(1)
    loss = LossConfig(objective=changes.get("objective", "ce"))
    settings = OFFLINE.model_copy(
        update={"loss": loss} | {k: v for k, v in changes.items() if k != "objective"}
    )
    L.seed_everything(7, verbose=False)
    target = make_target()
    module = NoisyTraining(
        make_drafter(target),
        target,
        loss_spec(settings.loss),
        optim_spec(settings.optim, settings.steps),
        feature_cache_bytes=20_000,  # holds about half of the documents
        vocabulary=settings.vocabulary
        and TrainingVocabulary.of(make_documents(14), target.config.vocab_size, settings.vocabulary),
    )
    export = ExportBest(directory / "drafter", target.identity, "v1")
    callbacks = [export, FinalState(directory / "final.pt"), *([KillAt(*kill)] if kill else [])]
    checkpoint = directory / CHECKPOINT
    validation = make_documents(2, first=50) if settings.validate_every < NEVER else []
    trainer = stage_trainer(directory, settings, logger=False, callbacks=callbacks, validate=bool(validation))
    data = OfflineDataModule(make_documents(14), validation, PackingSpec(42, 6, "random", 64), seed=3)
    fit(trainer, module, data, str(checkpoint) if checkpoint.exists() else None)
    (directory / "history.json").write_text(json.dumps(export.history))


ONLINE = OnlineConfig(
    trigger=4,
    passes=2,
    accumulate=2,
    max_rounds=3,
    idle_timeout_s=0.05,
    poll_s=0.01,
    precision="32-true",
    optim={"lr": 1e-2, "warmup_steps": 2, "schedule": "constant"},
)
STREAM = StreamSpec(
    trigger=4,
    passes=2,
    holdout_fraction=0.25,
    buffer_share=0.2,
    max_age_rounds=2,
    poll_s=0.01,
    idle_timeout_s=0.05,
)


class FilePublisher:
    """Appends what each round was made of to a file, then settles the round in another."""

    def __init__(self, directory: Path, kill: tuple[str, int] | None) -> None:
        self.published = directory / "published.jsonl"
        self.settled = directory / "settled.txt"
        self.kill = kill

    @property
    def published_rounds(self) -> int:
        return len(self.settled.read_text().splitlines()) if self.settled.exists() else 0

    def publish(self, module: OPDModule, datamodule: StreamingDataModule, round_index: int) -> None:
        if self.kill == ("publish_start", round_index):
            kill_myself()
        torch.rand(3)  # a publisher that loads models draws from the generator too
        stream = datamodule.stream
        weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
        line = {
            "round": round_index,
            "trained": [d.document_id for number, d in stream.buffer if number == round_index],
            "held_out": [d.document_id for d in stream.holdout],
            "counts": stream.counts,
            "weights": hashlib.sha256(weights).hexdigest(),
        }
        with self.published.open("a") as handle:
            handle.write(json.dumps(line) + "\n")
        if module.vocabulary is not None:  # none was needed for a round that is only published again
            kept = self.published.with_name(f"vocabulary-{round_index}.json")
            kept.write_text(json.dumps(module.vocabulary.ids_U.tolist()))
        if self.kill == ("publish_middle", round_index):
            kill_myself()
        with self.settled.open("a") as handle:
            handle.write(f"{round_index}\n")
        if self.kill == ("publish_end", round_index):
            kill_myself()


class FragileStream(StreamingDataModule):
    """Kills the process while it collects a round, between its last batch and its end, or before it is committed."""

    kill: tuple[str, int] | None = None

    def finish_round(self) -> None:
        if self.kill == ("finish_round", self.stream.round_index):
            kill_myself()
        super().finish_round()

    def commit(self) -> None:
        if self.kill == ("before_commit", self.stream.round_index - 1):
            kill_myself()
        super().commit()
        if self.kill == ("after_commit", self.stream.round_index - 1):
            kill_myself()

    def collect(self) -> bool:
        if self.kill == ("collect", self.stream.round_index):
            self.reader.seek(self.stream.cursor)
            self.reader.read(3)
            kill_myself()
        return super().collect()


def run_online(directory: Path, kill: tuple[Any, ...] | None, checkpoint_every: int = 2) -> None:
    """Online rounds over `<directory>/spool` until it is exhausted; writes `final.pt` and `stream.json`."""
    settings = ONLINE.model_copy(update={"checkpoint_every": checkpoint_every})
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    target = make_target()
    module = NoisyDistillation(
        make_drafter(target),
        target,
        loss_spec(ONLINE.loss),
        optim_spec(ONLINE.optim, None),
        make_head(target),
        feature_cache_bytes=20_000,
    )
    spool = directory / "spool"
    reader = SpoolReader(spool, "trainer")
    reader.commit(reader.cursor)
    data = FragileStream(
        reader,
        STREAM,
        PackingSpec(1, 6, "rounds", 64),
        target_id=TARGET_ID,
        seed=5,
        offline=make_documents(3, first=80),
    )
    data.kill = kill
    checkpoint = directory / CHECKPOINT
    callbacks: list[L.Callback] = [
        PublishRounds(FilePublisher(directory, kill), checkpoint),
        Retention(spool),
        # another part of the vocabulary in each round, which a resume in its middle must find again
        RoundVocabulary(12),
        FinalState(directory / "final.pt"),
    ]
    if kill is not None:
        callbacks.append(KillAt(*kill))
    with stop_on_sigterm() as terminated:
        data.should_stop = terminated
        trainer = online_trainer(directory, settings, logger=False, callbacks=[*callbacks, terminated])
        fit(trainer, module, data, str(checkpoint) if checkpoint.exists() else None)
    (directory / "stream.json").write_text(json.dumps(data.state_dict()))

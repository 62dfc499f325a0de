"""Fit the network to the rows with Lightning; going on from a checkpoint gives the weights of an unbroken run."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger

from vismmoe.predictors import LookaheadNet, PredictorConfig
from vismmoe.types import PHASES
from vismmoe_training.data import LookaheadData
from vismmoe_training.module import MONITOR, LookaheadTrainer
from vismmoe_training.warm_start import warm_start


@dataclass(frozen=True)
class FitSettings:
    """How long and how fast to learn; the network's own settings are a PredictorConfig."""

    max_epochs: int
    patience: int
    learning_rate: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Fitted:
    """The best network of a training, in its exported form."""

    net: LookaheadNet
    epochs: int
    stopped_early: bool  # held-out recall had not risen for `patience` epochs
    score: float  # held-out recall@20, blended over distances, mean of prefill and decode


def fit(
    options: PredictorConfig,
    settings: FitSettings,
    data: LookaheadData,
    *,
    state: Path,
    resume: bool = False,
    logger: Logger | None = None,
    callbacks: Sequence[Callback] = (),
) -> Fitted:
    """Train with Lightning; checkpoints go to `state`, and with `resume` its last one is gone on with."""
    _quieten_lightning()
    torch.manual_seed(settings.seed)
    spec = data.table.spec
    module = LookaheadTrainer(options, spec, settings.learning_rate, settings.weight_decay, settings.seed)
    module.net.standardise(data.table.inputs(data.rows["train"]))
    if not resume:
        warm_start(module.net, data)
    best = ModelCheckpoint(state, "best", monitor=MONITOR, mode="max", enable_version_counter=False)
    last = ModelCheckpoint(state, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    stop = EarlyStopping(MONITOR, mode="max", patience=settings.patience)
    trainer = Trainer(
        accelerator="cpu",  # the network is small: handing rows to a GPU costs more than it saves
        max_epochs=settings.max_epochs,
        logger=logger or False,
        callbacks=[stop, EpochLines(), *callbacks, best, last],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
    )
    trainer.fit(module, datamodule=data, ckpt_path=str(state / "last.ckpt") if resume else None)
    chosen = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    module.load_state_dict(chosen)
    early = trainer.current_epoch < settings.max_epochs
    return Fitted(exported(module.net, data), trainer.current_epoch, early, float(best.best_model_score or 0.0))


def exported(net: LookaheadNet, data: LookaheadData) -> LookaheadNet:
    """The network as the artifact holds it: BatchNorm folded, no dropout."""
    folded = LookaheadNet(net.config, data.table.spec, folded=True)
    folded.load_state_dict(net.folded_weights())
    return folded.eval().requires_grad_(False)


class EpochLines(Callback):
    """One line an epoch on stderr."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
        names = {phase: f"val/recall20_{phase}" for phase in PHASES}
        told = [f"{phase} {seen[name]:.1%}" for phase, name in names.items() if name in seen]
        line = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  held-out recall@20: {', '.join(told)}"
        print(line, file=sys.stderr, flush=True)


def _quieten_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in ("does not have many workers", "Checkpoint directory", "number of training batches", "isinstance"):
        warnings.filterwarnings("ignore", f".*{message}.*")

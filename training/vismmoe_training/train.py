"""From routing logs to an artifact folder: split, fit, compare, save, register.

While training runs its state lies beside the artifact, in `<output>.training`: the last and the best checkpoint and the
number of the MLflow run. It goes away when the artifact is written, so the artifact folder is never half-written.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger

from vismmoe.artifact import Artifact, check_replaceable, load_artifact, save_artifact
from vismmoe.config import TrainConfig
from vismmoe.errors import UsageError
from vismmoe.predictors import LookaheadNet, PredictorConfig
from vismmoe.trace import read_traces, write_atomically
from vismmoe_training.data import LookaheadData, RowTable
from vismmoe_training.evaluate_predictors import Recall, compare, recall_table, to_json, verdict
from vismmoe_training.module import MONITOR, LookaheadTrainer
from vismmoe_training.registry import ModelVersion, TrackedRun
from vismmoe_training.warm_start import warm_start

SMALL_WIDTH = 1024


@dataclass(frozen=True)
class TrainSummary:
    """What `vismmoe train` says at its end."""

    output: Path
    epochs: int
    rows: dict[str, int]
    recalls: tuple[Recall, ...]
    shortfalls: tuple[str, ...]  # where a trivial rule is at least as good, in sentences
    run_id: str
    version: ModelVersion | None

    def __str__(self) -> str:
        tables = [recall_table(self.recalls, phase) for phase in ("decode", "prefill", "all")]
        judged = [f"Not better: {shortfall}." for shortfall in self.shortfalls]
        rows = ", ".join(f"{count} {side}" for side, count in self.rows.items())
        lines = [*tables, *judged, f"{self.epochs} epochs; rows: {rows}. Artifact: {self.output}"]
        return "\n\n".join(lines) + (f"\n{self.version}" if self.version else "")


@dataclass(frozen=True)
class FitSettings:
    """How long and how fast to learn; the network's own settings are a PredictorConfig."""

    max_epochs: int
    patience: int
    learning_rate: float
    weight_decay: float
    seed: int


def train(config: TrainConfig) -> TrainSummary:
    """Train a predictor on routing logs and write its artifact folder.

    Raises CorpusError for logs that cannot be used, UsageError for settings that make no sense, ArtifactError when the
    output folder holds something else.
    """
    output = Path(config.output)
    check_replaceable(output)
    torch.set_num_threads(config.threads or _threads(predictor_config(config).hidden_sizes[0]))
    table = RowTable(read_traces(config.traces), config.window)
    data = LookaheadData(table, config.batch_size, config.val_fraction, config.test_fraction, config.seed)
    state = TrainingState(output.with_name(f"{output.name}.training"), _fixed_settings(config, data))
    with state.open(config.experiment, config.tracking_uri, config.resume) as run:
        logger = _mlflow_logger(run, config.experiment)
        settings = _fit_settings(config)
        fitted = fit(predictor_config(config), settings, data, state=state.folder, resume=config.resume, logger=logger)
        summary = _finish(config, output, fitted, data, run)
    state.remove()
    return summary


def predictor_config(config: TrainConfig) -> PredictorConfig:
    """The network that the flags ask for. Raises UsageError when they contradict each other."""
    shared: dict[str, Any] = {
        "window": config.window,
        "gamma": config.gamma,
        "hidden_sizes": (config.hidden, config.hidden),
        "dropout": config.dropout,
        "use_visual_summary": config.use_visual_summary,
    }
    if config.network == "published":
        return PredictorConfig.published(**shared, head=config.head)
    shared |= {"use_token_state": config.use_token_state, "use_next_gate": config.use_next_gate}
    return PredictorConfig(**shared, head=config.head, rank=config.rank)


@dataclass(frozen=True)
class Fitted:
    """The best network of a training, in its exported form."""

    net: LookaheadNet
    epochs: int
    score: float  # held-out recall@20, blended


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
    return Fitted(exported(module.net, data), trainer.current_epoch, float(best.best_model_score or 0.0))


def exported(net: LookaheadNet, data: LookaheadData) -> LookaheadNet:
    """The network as the artifact holds it: BatchNorm folded, no dropout."""
    folded = LookaheadNet(net.config, data.table.spec, folded=True)
    folded.load_state_dict(net.folded_weights())
    return folded.eval().requires_grad_(False)


class TrainingState:
    """The folder `<output>.training`: checkpoints, the settings they were made with, the MLflow run they belong to."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self._settings = folder, settings

    def open(self, experiment: str, uri: str | None, resume: bool) -> TrackedRun:
        """The run to log into: a new one, or with `resume` the interrupted one. Raises UsageError."""
        if resume:
            known = self._known()
            self._check(known["settings"])
            return TrackedRun.resume(known["tracking_uri"], known["run_id"])
        self._abandon()
        run = TrackedRun.start(experiment, uri, {"vismmoe.command": "train"})
        run.log(params=self._settings)
        self.folder.mkdir(parents=True)
        told = {"settings": self._settings, "tracking_uri": run.uri, "run_id": run.run_id}
        write_atomically(self.folder / "state.json", json.dumps(told, indent=1).encode())
        return run

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _known(self) -> dict[str, Any]:
        try:
            known = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = None
        if not isinstance(known, dict) or not (self.folder / "last.ckpt").is_file():
            raise UsageError(f"There is nothing to resume: {self.folder} holds no checkpoint. Train without --resume.")
        return known

    def _check(self, before: dict[str, Any]) -> None:
        for name, value in self._settings.items():
            if before.get(name) != value:
                raise UsageError(
                    f"--resume must go on with the same settings, but {name} was {before.get(name)!r} and is now "
                    f"{value!r}. Use the same, or train anew without --resume."
                )

    def _abandon(self) -> None:
        """An interrupted training that is not resumed: its run ends, its checkpoints go."""
        try:
            known = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
            run = TrackedRun(known["tracking_uri"], known["run_id"])
            if run.is_running():  # kill -9 left it so
                run.end("KILLED")
        except (OSError, ValueError, KeyError, TypeError, UsageError):
            pass  # no state, or its database is gone: nothing to end
        self.remove()


class EpochLines(Callback):
    """One line an epoch on stderr."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
        told = [f"recall@{k} {seen[f'val/recall{k}']:.1%}" for k in (10, 20, 30) if f"val/recall{k}" in seen]
        line = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}  held-out {'  '.join(told)}"
        print(line, file=sys.stderr, flush=True)


def _finish(config: TrainConfig, output: Path, fitted: Fitted, data: LookaheadData, run: TrackedRun) -> TrainSummary:
    recalls = compare(fitted.net, data)
    artifact = Artifact(
        kind="lookahead",
        window=fitted.net.config.window,
        config=fitted.net.config.to_json(),
        spec=data.table.spec,
        tensors=fitted.net.state_dict(),
        metrics={"held_out": to_json(recalls)},
        training={**_fixed_settings(config, data), "epochs": fitted.epochs},
    )
    save_artifact(output, artifact, _card(recalls, data))
    loaded = load_artifact(output, data.table.spec)
    run.log(metrics=_final_metrics(recalls))
    version = None
    if config.register:
        version = run.register(output, loaded, config.register, config.alias)
    else:
        run.log_artifact(output)
    rows = {str(side): len(rows) for side, rows in data.rows.items()}
    return TrainSummary(output, fitted.epochs, rows, tuple(recalls), tuple(verdict(recalls)), run.run_id, version)


def _fit_settings(config: TrainConfig) -> FitSettings:
    rates = {"learning_rate": config.learning_rate, "weight_decay": config.weight_decay}
    return FitSettings(max_epochs=config.max_epochs, patience=config.patience, seed=config.seed, **rates)


def _fixed_settings(config: TrainConfig, data: LookaheadData) -> dict[str, Any]:
    """What must not change when a training is resumed; plain values, also the parameters of the run."""
    header = data.table.header
    return {
        **{f"net.{name}": value for name, value in predictor_config(config).to_json().items()},
        "max_epochs": config.max_epochs,
        "patience": config.patience,
        "learning_rate": config.learning_rate,
        "weight_decay": config.weight_decay,
        "batch_size": config.batch_size,
        "val_fraction": config.val_fraction,
        "test_fraction": config.test_fraction,
        "seed": config.seed,
        "logs.rows": len(data.table),
        "logs.items": len(data.side_of),
        "logs.keep_ratio": header.keep_ratio,
        "logs.compressor": header.compressor,
        "model.fingerprint": header.spec.fingerprint,
    }


def _final_metrics(recalls: Sequence[Recall]) -> dict[str, float]:
    chosen = [r for r in recalls if r.phase == "all" and r.k == 20]
    return {f"test/{r.rule.replace(' ', '_')}_recall20_d{r.distance or '_blended'}": r.recall for r in chosen}


def _card(recalls: Sequence[Recall], data: LookaheadData) -> str:
    spec = data.table.spec
    tables = "\n\n".join(f"```\n{recall_table(recalls, phase)}\n```" for phase in ("decode", "prefill", "all"))
    return (
        f"# Lookahead predictor for {spec.family}, model fingerprint {spec.fingerprint}\n\n"
        f"Hot Recall@k on held-out images ({len(data.rows['test'])} rows): of the experts that a layer d layers ahead "
        f"then used, how many were among the k named. `ceiling` is the best that k names can reach.\n\n{tables}\n"
    )


def _mlflow_logger(run: TrackedRun, experiment: str) -> Logger:
    from lightning.pytorch.loggers import MLFlowLogger

    return MLFlowLogger(experiment_name=experiment, tracking_uri=run.uri, run_id=run.run_id)


def _threads(width: int) -> int:
    """A small network is slower on many threads, and very much so beside other work: they wait for one another."""
    return torch.get_num_threads() if width >= SMALL_WIDTH else 1


def _quieten_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in ("does not have many workers", "Checkpoint directory", "number of training batches", "isinstance"):
        warnings.filterwarnings("ignore", f".*{message}.*")

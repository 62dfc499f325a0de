"""From routing logs to an artifact folder: split, fit, compare, save, register.

While training runs its state lies beside the artifact, in `<output>.training`: the last and the best checkpoint and the
number of the MLflow run. It goes away when the artifact is written, so the artifact folder is never half-written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger

from vismmoe.artifact import Artifact, check_replaceable, load_artifact, save_artifact
from vismmoe.config import TrainConfig
from vismmoe.exclusive import only_writer
from vismmoe.predictors import PredictorConfig
from vismmoe.trace import read_traces
from vismmoe.tracking import environment_kept
from vismmoe_training.data import LookaheadData
from vismmoe_training.evaluate_predictors import Recall, compare, recall_table, to_json, verdict
from vismmoe_training.fitting import FitSettings, Fitted, fit
from vismmoe_training.registry import ModelVersion, TrackedRun, check_name
from vismmoe_training.row_table import RowTable
from vismmoe_training.training_state import TrainingState

SMALL_WIDTH = 1024


@dataclass(frozen=True)
class TrainSummary:
    """What `vismmoe train` says at its end."""

    output: Path
    epochs: str
    rows: dict[str, int]
    recalls: tuple[Recall, ...]
    shortfalls: tuple[str, ...]  # where a trivial rule is at least as good, in sentences
    run_id: str
    version: ModelVersion | None

    def __str__(self) -> str:
        tables = [recall_table(self.recalls, phase) for phase in ("decode", "prefill", "all")]
        judged = [f"Not better: {shortfall}." for shortfall in self.shortfalls]
        rows = ", ".join(f"{count} {side}" for side, count in self.rows.items())
        lines = [*tables, *judged, f"{self.epochs}; rows: {rows}. Artifact: {self.output}"]
        return "\n\n".join(lines) + (f"\n{self.version}" if self.version else "")


def train(config: TrainConfig) -> TrainSummary:
    """Train a predictor on routing logs and write its artifact folder.

    Raises CorpusError for logs that cannot be used, UsageError for settings that make no sense, ArtifactError when the
    output folder holds something else.
    """
    output = Path(config.output)
    check_replaceable(output)
    if config.register:
        check_name(config.register)
    torch.set_num_threads(config.threads or _threads(predictor_config(config).hidden_sizes[0]))
    table = RowTable(read_traces(config.traces), config.window)
    data = LookaheadData(table, config.batch_size, config.val_fraction, config.test_fraction, config.seed)
    state = TrainingState(output.with_name(f"{output.name}.training"), _fixed_settings(config, data))
    with (
        only_writer(output),
        environment_kept(),
        state.open(config.experiment, config.tracking_uri, config.resume) as run,
    ):
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
        "token_rank": config.token_rank,
        "use_history": config.use_history,
        "use_retained_mean": config.use_retained_mean,
        "use_visual_summary": config.use_visual_summary,
    }
    if config.network == "published":
        return PredictorConfig.published(**shared, head=config.head)
    shared |= {"use_token_state": config.use_token_state, "use_next_gate": config.use_next_gate}
    shared |= {"use_layer": config.use_layer, "use_phase": config.use_phase}
    return PredictorConfig(**shared, head=config.head, rank=config.rank)


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
    return TrainSummary(
        output, _epochs(config, fitted), rows, tuple(recalls), tuple(verdict(recalls)), run.run_id, version
    )


def _epochs(config: TrainConfig, fitted: Fitted) -> str:
    if not fitted.stopped_early:
        return f"{fitted.epochs} epochs"
    return (
        f"stopped early after {fitted.epochs} of {config.max_epochs} epochs, "
        f"{config.patience} of them without a better held-out recall (--patience)"
    )


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

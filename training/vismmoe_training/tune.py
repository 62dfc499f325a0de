"""Search for the predictor's settings with Optuna (TPE); a study has a name and a database, so it can be resumed.

Trials are compared by held-out Hot Recall@20 over the first COMMON_DISTANCES layers ahead: recall blended over a whole
window would favour the shortest window, since far layers are harder to foresee. lambda and alpha of the compressor
decide how good answers are, which routing logs cannot tell; they wait for `vismmoe eval`.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import torch

from vismmoe.config import TuneConfig
from vismmoe.errors import CorpusError, UsageError
from vismmoe.predictors import LookaheadNet, PredictorConfig
from vismmoe.trace import TraceSet, read_traces, write_atomically
from vismmoe_training.data import LookaheadData
from vismmoe_training.fitting import FitSettings, fit
from vismmoe_training.recall import HotRecall
from vismmoe_training.row_table import RowTable

WINDOWS = (3, 8)  # searched, both included
COMMON_DISTANCES = WINDOWS[0]
BATCH_SIZE = 512
PATIENCE = 3  # passes
WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class TuneSummary:
    """What `vismmoe tune` says at its end."""

    output: Path
    study: str
    trials: int  # finished ones in the study, those of earlier runs included
    recall: float
    best: dict[str, Any]

    def __str__(self) -> str:
        settings = "\n".join(f"  {name}: {value}" for name, value in self.best.items())
        return (
            f"best of {self.trials} trials in study {self.study}: held-out recall@20 {self.recall:.1%} over "
            f"{COMMON_DISTANCES} layers ahead\n{settings}\nTrain with it: vismmoe train --config {self.output}"
            "\nNot searched: salient_ratio (alpha) and trade_off (lambda); they need `vismmoe eval`, not built yet."
        )


def tune(config: TuneConfig) -> TuneSummary:
    """Run trials until the study has `config.trials` finished ones, then write the best settings as YAML.

    Raises CorpusError for logs that cannot be used, UsageError for a study that belongs to other logs or settings.
    """
    output = Path(config.output)
    if output.suffix not in (".yaml", ".yml") or output.is_dir():
        raise UsageError(f"--output must name a .yaml file, not {config.output!r}.")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    search = Search(read_traces(config.traces), config)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(config, search.identity())
    while (done := _finished(study)) < config.trials:
        study.optimize(search.trial, n_trials=1)
        print(f"trial {done + 1}/{config.trials}: {_told(study)}", file=sys.stderr, flush=True)
    return _finish(config, study, output)


class Search:
    """The objective: one training on the logs, judged on images that it did not see."""

    def __init__(self, traces: TraceSet, config: TuneConfig) -> None:
        self._traces, self._config = traces, config
        self._data: dict[int, LookaheadData] = {}  # by window: the rows' indices are dear to make

    def identity(self) -> dict[str, Any]:
        """What trials must share to be comparable; plain values."""
        config, header = self._config, self._traces.header
        return {
            "model": header.spec.fingerprint,
            "keep_ratio": header.keep_ratio,
            "rows": len(self._traces),
            "max_epochs": config.max_epochs,
            "val_fraction": config.val_fraction,
            "test_fraction": config.test_fraction,
            "seed": config.seed,
        }

    def trial(self, trial: optuna.Trial) -> float:
        """Held-out recall@20 of one choice of settings."""
        options, rate = self._suggest(trial)
        data = self._data_for(options.window)
        settings = FitSettings(
            max_epochs=self._config.max_epochs,
            patience=PATIENCE,
            learning_rate=rate,
            weight_decay=WEIGHT_DECAY,
            seed=self._config.seed,
        )
        with tempfile.TemporaryDirectory(prefix="vismmoe-tune-") as state:
            fitted = fit(options, settings, data, state=Path(state))
        return held_out_recall(fitted.net, data)

    def _suggest(self, trial: optuna.Trial) -> tuple[PredictorConfig, float]:
        furthest = min(WINDOWS[1], self._traces.header.window, len(self._traces.header.spec.moe_layers) - 1)
        width = trial.suggest_categorical("hidden", (64, 128, 256))
        options = PredictorConfig(
            window=trial.suggest_int("window", min(WINDOWS[0], furthest), furthest),
            gamma=trial.suggest_float("gamma", 0.5, 1.0),
            hidden_sizes=(width, width),
            dropout=trial.suggest_float("dropout", 0.0, 0.4),
        )
        return options, trial.suggest_float("learning_rate", 3e-4, 1e-2, log=True)

    def _data_for(self, window: int) -> LookaheadData:
        if window not in self._data:
            table = RowTable(self._traces, window)
            config = self._config
            self._data[window] = LookaheadData(
                table, BATCH_SIZE, config.val_fraction, config.test_fraction, config.seed
            )
        return self._data[window]


def held_out_recall(net: LookaheadNet, data: LookaheadData) -> float:
    """Hot Recall@20 over the first COMMON_DISTANCES layers ahead, on the rows that stop the training (VisMMoE §2)."""
    near = min(COMMON_DISTANCES, data.table.window)
    recall = HotRecall(20, near)
    with torch.inference_mode():
        for _, batch in data.batches("val"):
            scores = net(batch.inputs).expand(batch.active.shape)
            recall.update(scores[:, :near], batch.active[:, :near])
    value = recall.blended()
    if math.isnan(value):
        raise CorpusError("No expert ran in the held-out rows, so trials cannot be compared: collect more images.")
    return value


def open_study(config: TuneConfig, identity: dict[str, Any]) -> optuna.Study:
    """The named study, new or resumed. Raises UsageError when it was made for other logs or settings."""
    try:
        storage = optuna.storages.RDBStorage(config.storage)
        study = optuna.create_study(storage=storage, study_name=config.study, direction="maximize", load_if_exists=True)
    except Exception as error:  # Optuna hands on whatever its database layer raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"The study database {config.storage!r} cannot be used: {reason}") from None
    before = study.user_attrs.get("identity")
    if before is None:
        study.set_user_attr("identity", identity)
    elif before != identity:
        other = next(name for name in identity if before.get(name) != identity[name])
        raise UsageError(
            f"The study {config.study!r} was made with {other} {before.get(other)!r}, now it is {identity[other]!r}: "
            "trials would not be comparable. Name another one with --study."
        )
    # A resumed sampler that starts from the same seed would repeat the first trials.
    study.sampler = optuna.samplers.TPESampler(seed=config.seed + len(study.trials))
    return study


def _finished(study: optuna.Study) -> int:
    return sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials)


def _told(study: optuna.Study) -> str:
    last = study.trials[-1]
    value = "failed" if last.value is None else f"recall@20 {last.value:.1%}"
    settings = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in last.params.items())
    return f"{value} ({settings}); best {study.best_value:.1%}"


def _finish(config: TuneConfig, study: optuna.Study, output: Path) -> TuneSummary:
    best = {name: round(value, 6) if isinstance(value, float) else value for name, value in study.best_params.items()}
    split = {"val_fraction": config.val_fraction, "test_fraction": config.test_fraction, "seed": config.seed}
    lines = [
        f"# Best of {_finished(study)} trials in study {study.study_name}: "
        f"held-out recall@20 {study.best_value:.4f} over {COMMON_DISTANCES} layers ahead.",
        "# The split is part of it: with another one the test images would be images that trials were compared on.",
        *(f"{name}: {value}" for name, value in {**best, **split}.items()),
    ]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, ("\n".join(lines) + "\n").encode())
    return TuneSummary(output, study.study_name, _finished(study), float(study.best_value), best)

"""One trial: answer the held-out questions with these tokens kept, learn to foresee, replay the routing on a device.

Two numbers come out: the stall that the simulator foretells for a request, and how many answers are right. Both are of
images whose routing the predictor was not trained on.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from lightning import Callback, LightningModule, Trainer

from vismmoe.config import EngineConfig, TuneConfig
from vismmoe.engine import Engine, Request
from vismmoe.predictors import LookaheadNet, LookaheadPredictor, PredictorConfig
from vismmoe.simulate.foresight import LearnedForesight
from vismmoe.simulate.profile import read_profile
from vismmoe.simulate.replay import Setting, simulate
from vismmoe.trace import TraceHeader, TraceSet, TraceWriter, read_traces
from vismmoe_training.arms import read_questions, same
from vismmoe_training.collect import LOGGED_WINDOW
from vismmoe_training.data import LookaheadData
from vismmoe_training.fitting import FitSettings, fit
from vismmoe_training.module import MONITOR
from vismmoe_training.row_table import RowTable

WINDOWS = (2, 8)  # searched, both included
BATCH_SIZE = 512
PATIENCE = 3  # passes
WEIGHT_DECAY = 1e-2
ANSWER_TOKENS = 12
SEARCHED = ("affinity", "affinity-bytes", "affinity-prompt", "prompt")  # compressors
SEEN = "recalls"  # attribute of a trial: held-out recall after each pass
WARM_UP = 5  # finished trials before any is pruned
TOKENS = ("compressor", "keep_ratio", "salient_ratio", "trade_off")  # what decides which tokens are kept


@dataclass(frozen=True)
class Answered:
    """All questions under one choice of tokens."""

    accuracy: float
    traces: TraceSet


class Objective:
    """Called with a trial; keeps what trials share."""

    def __init__(self, traces: TraceSet, config: TuneConfig) -> None:
        self._traces, self._config = traces, config
        self._profile = read_profile(config.profile)
        self._questions = read_questions(Path(config.images), config.questions)
        self._data: dict[int, LookaheadData] = {}  # by window: the rows' indices are dear to make
        self._answered: dict[tuple[Any, ...], Answered] = {}

    def constants(self) -> dict[str, Any]:
        """The published constants (alpha ours) as a trial's parameters: the study's first, so that what it recommends
        is never worse than they are."""
        header = self._traces.header
        furthest = min(5, header.window, len(header.spec.moe_layers) - 1)
        published = {"keep_ratio": 0.5, "trade_off": 2.0, "gamma": 0.8, "window": furthest}
        ours = {"compressor": "affinity", "salient_ratio": 0.2, "hidden": 128, "dropout": 0.1, "learning_rate": 3e-4}
        return {**published, **ours}

    def __call__(self, trial: optuna.Trial) -> tuple[float, float]:
        """(simulated stall of a request in ms, share of right answers)."""
        tokens, options, rate = self._suggest(trial)
        net = self._learn(trial, options, rate)
        answered = self._answer(tokens)
        return self.stall_ms(net, answered.traces), answered.accuracy

    def _suggest(self, trial: optuna.Trial) -> tuple[dict[str, Any], PredictorConfig, float]:
        header = self._traces.header
        furthest = min(WINDOWS[1], header.window, len(header.spec.moe_layers) - 1)
        width = trial.suggest_categorical("hidden", (64, 128, 256))
        tokens = {
            "compressor": trial.suggest_categorical("compressor", SEARCHED),
            "keep_ratio": trial.suggest_float("keep_ratio", 0.3, 0.9, step=0.1),
            "salient_ratio": trial.suggest_float("salient_ratio", 0.05, 0.4, step=0.05),  # alpha
            "trade_off": trial.suggest_float("trade_off", 0.0, 4.0, step=0.5),  # lambda
        }
        options = PredictorConfig(
            window=trial.suggest_int("window", min(WINDOWS[0], furthest), furthest),
            gamma=trial.suggest_float("gamma", 0.5, 1.0),
            hidden_sizes=(width, width),
            dropout=trial.suggest_float("dropout", 0.0, 0.4),
        )
        return tokens, options, trial.suggest_float("learning_rate", 1e-4, 3e-3, log=True)

    def _learn(self, trial: optuna.Trial, options: PredictorConfig, rate: float) -> LookaheadNet:
        config = self._config
        settings = FitSettings(config.max_epochs, PATIENCE, rate, WEIGHT_DECAY, config.seed)
        with tempfile.TemporaryDirectory(prefix="vismmoe-tune-") as state:
            data = self._data_for(options.window)
            return fit(options, settings, data, state=Path(state), callbacks=[MedianStop(trial)]).net

    def _answer(self, tokens: dict[str, Any]) -> Answered:
        key = tuple(tokens[name] for name in TOKENS)
        if key not in self._answered:
            self._answered[key] = answer(replace(engine_config(self._config), **tokens), self._questions)
        return self._answered[key]

    def stall_ms(self, net: LookaheadNet, traces: TraceSet) -> float:
        """Of one request, by the simulator, with the predictor and the runtime's eviction."""
        config = self._config
        setting = Setting.of(traces, self._profile, slots=config.slots, expert_bytes=config.expert_bytes)
        foresight = LearnedForesight(LookaheadPredictor(net, traces.header.spec))
        result = simulate(setting, foresight=foresight)
        return result.stall_ms / result.requests

    def _data_for(self, window: int) -> LookaheadData:
        if window not in self._data:
            config = self._config
            table = RowTable(self._traces, window)
            self._data[window] = LookaheadData(
                table, BATCH_SIZE, config.val_fraction, config.test_fraction, config.seed
            )
        return self._data[window]


class MedianStop(Callback):
    """Prunes a trial whose best held-out recall so far lies under the median of the others' at the same pass.

    Optuna's own pruners do not serve studies with two objectives, so the passes stand in the trials' attributes.
    """

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial, self._seen = trial, list[float]()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen.append(max([float(trainer.callback_metrics[MONITOR]), *self._seen[-1:]]))
        self._trial.set_user_attr(SEEN, self._seen)
        finished = self._trial.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        others = [seen[: len(self._seen)][-1] for other in finished if (seen := other.user_attrs.get(SEEN))]
        if len(others) >= WARM_UP and self._seen[-1] < statistics.median(others):
            raise optuna.TrialPruned


def engine_config(config: TuneConfig) -> EngineConfig:
    """All experts resident: answers and routing do not depend on the budget."""
    return EngineConfig(model=config.model, device="cpu", threads=config.threads)


def answer(config: EngineConfig, questions: Sequence[Any]) -> Answered:
    """Ask and log; the logs live as long as the process."""
    right = []
    with Engine.load(config) as engine, tempfile.TemporaryDirectory(prefix="vismmoe-tune-") as folder:
        settings = {"prefix_layers": engine.prefix_layers}
        header = TraceHeader(engine.spec, config.keep_ratio, config.compressor, LOGGED_WINDOW, settings)
        with TraceWriter(Path(folder) / "logs", header) as writer:
            for number, asked in enumerate(questions):
                request = Request((asked.image,), asked.prompt, ANSWER_TOKENS, config.keep_ratio, config.compressor)
                recording = engine.record(request, item=str(number), window=LOGGED_WINDOW)
                right.append(same(recording.result.text, asked.answer))
                writer.add(recording.request, recording.routing)
        return Answered(statistics.fmean(right), read_traces([Path(folder) / "logs"]))

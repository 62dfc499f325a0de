"""Search with Optuna for what keeps stall low and answers right: which tokens are kept, and how experts are foreseen.

A study has a name and a database: it can be resumed, and several workers may share it, started by `--workers` or by
hand on any machine that reaches the database.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState

from vismmoe.config import TuneConfig
from vismmoe.errors import CorpusError, UsageError
from vismmoe.failures import quieten
from vismmoe.talk import table
from vismmoe.trace import TraceSet, read_traces
from vismmoe_training.tune_front import RULE, front, recommended, settings_of, write_front
from vismmoe_training.tune_objective import Objective
from vismmoe_training.tune_study import Surplus, begun, finished, no_surplus, open_study, parent_run, tracked

WAIT_S = 1.0  # between two looks at what other workers do


@dataclass(frozen=True)
class TuneSummary:
    """What `vismmoe tune` says at its end."""

    output: Path
    study: str
    trials: int  # that came to an end, those of earlier runs and pruned ones included
    pruned: int
    points: tuple[tuple[float, float], ...]  # the front: stall in ms a request, accuracy
    best: dict[str, Any]  # the recommended settings
    stall_ms: float
    accuracy: float
    files: tuple[Path, ...]

    def __str__(self) -> str:
        settings = "\n".join(f"  {name}: {value}" for name, value in self.best.items())
        rows = [(f"{stall:.3f}", f"{accuracy:.1%}") for stall, accuracy in self.points]
        return (
            f"{self.trials} trials in study {self.study}, {self.pruned} of them pruned. The Pareto front:\n"
            f"{table(rows, ('simulated stall ms', 'accuracy'))}\n"
            f"Recommended, {RULE}: {self.stall_ms:.3f} ms, {self.accuracy:.1%}\n{settings}\n"
            f"Use it: vismmoe train --config {self.output}, vismmoe infer --config {self.output}; each point has a "
            f"file of its own beside it."
        )


def tune(config: TuneConfig) -> TuneSummary:
    """Run trials until the study has `config.trials` that came to an end, then write the front as YAML.

    Raises CorpusError for logs or questions that cannot be used, UsageError for a study of other logs or settings.
    """
    output = Path(config.output)
    if output.suffix not in (".yaml", ".yml") or output.is_dir():
        raise UsageError(f"--output must name a .yaml file, not {config.output!r}.")
    traces = read_traces(config.traces)
    objective = Objective(traces, config)  # tells of missing questions and profiles before anything is started
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_study(config, identity(traces, config))
    if not study.trials:
        study.enqueue_trial(objective.constants())
    with parent_run(study, config):
        if config.workers == 1:
            work(config)
        else:
            with ProcessPoolExecutor(config.workers, mp_context=get_context("spawn")) as pool:
                for done in [pool.submit(work, config) for _ in range(config.workers)]:
                    done.result()
    return _finish(config, study, output)


def work(config: TuneConfig) -> None:
    """One worker: trials until there are enough."""
    quieten()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    traces = read_traces(config.traces)
    study = open_study(config, identity(traces, config))
    objective = no_surplus(tracked(Objective(traces, config), study, config), study, config.trials)
    while finished(study) < config.trials:
        optuna.storages.fail_stale_trials(study)
        if begun(study) >= config.trials:  # others are at the last ones: wait, and go on should one of them die
            time.sleep(WAIT_S)
            continue
        study.optimize(objective, n_trials=1, catch=(Surplus,))
        print(f"trial {finished(study)}/{config.trials}: {_told(study.trials)}", file=sys.stderr, flush=True)


def identity(traces: TraceSet, config: TuneConfig) -> dict[str, Any]:
    """What trials must share to be comparable; plain values."""
    header = traces.header
    return {
        "model": header.spec.fingerprint,
        "logs_keep_ratio": header.keep_ratio,
        "rows": len(traces),
        "images": Path(config.images).name,
        "questions": config.questions,
        "profile": Path(config.profile).name,
        "slots": config.slots,
        "expert_bytes": config.expert_bytes,
        "max_epochs": config.max_epochs,
        "val_fraction": config.val_fraction,
        "test_fraction": config.test_fraction,
        "seed": config.seed,
    }


def _told(trials: Sequence[FrozenTrial]) -> str:
    ended = [trial for trial in trials if trial.state.is_finished()]
    last = max(ended, key=lambda trial: trial.datetime_complete or trial.datetime_start)
    settings = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in last.params.items())
    if last.state != TrialState.COMPLETE:
        return f"{last.state.name.lower()} ({settings})"
    return f"stall {last.values[0]:.3f} ms, accuracy {last.values[1]:.1%} ({settings})"


def _finish(config: TuneConfig, study: optuna.Study, output: Path) -> TuneSummary:
    points = front(study)
    if not points:
        raise CorpusError("No trial came to its end, so there is nothing to recommend: give more --trials.")
    chosen = recommended(points)
    return TuneSummary(
        output=output,
        study=study.study_name,
        trials=finished(study),
        pruned=sum(trial.state == TrialState.PRUNED for trial in study.trials),
        points=tuple((trial.values[0], trial.values[1]) for trial in points),
        best=settings_of(chosen),
        stall_ms=chosen.values[0],
        accuracy=chosen.values[1],
        files=tuple(write_front(points, config, output)),
    )

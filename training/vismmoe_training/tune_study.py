"""The study: a name and a database, so that it can be resumed and shared by workers; a killed worker's trials go on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial, TrialState

from vismmoe.config import TuneConfig
from vismmoe.errors import UsageError
from vismmoe_training.registry import TrackedRun

warnings.filterwarnings("ignore", category=ExperimentalWarning)  # heartbeats; the tests watch over them
HEARTBEAT_S = 15  # a worker that has not been heard of for twice as long is dead
RETRIES = 3
ENDS = (TrialState.COMPLETE, TrialState.PRUNED)
RUN = "mlflow_run"  # attribute of a study and of a trial
Objective = Callable[[optuna.Trial], tuple[float, float]]


def open_study(config: TuneConfig, identity: dict[str, Any]) -> optuna.Study:
    """The named study, new or resumed. Raises UsageError when it was made for other logs or settings."""
    try:
        storage = RDBStorage(
            config.storage, heartbeat_interval=HEARTBEAT_S, heartbeat_stale_trial_callback=Resume(config.tracking_uri)
        )
        study = optuna.create_study(
            storage=storage, study_name=config.study, directions=["minimize", "maximize"], load_if_exists=True
        )
    except Exception as error:  # Optuna hands on whatever its database layer raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"The study database {config.storage!r} cannot be used: {reason}") from None
    if len(study.directions) != 2:
        raise UsageError(f"The study {config.study!r} has one objective, not two: name another one with --study.")
    study.set_metric_names(["stall_ms", "accuracy"])
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
    study.sampler = optuna.samplers.TPESampler(seed=config.seed + len(study.trials), constant_liar=True)
    return study


class Resume:
    """Called for a trial whose worker died: its run ends, its settings are tried again."""

    def __init__(self, uri: str | None) -> None:
        self._uri = uri
        self._retry = RetryHeartbeatStaleTrialCallback(max_retry=RETRIES)

    def __call__(self, study: optuna.Study, trial: FrozenTrial) -> None:
        told = trial.user_attrs.get(RUN)
        if told is not None:
            run = TrackedRun(told["uri"], told["id"])
            if run.is_running():
                run.end("KILLED")
        self._retry(study, trial)


def parent_run(study: optuna.Study, config: TuneConfig) -> TrackedRun:
    """The MLflow run of the whole study: made once, gone on with by whoever resumes it."""
    told = study.user_attrs.get(RUN)
    if told is not None:
        return TrackedRun.resume(told["uri"], told["id"])
    run = TrackedRun.start(config.experiment, config.tracking_uri, {"vismmoe.command": "tune"})
    run.log(params=study.user_attrs["identity"])
    study.set_user_attr(RUN, {"uri": run.uri, "id": run.run_id})
    return run


def tracked(objective: Objective, study: optuna.Study, config: TuneConfig) -> Objective:
    """The objective with a nested MLflow run around each trial."""
    parent = study.user_attrs[RUN]

    def run_trial(trial: optuna.Trial) -> tuple[float, float]:
        tags = {"mlflow.parentRunId": parent["id"], "vismmoe.trial": str(trial.number)}
        run = TrackedRun.start(config.experiment, parent["uri"], tags)
        trial.set_user_attr(RUN, {"uri": run.uri, "id": run.run_id})
        try:
            stall_ms, accuracy = objective(trial)
        except optuna.TrialPruned:
            run.log(params=trial.params)
            run.end("KILLED")
            raise
        except BaseException as error:
            run.end("KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED")
            raise
        run.log(params=trial.params, metrics={"stall_ms": stall_ms, "accuracy": accuracy})
        run.end("FINISHED")
        return stall_ms, accuracy

    return run_trial


class Surplus(Exception):
    """Another worker began what was the last missing trial."""


def no_surplus(objective: Objective, study: optuna.Study, trials: int) -> Objective:
    """The objective, refused (Surplus, which fails the trial) to a trial with enough others before it. Workers that
    look at the same time all see one trial missing; the numbers of the trials they then get decide."""

    def run_trial(trial: optuna.Trial) -> tuple[float, float]:
        if sum(other.number < trial.number for other in _counted(study)) >= trials:
            raise Surplus(f"{trials} trials have begun before this one")
        return objective(trial)

    return run_trial


def begun(study: optuna.Study) -> int:
    """Trials that came to an end or are running."""
    return len(_counted(study))


def _counted(study: optuna.Study) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state in (*ENDS, TrialState.RUNNING)]


def finished(study: optuna.Study) -> int:
    """Trials that came to an end, pruned ones included."""
    return sum(trial.state in ENDS for trial in study.get_trials(deepcopy=False))

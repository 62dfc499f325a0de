"""What a report is about: routing logs, a predictor's artifact, an MLflow run, a tuning study."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from vismmoe.artifact import Artifact, load_artifact
from vismmoe.config import ReportConfig
from vismmoe.errors import UsageError
from vismmoe.trace import TraceSet, read_traces
from vismmoe.tracking import talking_to, tracking_uri
from vismmoe_training.registry import ARTIFACT_PATH
from vismmoe_training.tune_front import front, recommended


@dataclass(frozen=True)
class Sources:
    """All that was named and could be read."""

    traces: TraceSet | None
    artifact: Artifact | None
    artifact_name: str
    run: dict[str, str]  # parameters of the MLflow run


@dataclass(frozen=True)
class Study:
    """Trials of a tuning study that came to an end, as (stall in ms, accuracy)."""

    name: str
    points: tuple[tuple[float, float], ...]
    front: tuple[tuple[float, float], ...]  # least stall first
    recommended: tuple[float, float] | None


def read_sources(config: ReportConfig) -> Sources:
    """Raises CorpusError, ArtifactError, UsageError for what is named and cannot be read."""
    artifact, name = None, ""
    told: dict[str, str] = {}
    if config.run is not None:
        artifact, told = _of_run(config.run, tracking_uri(config.tracking_uri))
        name = f"MLflow run {config.run}"
    if config.artifact is not None:
        artifact, name = load_artifact(Path(config.artifact)), config.artifact
    traces = read_traces(config.traces) if config.traces else None
    if traces is not None and artifact is not None and traces.header.spec != artifact.spec:
        raise UsageError(
            f"{name} was trained for another model ({artifact.spec.family}, {artifact.spec.fingerprint[:12]}) than "
            f"{config.traces[0]} was collected from (fingerprint {traces.header.spec.fingerprint[:12]})."
        )
    return Sources(traces, artifact, name, told)


def read_study(storage: str, name: str) -> Study:
    """UsageError when there is no such study, or when it has other objectives than stall and accuracy."""
    try:
        study = optuna.load_study(study_name=name, storage=storage)
    except Exception as error:  # Optuna hands on whatever its database layer raises
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"The study {name!r} in {storage!r} cannot be read: {reason}") from None
    if len(study.directions) != 2:
        raise UsageError(
            f"The study {name!r} has {len(study.directions)} objective(s); stall and accuracy were expected."
        )
    done = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    best = front(study)
    return Study(name, _values(done), _values(best), _values([recommended(best)])[0] if best else None)


def _values(trials: Sequence[FrozenTrial]) -> tuple[tuple[float, float], ...]:
    return tuple((float(trial.values[0]), float(trial.values[1])) for trial in trials)


def _of_run(run: str, uri: str) -> tuple[Artifact | None, dict[str, str]]:
    """The artifact that a training run logged, and its parameters."""
    with talking_to(uri) as client:
        found: Any = client.get_run(run)
        if not client.list_artifacts(run, ARTIFACT_PATH):
            return None, dict(found.data.params)
        work = Path(tempfile.mkdtemp(prefix="vismmoe-report-"))
        try:
            folder = client.download_artifacts(run, ARTIFACT_PATH, str(work))
            return load_artifact(Path(folder)), dict(found.data.params)
        finally:
            shutil.rmtree(work, ignore_errors=True)

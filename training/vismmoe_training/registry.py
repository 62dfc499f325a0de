"""MLflow runs and registered models, without its model flavours: an artifact folder is data, not code.

A version's source is the run's own copy of the artifact folder; `vismmoe_deploy` finds it, verifies it and loads it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vismmoe.artifact import Artifact, load_artifact
from vismmoe.errors import UsageError
from vismmoe.tracking import artifact_root, talking_to, tracking_uri

MAX_NAME = 255
ARTIFACT_PATH = "predictor"  # folder of the artifact within a run's artifacts


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model."""

    name: str
    version: str
    alias: str | None
    tracking_uri: str

    @property
    def uri(self) -> str:
        return f"models:/{self.name}@{self.alias}" if self.alias else f"models:/{self.name}/{self.version}"

    def __str__(self) -> str:
        flags = ["--predictor", self.uri]
        if not self._found_unasked():
            flags += ["--tracking-uri", self.tracking_uri]
        return f"registered {self.name} version {self.version} in {self.tracking_uri}: {shlex.join(flags)}"

    def _found_unasked(self) -> bool:
        """Whether a command finds it without being told which MLflow to ask."""
        try:
            return self.tracking_uri == tracking_uri()
        except UsageError:
            return False


def register(
    artifact: str | Path, name: str, alias: str | None = None, tracking_uri: str | None = None
) -> ModelVersion:
    """Verify an artifact folder and put it into the registry as a new version, in a run of its own.

    Raises ArtifactError when the folder is no sound artifact, UsageError when the registry refuses.
    """
    loaded = load_artifact(Path(artifact))
    check_name(name)
    with TrackedRun.start("vismmoe", tracking_uri, {"vismmoe.command": "register"}) as run:
        return run.register(Path(artifact), loaded, name, alias)


class TrackedRun:
    """One MLflow run, which never stays RUNNING: leaving the context ends it as FINISHED, FAILED or KILLED."""

    def __init__(self, uri: str, run_id: str) -> None:
        self.uri, self.run_id = uri, run_id

    @classmethod
    def start(cls, experiment: str, uri: str | None, tags: Mapping[str, str] | None = None) -> TrackedRun:
        """A new run; the experiment is made when there is none of that name. Raises UsageError."""
        place = tracking_uri(uri)
        with talking_to(place) as client:
            known = client.get_experiment_by_name(experiment)
            found = known.experiment_id if known is not None else None
            if found is None:
                found = client.create_experiment(experiment, artifact_location=artifact_root(place))
            return cls(place, client.create_run(found, tags=dict(tags or {})).info.run_id)

    @classmethod
    def resume(cls, uri: str, run_id: str) -> TrackedRun:
        """Go on in a run that was interrupted. Raises UsageError when the run is gone."""
        with talking_to(uri) as client:
            client.get_run(run_id)
            client.update_run(run_id, status="RUNNING")
        return cls(uri, run_id)

    def end(self, status: str) -> None:
        """status: FINISHED, FAILED or KILLED."""
        with talking_to(self.uri) as client:
            client.set_terminated(self.run_id, status)

    def is_running(self) -> bool:
        with talking_to(self.uri) as client:
            return bool(client.get_run(self.run_id).info.status == "RUNNING")

    def log(self, params: Mapping[str, Any] | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """Parameters and final metrics of the run, in one message."""
        with talking_to(self.uri) as client:
            from mlflow.entities import Metric, Param

            told = [Param(key, str(value)) for key, value in (params or {}).items()]
            measured = [Metric(key, value, 0, 0) for key, value in (metrics or {}).items()]
            client.log_batch(self.run_id, params=told, metrics=measured)

    def log_artifact(self, folder: Path) -> None:
        """Copy an artifact folder into the run."""
        with talking_to(self.uri) as client:
            client.log_artifacts(self.run_id, str(folder), ARTIFACT_PATH)

    def register(self, folder: Path, artifact: Artifact, name: str, alias: str | None) -> ModelVersion:
        """Copy the folder into the run, make it a version of `name` and point `alias` to it."""
        self.log_artifact(folder)
        with talking_to(self.uri) as client:
            ensure_model(client, name)
            root = client.get_run(self.run_id).info.artifact_uri
            tags = {"vismmoe.kind": artifact.kind, "vismmoe.model_fingerprint": artifact.spec.fingerprint}
            made = client.create_model_version(name, f"{root}/{ARTIFACT_PATH}", self.run_id, tags=tags)
            if alias:
                client.set_registered_model_alias(name, alias, made.version)
        return ModelVersion(name, str(made.version), alias, self.uri)

    def __enter__(self) -> TrackedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        by_hand = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self.end("FINISHED" if kind is None else "KILLED" if by_hand else "FAILED")


def check_name(name: str) -> None:
    """UsageError for a name that MLflow may take and models:/name@alias cannot say."""
    if not name.isprintable() or set(name) & set("/:@") or name != name.strip() or len(name) > MAX_NAME:
        raise UsageError(f"{name!r:.200} can be no name of a model: letters, digits, - and _ can.")


def ensure_model(client: Any, name: str) -> None:
    """Make the registered model unless it is there."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        client.create_registered_model(name)

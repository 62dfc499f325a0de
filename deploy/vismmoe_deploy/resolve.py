"""Finds the artifact that a name stands for: a folder, models:/name/3 or models:/name@alias."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from vismmoe.artifact import Artifact, load_artifact
from vismmoe.errors import ArtifactError, UsageError
from vismmoe.tracking import talking_to
from vismmoe.tracking import tracking_uri as default_uri
from vismmoe.types import ModelSpec

_MODEL_URI = re.compile(r"models:/(?P<name>[^/@:\n]+)(?:/(?P<version>\d+)|@(?P<alias>[^/@:]+))")


@dataclass(frozen=True)
class ResolvedArtifact:
    """A verified artifact, and where it came from."""

    source: str  # as asked for
    version: str | None  # of the registered model
    artifact: Artifact
    folder: Path | None  # None when it was fetched from a server and no copy is kept


def resolve(source: str, tracking_uri: str | None = None, spec: ModelSpec | None = None) -> ResolvedArtifact:
    """Find, verify and read an artifact: its form, its checksums and, with `spec`, the model that it was made for.

    Raises ArtifactError for what is found but cannot be used, UsageError for a name or registry that makes no sense.
    """
    if not source.startswith("models:"):
        return ResolvedArtifact(source, None, load_artifact(Path(source), spec), Path(source))
    asked = _MODEL_URI.fullmatch(source)
    if asked is None:
        raise UsageError(f"{source!r} names no predictor: write models:/name@alias or models:/name/3.")
    with talking_to(default_uri(tracking_uri)) as client:
        version = _version(client, source, asked)
        place = _local_folder(version.source)
        if place is not None:
            return ResolvedArtifact(source, str(version.version), load_artifact(place, spec), place)
        return ResolvedArtifact(source, str(version.version), _fetched(client, version, spec), None)


def _version(client: Any, source: str, asked: re.Match[str]) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        if asked["alias"] is not None:
            return client.get_model_version_by_alias(asked["name"], asked["alias"])
        return client.get_model_version(asked["name"], asked["version"])
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ArtifactError(
            f"There is no {source} in the registry {client.tracking_uri}: `vismmoe register` or `vismmoe train "
            "--register` puts it there; --tracking-uri names another registry."
        ) from None


def _local_folder(source: str) -> Path | None:
    """The folder behind a file: address or a plain path; None when it lies on a server."""
    parts = urlparse(source)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme and "://" in source else Path(source)


def _fetched(client: Any, version: Any, spec: ModelSpec | None) -> Artifact:
    """Download to a temporary folder, verify and read there, keep nothing."""
    from mlflow.artifacts import download_artifacts

    work = Path(tempfile.mkdtemp(prefix="vismmoe-artifact-"))
    try:
        source, uri = version.source, client.tracking_uri
        try:
            folder = download_artifacts(artifact_uri=source, dst_path=str(work), tracking_uri=uri)
        except Exception as error:  # of the client of whichever store it is
            told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ArtifactError(f"The files of {source!r:.200} could not be fetched ({told}).") from None
        return load_artifact(Path(folder), spec)
    finally:
        shutil.rmtree(work, ignore_errors=True)

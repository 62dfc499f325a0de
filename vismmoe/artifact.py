"""A predictor artifact: one folder that says what it is, for which model, how well it did, and is checked when read.

`manifest.json` describes everything and lists the other files with their SHA-256; tensors are safetensors. No pickle,
no code, no links, no sub-folders. Writer and reader side by side; reading trusts nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from vismmoe.errors import ArtifactError
from vismmoe.types import ModelSpec
from vismmoe.untrusted import read_json, spec_from_json

SCHEMA = "vismmoe-predictor"
VERSION = 1
MANIFEST, WEIGHTS, CARD = "manifest.json", "weights.safetensors", "README.md"
MAX_MANIFEST_BYTES = 4 * 1024**2
MAX_FILE_BYTES = 4 * 1024**3
_SUFFIXES = (".json", ".safetensors", ".md")
_KEYS = {"schema", "version", "kind", "window", "config", "spec", "metrics", "training", "files"}


@dataclass(frozen=True)
class Artifact:
    """A predictor as plain values and tensors; `vismmoe.predictors.build_predictor` makes it run."""

    kind: str
    window: int
    config: Mapping[str, Any]  # what the kind needs to build itself, plain JSON values
    spec: ModelSpec  # the model it was trained for
    tensors: Mapping[str, Tensor]
    metrics: Mapping[str, Any] = field(default_factory=dict)  # held-out recall tables
    training: Mapping[str, Any] = field(default_factory=dict)  # logs, settings and seed it came from


def save_artifact(folder: Path, artifact: Artifact, card: str) -> None:
    """Write the whole folder or nothing; an artifact that stands there already is replaced.

    Raises ArtifactError when `folder` exists and is anything but an artifact or an empty folder.
    """
    check_replaceable(folder)
    files = {WEIGHTS: save(_plain(artifact.tensors)), CARD: card.encode()}
    manifest = {
        "schema": SCHEMA,
        "version": VERSION,
        **{key: value for key, value in _fields(artifact).items() if key != "tensors"},
        "spec": asdict(artifact.spec),
        "files": {name: {"sha256": _digest(data), "bytes": len(data)} for name, data in files.items()},
    }
    files[MANIFEST] = (json.dumps(manifest, indent=1, allow_nan=False) + "\n").encode()
    _replace(folder, files)


def load_artifact(folder: Path, spec: ModelSpec | None = None) -> Artifact:
    """Read and verify an artifact: form, checksums, tensors, and that it was made for `spec` when one is given.

    Raises ArtifactError with a sentence for whatever is missing, surplus, damaged or made for another model.
    """
    _check_folder(folder)
    manifest = _read_manifest(folder)
    data = {name: _read_file(folder, name, told) for name, told in manifest["files"].items()}
    surplus = sorted({path.name for path in folder.iterdir()} - {MANIFEST, *data})
    if surplus:
        raise _refused(folder, f"it holds {', '.join(map(repr, surplus))}, which its manifest does not name")
    made_for = _spec_of(folder, manifest["spec"])
    if spec is not None:
        check_model(folder, made_for, spec)
    try:
        tensors = load(data[WEIGHTS])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _refused(folder, f"{WEIGHTS} is not valid safetensors ({error})") from None
    rest = {key: manifest[key] for key in ("kind", "window", "config", "metrics", "training")}
    return Artifact(spec=made_for, tensors=tensors, **rest)


def check_model(folder: Path, made_for: ModelSpec, spec: ModelSpec) -> None:
    """ArtifactError when an artifact of `made_for` is to serve another model `spec`."""
    if made_for.fingerprint != spec.fingerprint:
        raise _refused(
            folder,
            f"it was trained for another model ({made_for.family}, fingerprint {made_for.fingerprint[:12]}) "
            f"than the one that is loaded ({spec.family}, fingerprint {spec.fingerprint[:12]}); "
            "train one on this model's own logs",
        )
    if made_for != spec:
        raise _refused(folder, "its description of the model does not agree with the model's own config")


def check_replaceable(folder: Path) -> None:
    """ArtifactError when writing an artifact to `folder` would destroy something else."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ArtifactError(f"{folder} exists and is not a plain folder: name another one.")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and names != {MANIFEST, WEIGHTS, CARD}:
        raise ArtifactError(f"{folder} holds other files than an artifact's: name an empty or a new folder.")


def _fields(artifact: Artifact) -> dict[str, Any]:
    """Fields by name, without copying tensors."""
    return {name: getattr(artifact, name) for name in artifact.__dataclass_fields__}


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _replace(folder: Path, files: Mapping[str, bytes]) -> None:
    fresh, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
    for left_over in (fresh, old):
        shutil.rmtree(left_over, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        for name, data in files.items():
            with (fresh / name).open("wb") as file:
                file.write(data)
                os.fsync(file.fileno())
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    except OSError as error:
        raise ArtifactError(f"The artifact cannot be written to {folder}: {error.strerror}.") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _refused(folder: Path, reason: str) -> ArtifactError:
    return ArtifactError(f"The predictor artifact {folder} cannot be used: {reason}.")


def _check_folder(folder: Path) -> None:
    try:
        there = folder.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise ArtifactError(f"The predictor artifact {folder!s:.200} cannot be opened: {error.strerror}.") from None
    if not there:
        raise ArtifactError(f"There is no predictor artifact {folder}: name a folder that `vismmoe train` wrote.")
    for path in folder.iterdir():
        if path.is_symlink() or not stat.S_ISREG(path.lstat().st_mode):
            raise _refused(folder, f"{path.name!r} is a link, a folder or a device; an artifact holds plain files only")
        if path.suffix not in _SUFFIXES:
            raise _refused(folder, f"{path.name!r} is of no kind that an artifact holds ({', '.join(_SUFFIXES)})")


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise _refused(folder, f"its {MANIFEST} is larger than {MAX_MANIFEST_BYTES} bytes")
        manifest = read_json(path)
    except OSError as error:
        raise _refused(folder, f"its {MANIFEST} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _refused(folder, f"its {MANIFEST} is not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise _refused(folder, f"its {MANIFEST} does not say schema {SCHEMA!r}; `vismmoe train` writes such folders")
    if manifest.get("version") != VERSION:
        raise _refused(folder, f"it has version {manifest.get('version')!r}, this release reads {VERSION}: train again")
    _check_manifest(folder, manifest)
    return manifest


def _check_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    if set(manifest) != _KEYS:
        raise _refused(folder, f"its {MANIFEST} lacks or adds {', '.join(sorted(_KEYS ^ set(manifest)))}")
    for key in ("config", "spec", "metrics", "training", "files"):
        if not isinstance(manifest[key], dict):
            raise _refused(folder, f"its {MANIFEST} has a {key!r} that is no object")
    window = manifest["window"]
    if not isinstance(manifest["kind"], str) or type(window) is not int or not 1 <= window <= 64:
        raise _refused(folder, f"its kind {manifest['kind']!r} or window {window!r} makes no sense")
    if WEIGHTS not in manifest["files"] or MANIFEST in manifest["files"]:
        raise _refused(folder, f"its {MANIFEST} must list {WEIGHTS}, and not itself")


def _read_file(folder: Path, name: str, told: Any) -> bytes:
    if Path(name).name != name or not name.isprintable() or name[:1] == "." or Path(name).suffix not in _SUFFIXES:
        raise _refused(folder, f"its manifest names a file {name!r}, which is outside the folder or of a strange kind")
    if not isinstance(told, dict) or set(told) != {"sha256", "bytes"}:
        raise _refused(folder, f"its manifest gives no checksum and size for {name!r}")
    path = folder / name
    try:
        size = path.stat().st_size
        if size != told["bytes"] or size > MAX_FILE_BYTES:
            raise _refused(folder, f"{name} has {size} bytes where the manifest says {told['bytes']}")
        data = path.read_bytes()
    except OSError as error:
        raise _refused(folder, f"{name} cannot be read ({error.strerror})") from None
    if _digest(data) != told["sha256"]:
        raise _refused(folder, f"the checksum of {name} is wrong: the file was changed or damaged")
    return data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _spec_of(folder: Path, value: dict[str, Any]) -> ModelSpec:
    try:
        return spec_from_json(value)
    except ValueError as error:
        raise _refused(folder, str(error)) from None

"""Routing logs: what a model's routers did over a corpus. Writer and reader side by side.

A folder holds `header.json` (version, model, settings) and `shard-NNNNN.safetensors`. A shard holds the rows of whole
items and, in its own metadata, the list of these items: it appears with one rename, so a killed run loses the items it
had not yet written and nothing else, and going on repeats none. The form of a shard
stands in shard.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vismmoe.errors import CorpusError
from vismmoe.shard import Shard, concatenate, encode, items_of, pack, read_shard
from vismmoe.types import ModelSpec, RequestRecord, RoutingRecord
from vismmoe.untrusted import read_json, spec_from_json

SCHEMA = "vismmoe-routing-log"
VERSION = 1
MAX_WINDOW = 1024
MAX_PENDING_BYTES = 256 * 1024**2  # a shard is written at this size even if few items are in it
_HEADER = "header.json"


@dataclass(frozen=True)
class TraceHeader:
    """What all shards of a folder share. Logs with different headers are never mixed."""

    spec: ModelSpec
    keep_ratio: float
    compressor: str
    window: int  # W, distances of next gate in the log
    settings: Mapping[str, Any] = field(default_factory=dict)  # whatever else changes routing, plain JSON values

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "version": VERSION, **asdict(self), "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, value: Any, where: Path) -> TraceHeader:
        """Raises CorpusError when `value` is no header of this version."""
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise CorpusError(f"{where} is not the header of routing logs; `vismmoe collect` writes them.")
        if value.get("version") != VERSION:
            raise CorpusError(
                f"{where} has version {value.get('version')!r}, this release reads {VERSION}: collect the logs again."
            )
        try:
            spec = spec_from_json(value.get("spec"))
            rest = {key: value[key] for key in ("keep_ratio", "compressor", "window", "settings")}
        except (KeyError, ValueError) as error:
            raise CorpusError(f"{where} is incomplete ({error}): collect the logs again.") from None
        header = cls(spec=spec, **rest)
        if not header.makes_sense():
            raise CorpusError(f"{where} holds settings that make no sense: collect the logs again.")
        return header

    def makes_sense(self) -> bool:
        """Whether every value is of its kind and within its range, as a file's may not be."""
        prefix = self.settings.get("prefix_layers", 0) if isinstance(self.settings, dict) else None
        return (
            isinstance(self.keep_ratio, (int, float))
            and 0 < self.keep_ratio <= 1
            and isinstance(self.compressor, str)
            and type(self.window) is int
            and 0 <= self.window <= MAX_WINDOW
            and type(prefix) is int
            and 0 <= prefix <= len(self.spec.moe_layers)
        )


@dataclass(frozen=True)
class TraceSet:
    """The rows of one or more folders. `request` counts through all of them and indexes `requests`."""

    header: TraceHeader
    requests: tuple[RequestRecord, ...]
    request: Tensor  # (R,) int64
    step: Tensor  # (R,) int64
    decode: Tensor  # (R,) bool
    layer: Tensor  # (R,) int64 decoder layer
    counts: Tensor  # (R, E) int32
    gate_mass: Tensor  # (R, E) float32
    token: Tensor  # (R, H) float16
    own_gate: Tensor  # (R, E) float32
    next_gate: Tensor  # (R, W, E) float32
    retained_mean: Tensor  # (P, H) float16
    retained_row: Tensor  # (R,) int64 into retained_mean
    corpora: tuple[str, ...] = ()  # folder that each request was read from

    def __len__(self) -> int:
        return len(self.request)


class TraceWriter:
    """Writes a folder of routing logs, one shard per `shard_items` items; use as a context manager.

    Nothing is written, and no folder made, before the first shard is full. Raises CorpusError when the folder holds
    logs and `resume` is false, or when they come from another model or other settings.
    """

    def __init__(self, folder: Path, header: TraceHeader, resume: bool = False, shard_items: int = 64) -> None:
        self.folder = folder
        self._header, self._shard_items = header, shard_items
        self._pending: list[Shard] = []
        refuse_existing(folder, resume)
        if (folder / _HEADER).exists():
            _refuse_mixture(read_header(folder), header, str(folder), "this run")
        shards = _shards(folder)
        self.items = {str(told["item"]) for shard in shards for told in items_of(shard)}  # all that the folder has
        self._next_shard = max((int(shard.stem.split("-")[1]) + 1 for shard in shards), default=0)

    def add(self, request: RequestRecord, rows: Sequence[RoutingRecord]) -> None:
        """Take one whole item; it is on disk when its shard is full, at the latest after `close`."""
        if request.item in self.items:
            raise CorpusError(f"The item {request.item!r} is in {self.folder} already: names must be unique.")
        self._pending.append(pack(request, rows, self._header.spec, self._header.window))
        self.items.add(request.item)
        waiting = sum(tensor.nbytes for tensors, _ in self._pending for tensor in tensors.values())
        if len(self._pending) >= self._shard_items or waiting >= MAX_PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self._pending:
            return
        data = encode(concatenate(self._pending))
        try:
            self._prepare_folder()
            write_atomically(self.folder / f"shard-{self._next_shard:05d}.safetensors", data)
        except OSError as error:
            raise CorpusError(f"Routing logs cannot be written to {self.folder}: {error.strerror}.") from None
        self._next_shard += 1
        self._pending.clear()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        self.flush()  # also after an error or Ctrl-C: whole items are worth keeping

    def _prepare_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob("*.partial"):
            left_over.unlink()
        if not (self.folder / _HEADER).exists():
            data = json.dumps(self._header.to_json(), indent=1) + "\n"
            write_atomically(self.folder / _HEADER, data.encode())


def refuse_existing(folder: Path, resume: bool) -> None:
    """CorpusError when `folder` cannot take routing logs; cheap, so that a command can ask before it loads a model."""
    if folder.exists() and not folder.is_dir():
        raise CorpusError(f"{folder} is not a folder: name another one for the routing logs.")
    if _shards(folder) and not (folder / _HEADER).exists():
        raise CorpusError(f"{folder} holds shards but no {_HEADER}: use an empty folder.")
    if (folder / _HEADER).exists() and not resume:
        raise CorpusError(f"{folder} holds routing logs already: go on with --resume, or name another folder.")


def read_header(folder: Path) -> TraceHeader:
    """The header of a folder. CorpusError when there is none or it is damaged."""
    path = folder / _HEADER
    try:
        if not path.exists():
            raise CorpusError(f"{folder} holds no routing logs: there is no {_HEADER}; `vismmoe collect` writes them.")
        value = read_json(path)
    except ValueError as error:
        raise CorpusError(f"{path} is damaged: {error}.") from None
    return TraceHeader.from_json(value, path)


def read_traces(folders: Iterable[str | Path]) -> TraceSet:
    """All logs of `folders` together, in order of their shards.

    Raises CorpusError when a folder or shard is missing, damaged or empty, when one is named twice, or when the
    folders come from different models or settings.
    """
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise CorpusError("No folder of routing logs was named.")
    if len({path.resolve() for path in paths}) < len(paths):
        raise CorpusError("A folder of routing logs is named twice; its rows would count twice.")
    header = read_header(paths[0])
    for path in paths[1:]:
        _refuse_mixture(header, read_header(path), str(paths[0]), str(path))
    shards = [(path, read_shard(shard, header.spec, header.window)) for path in paths for shard in _shards(path)]
    if not shards:
        raise CorpusError(f"{paths[0]} holds no shard of routing logs: let `vismmoe collect` finish one.")
    for path in paths:
        names = [told["item"] for held, (_, requests) in shards if held == path for told in requests]
        if len(set(names)) < len(names):
            raise CorpusError(f"{path} holds an item twice: a shard was copied, or two runs wrote to it at once.")
    corpora = tuple(path.name for path, (_, requests) in shards for _ in requests)
    return _as_trace_set(concatenate([shard for _, shard in shards]), header, corpora)


def write_atomically(path: Path, data: bytes) -> None:
    """Either the whole file appears under its name or nothing does, also after a power cut."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _refuse_mixture(one: TraceHeader, other: TraceHeader, one_name: str, other_name: str) -> None:
    left, right = one.to_json(), json.loads(json.dumps(other.to_json()))
    left = json.loads(json.dumps(left))
    for part in ("spec", "settings"):
        for key in sorted({*left[part], *right[part]}):
            left[f"{part}.{key}"], right[f"{part}.{key}"] = left[part].get(key), right[part].get(key)
        del left[part], right[part]
    for key in left:
        if left[key] != right[key]:
            raise CorpusError(
                f"Routing logs do not mix: {one_name} has {key} = {left[key]!r}, {other_name} has {right[key]!r}."
            )


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-[0-9]*.safetensors"))


def _as_trace_set(joined: Shard, header: TraceHeader, corpora: tuple[str, ...]) -> TraceSet:
    tensors, told = joined
    summaries = tensors.pop("visual_summary")
    records = tuple(
        RequestRecord(request=number, visual_summary=summary, **request)
        for number, (request, summary) in enumerate(zip(told, summaries, strict=True))
    )
    tensors |= {name: tensors[name].long() for name in ("request", "step", "layer")}
    retained = _retained_rows(tensors, len(records))
    return TraceSet(header=header, requests=records, retained_row=retained, corpora=corpora, **tensors)


def _retained_rows(joined: dict[str, Tensor], requests: int) -> Tensor:
    """For each row the place of its request's and layer's row in retained_mean."""
    layers = int(joined["layer"].max()) + 1 if len(joined["layer"]) else 1
    key = joined["request"] * layers + joined["layer"]
    prefill = joined["step"] == 0
    table = torch.full((requests * layers,), -1, dtype=torch.int64)
    table[key[prefill]] = torch.arange(int(prefill.sum()))
    found = table[key]
    if (found < 0).any():
        raise CorpusError("The routing logs hold decode steps of a layer without its prefill: collect them again.")
    return found

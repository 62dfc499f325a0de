"""Routing logs: what a model's routers did over a corpus. Writer and reader side by side.

A folder holds `header.json` (version, model, settings) and `shard-NNNNN.safetensors`. A shard holds the rows of whole
items and, in its own metadata, the list of these items: it appears with one rename, so a killed run loses the items it
had not yet written and nothing else, and going on repeats none.

Tensors of a shard (R rows, P rows of step 0, Q requests, E experts, H hidden size, W logged distances):
    request (R,) int32, step (R,) int32, decode (R,) bool, layer (R,) int32, counts (R, E) int32,
    gate_mass (R, E) float32, token (R, H) float16, own_gate (R, E) float32, next_gate (R, W, E) float32,
    retained_mean (P, H) float16, visual_summary (Q, H) float16.
retained_mean is kept for step 0 only (in decode it has the last prefill's value), in the order of the rows of step 0.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vismmoe.errors import CorpusError
from vismmoe.types import ModelSpec, RequestRecord, RoutingRecord

SCHEMA = "vismmoe-routing-log"
VERSION = 1
MAX_PENDING_BYTES = 256 * 1024**2  # a shard is written at this size even if few items are in it
_HEADER = "header.json"
_HALF_MAX = 65504.0  # largest float16; norms of some checkpoints carry huge channels
_Shard = tuple[dict[str, Tensor], list[dict[str, Any]]]  # tensors, items
_REQUEST_KEYS = ("item", "prompt", "answer", "visual_tokens", "kept_visual_tokens", "completion_tokens")


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
            spec = ModelSpec(**{**value["spec"], "moe_layers": tuple(value["spec"]["moe_layers"])})
            rest = {key: value[key] for key in ("keep_ratio", "compressor", "window", "settings")}
            return cls(spec=spec, **rest)
        except (KeyError, TypeError) as error:
            raise CorpusError(f"{where} is incomplete or has surplus keys ({error}): collect the logs again.") from None


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
        self._pending: list[_Shard] = []
        refuse_existing(folder, resume)
        if (folder / _HEADER).exists():
            _refuse_mixture(read_header(folder), header, str(folder), "this run")
        shards = _shards(folder)
        self.items = {str(told["item"]) for shard in shards for told in _requests_of(shard)}  # all that the folder has
        self._next_shard = max((int(shard.stem.split("-")[1]) + 1 for shard in shards), default=0)

    def add(self, request: RequestRecord, rows: Sequence[RoutingRecord]) -> None:
        """Take one whole item; it is on disk when its shard is full, at the latest after `close`."""
        if request.item in self.items:
            raise CorpusError(f"The item {request.item!r} is in {self.folder} already: names must be unique.")
        self._pending.append(_pack(request, rows, self._header))
        self.items.add(request.item)
        waiting = sum(tensor.nbytes for tensors, _ in self._pending for tensor in tensors.values())
        if len(self._pending) >= self._shard_items or waiting >= MAX_PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard."""
        if not self._pending:
            return
        tensors, requests = _concatenate(self._pending)
        data = save(tensors, metadata={"requests": json.dumps(requests)})
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
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CorpusError(f"{folder} holds no routing logs: {_HEADER} cannot be read ({error.strerror}).") from None
    except ValueError:
        raise CorpusError(f"{path} is damaged: it is not JSON.") from None
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
    shards = [shard for path in paths for shard in _shards(path)]
    if not shards:
        raise CorpusError(f"{paths[0]} holds no shard of routing logs: let `vismmoe collect` finish one.")
    return _as_trace_set(_concatenate([_read_shard(shard, header) for shard in shards]), header)


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


def _requests_of(shard: Path) -> list[dict[str, Any]]:
    try:
        with safe_open(shard, framework="pt") as file:
            requests = json.loads((file.metadata() or {})["requests"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _damaged(shard, str(error)) from None
    if not isinstance(requests, list) or not all(isinstance(r, dict) and set(r) == {*_REQUEST_KEYS} for r in requests):
        raise _damaged(shard, "its list of items has another form")
    return requests


def _empty(header: TraceHeader) -> dict[str, Tensor]:
    """No rows, in the dtypes and shapes that a shard of this header has."""
    nobody = RequestRecord(0, "", "", "", 0, 0, 0, torch.zeros(header.spec.hidden_size))
    return _pack(nobody, [], header)[0]


def _damaged(shard: Path, reason: str) -> CorpusError:
    return CorpusError(f"{shard} is damaged ({reason}): delete it and go on with `vismmoe collect --resume`.")


def _pack(request: RequestRecord, rows: Sequence[RoutingRecord], header: TraceHeader) -> _Shard:
    """One item in the form of a shard: small numbers, so that many can wait to be written."""
    hidden, experts = header.spec.hidden_size, header.spec.num_experts
    tensors = {
        "request": torch.zeros(len(rows), dtype=torch.int32),
        "step": torch.tensor([row.step for row in rows], dtype=torch.int32),
        "decode": torch.tensor([row.phase == "decode" for row in rows], dtype=torch.bool),
        "layer": torch.tensor([row.layer for row in rows], dtype=torch.int32),
        "counts": _stack([row.counts for row in rows], (experts,), torch.int32),
        "gate_mass": _stack([row.gate_mass for row in rows], (experts,), torch.float32),
        "token": _stack([row.token for row in rows], (hidden,), torch.float16),
        "own_gate": _stack([row.own_gate for row in rows], (experts,), torch.float32),
        "next_gate": _stack([row.next_gate for row in rows], (header.window, experts), torch.float32),
        "retained_mean": _stack([row.retained_mean for row in rows if row.step == 0], (hidden,), torch.float16),
        "visual_summary": _stack([request.visual_summary], (hidden,), torch.float16),
    }
    return tensors, [{key: getattr(request, key) for key in _REQUEST_KEYS}]


def _stack(values: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not values:
        return torch.zeros(0, *shape, dtype=dtype)
    joined = torch.stack([value.detach().cpu() for value in values])
    if joined.shape[1:] != shape:
        raise ValueError(f"a routing record has shape {tuple(joined.shape[1:])}, the header promises {shape}")
    return (joined.float().clamp(-_HALF_MAX, _HALF_MAX) if dtype == torch.float16 else joined).to(dtype)


def _concatenate(parts: Sequence[_Shard]) -> _Shard:
    """Several shards, or items, as one; requests are numbered through."""
    starts = torch.tensor([0, *(len(requests) for _, requests in parts)]).cumsum(0).tolist()
    tensors = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
    numbered = [part["request"] + start for (part, _), start in zip(parts, starts, strict=False)]
    tensors["request"] = torch.cat(numbered)
    return tensors, [request for _, requests in parts for request in requests]


def _read_shard(shard: Path, header: TraceHeader) -> _Shard:
    requests = _requests_of(shard)
    try:
        with safe_open(shard, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise _damaged(shard, str(error)) from None
    _check_shard(shard, tensors, len(requests), header)
    return tensors, requests


def _check_shard(shard: Path, tensors: dict[str, Tensor], requests: int, header: TraceHeader) -> None:
    like = _empty(header)
    if set(tensors) != set(like):
        raise _damaged(shard, f"it holds {', '.join(sorted(set(tensors) ^ set(like)))} too much or too little")
    rows, prefill = len(tensors["request"]), int((tensors["step"] == 0).sum())
    for name, tensor in tensors.items():
        length = {"retained_mean": prefill, "visual_summary": requests}.get(name, rows)
        if tensor.dtype != like[name].dtype or tuple(tensor.shape) != (length, *like[name].shape[1:]):
            raise _damaged(shard, f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    known = torch.isin(tensors["layer"], torch.tensor(header.spec.moe_layers, dtype=torch.int32)).all()
    in_range = rows == 0 or (int(tensors["request"].min()) >= 0 and int(tensors["request"].max()) < requests)
    if not known or not in_range:
        raise _damaged(shard, "it names a layer or an item that does not exist")


def _as_trace_set(joined: _Shard, header: TraceHeader) -> TraceSet:
    tensors, told = joined
    summaries = tensors.pop("visual_summary")
    records = tuple(
        RequestRecord(request=number, visual_summary=summary, **request)
        for number, (request, summary) in enumerate(zip(told, summaries, strict=True))
    )
    tensors |= {name: tensors[name].long() for name in ("request", "step", "layer")}
    return TraceSet(header=header, requests=records, retained_row=_retained_rows(tensors, len(records)), **tensors)


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

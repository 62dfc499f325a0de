"""The form of one shard of routing logs, and the items as they wait to become one.

Tensors (R rows, P rows of step 0, Q requests, E experts, H hidden size, W logged distances):
    request (R,) int32, step (R,) int32, decode (R,) bool, layer (R,) int32, counts (R, E) int32,
    gate_mass (R, E) float32, token (R, H) float16, own_gate (R, E) float32, next_gate (R, W, E) float32,
    retained_mean (P, H) float16, visual_summary (Q, H) float16.
retained_mean is kept for step 0 only (in decode it has the last prefill's value), in the order of the rows of step 0.
The list of items stands in the file's own metadata, so that rows and items appear together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vismmoe.errors import CorpusError
from vismmoe.types import ModelSpec, RequestRecord, RoutingRecord
from vismmoe.untrusted import parse_json

Shard = tuple[dict[str, Tensor], list[dict[str, Any]]]  # tensors, items
_HALF_MAX = 65504.0  # largest float16; norms of some checkpoints carry huge channels
_REQUEST_KEYS = ("item", "prompt", "answer", "visual_tokens", "kept_visual_tokens", "completion_tokens")


def pack(request: RequestRecord, rows: Sequence[RoutingRecord], spec: ModelSpec, window: int) -> Shard:
    """One item in the form of a shard: small numbers, so that many can wait to be written."""
    hidden, experts = spec.hidden_size, spec.num_experts
    tensors = {
        "request": torch.zeros(len(rows), dtype=torch.int32),
        "step": torch.tensor([row.step for row in rows], dtype=torch.int32),
        "decode": torch.tensor([row.phase == "decode" for row in rows], dtype=torch.bool),
        "layer": torch.tensor([row.layer for row in rows], dtype=torch.int32),
        "counts": _stack([row.counts for row in rows], (experts,), torch.int32),
        "gate_mass": _stack([row.gate_mass for row in rows], (experts,), torch.float32),
        "token": _stack([row.token for row in rows], (hidden,), torch.float16),
        "own_gate": _stack([row.own_gate for row in rows], (experts,), torch.float32),
        "next_gate": _stack([row.next_gate for row in rows], (window, experts), torch.float32),
        "retained_mean": _stack([row.retained_mean for row in rows if row.step == 0], (hidden,), torch.float16),
        "visual_summary": _stack([request.visual_summary], (hidden,), torch.float16),
    }
    return tensors, [{key: getattr(request, key) for key in _REQUEST_KEYS}]


def encode(shard: Shard) -> bytes:
    """The bytes of a shard's file."""
    tensors, requests = shard
    return save(tensors, metadata={"requests": json.dumps(requests)})


def concatenate(parts: Sequence[Shard]) -> Shard:
    """Several shards, or items, as one; requests are numbered through."""
    starts = torch.tensor([0, *(len(requests) for _, requests in parts)]).cumsum(0).tolist()
    tensors = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
    numbered = [part["request"] + start for (part, _), start in zip(parts, starts, strict=False)]
    tensors["request"] = torch.cat(numbered)
    return tensors, [request for _, requests in parts for request in requests]


def read_shard(shard: Path, spec: ModelSpec, window: int) -> Shard:
    if shard.exists() and not shard.is_file():
        raise _damaged(shard, "it is no regular file")
    requests = items_of(shard)
    try:
        with safe_open(shard, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise _damaged(shard, str(error)) from None
    _check_shard(shard, tensors, len(requests), spec, window)
    return tensors, requests


def items_of(shard: Path) -> list[dict[str, Any]]:
    try:
        with safe_open(shard, framework="pt") as file:
            requests = parse_json((file.metadata() or {})["requests"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _damaged(shard, str(error)) from None
    if not isinstance(requests, list) or not all(map(_is_request, requests)):
        raise _damaged(shard, "its list of items has another form")
    return requests


def _is_request(told: Any) -> bool:
    return (
        isinstance(told, dict)
        and set(told) == {*_REQUEST_KEYS}
        and all(isinstance(told[key], str) for key in _REQUEST_KEYS[:3])
        and all(type(told[key]) is int and told[key] >= 0 for key in _REQUEST_KEYS[3:])
    )


def _check_shard(shard: Path, tensors: dict[str, Tensor], requests: int, spec: ModelSpec, window: int) -> None:
    like = _empty(spec, window)
    if set(tensors) != set(like):
        raise _damaged(shard, f"it holds {', '.join(sorted(set(tensors) ^ set(like)))} too much or too little")
    if any(tensor.dim() != like[name].dim() for name, tensor in tensors.items()):
        raise _damaged(shard, "a tensor has too many or too few dimensions")
    rows, prefill = len(tensors["request"]), int((tensors["step"] == 0).sum())
    for name, tensor in tensors.items():
        length = {"retained_mean": prefill, "visual_summary": requests}.get(name, rows)
        if tensor.dtype != like[name].dtype or tuple(tensor.shape) != (length, *like[name].shape[1:]):
            raise _damaged(shard, f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    known = torch.isin(tensors["layer"], torch.tensor(spec.moe_layers, dtype=torch.int32)).all()
    in_range = rows == 0 or (int(tensors["request"].min()) >= 0 and int(tensors["request"].max()) < requests)
    if not known or not in_range:
        raise _damaged(shard, "it names a layer or an item that does not exist")
    if any(not tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point()):
        raise _damaged(shard, "it holds numbers that are not finite")
    if rows and min(int(tensors["step"].min()), int(tensors["counts"].min())) < 0:
        raise _damaged(shard, "it holds a negative step or count")


def _empty(spec: ModelSpec, window: int) -> dict[str, Tensor]:
    """No rows, in the dtypes and shapes that a shard of this header has."""
    nobody = RequestRecord(0, "", "", "", 0, 0, 0, torch.zeros(spec.hidden_size))
    return pack(nobody, [], spec, window)[0]


def _stack(values: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not values:
        return torch.zeros(0, *shape, dtype=dtype)
    joined = torch.stack([value.detach().cpu() for value in values])
    if joined.shape[1:] != shape:
        raise ValueError(f"a routing record has shape {tuple(joined.shape[1:])}, the logs promise {shape}")
    return (joined.float().clamp(-_HALF_MAX, _HALF_MAX) if dtype == torch.float16 else joined).to(dtype)


def _damaged(shard: Path, reason: str) -> CorpusError:
    return CorpusError(f"{shard} is damaged ({reason}): delete it and go on with `vismmoe collect --resume`.")

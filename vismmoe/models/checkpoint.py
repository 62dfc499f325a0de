"""What a checkpoint holds and where, told from its headers alone.

Every tensor that the model needs must be there once, with the right shape, and nothing else may be: a wrong name is
refused here instead of leaving a part of the model at random values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vismmoe.errors import CheckpointError
from vismmoe.models.catalogue import Family
from vismmoe.models.headers import TensorEntry, read_headers
from vismmoe.models.skeleton import build_skeleton, experts_modules, read_config, tied_names
from vismmoe.types import ExpertId, ExpertLayout, ExpertRange, ModelSpec, PartShape

EXPERT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOLATILE_KEYS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures")


@dataclass(frozen=True)
class Checkpoint:
    """One opened checkpoint: nothing of it is loaded yet."""

    folder: Path
    family: Family
    config: Any  # transformers config
    spec: ModelSpec
    layout: ExpertLayout  # routed experts
    backbone: Mapping[str, TensorEntry]  # parameter name -> its bytes; all that is not a routed expert
    tied: Mapping[str, str]  # parameter -> the one it shares its tensor with


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Read config and headers of `folder`. CheckpointError names what is missing, surplus, mis-shaped or not run."""
    folder = Path(folder)
    config, family, raw = read_config(folder)
    model = build_skeleton(config, family)
    modules = experts_modules(model, family)
    if not modules:
        raise CheckpointError(f"{folder}: no decoder layer of this config has routed experts")
    tensors = read_headers(folder)
    tied = tied_names(model)
    packed = _packed_names(family, modules)
    backbone = _match(model, tensors, set(packed.values()), tied, folder)
    layout = _expert_layout(tensors, packed, modules, family, folder)
    spec = _spec(config, family, modules, fingerprint(raw, tensors, backbone, family))
    return Checkpoint(folder, family, config, spec, layout, backbone, tied)


def fingerprint(
    raw: Mapping[str, Any], tensors: Mapping[str, TensorEntry], backbone: Mapping[str, TensorEntry], family: Family
) -> str:
    """SHA-256 of config, tensor names with shapes and types, and the routers' weights.

    The routers are what a predictor learns, so two models of one shape differ; how the tensors are spread over files
    does not matter.
    """
    digest = hashlib.sha256(json.dumps(_stable(raw), sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].shape}{tensors[name].dtype}".encode())
    for name in sorted(backbone):
        if name.endswith(f".{family.router}.weight"):
            digest.update(backbone[name].read().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _stable(held) for key, held in value.items() if key not in VOLATILE_KEYS}
    return value


def _packed_names(family: Family, modules: Mapping[int, nn.Module]) -> dict[tuple[int, str], str]:
    return {
        (layer, part): f"{family.layers}.{layer}.{family.experts}.{part}"
        for layer in modules
        for part in family.expert_parts
    }


def _match(
    model: nn.Module, tensors: Mapping[str, TensorEntry], packed: set[str], tied: Mapping[str, str], folder: Path
) -> dict[str, TensorEntry]:
    wanted = {name: tuple(held.shape) for name, held in model.state_dict(keep_vars=True).items() if name not in tied}
    missing = sorted(name for name in wanted if name not in tensors)
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    surplus = sorted(name for name in tensors if name not in wanted and name not in tied)
    if surplus:
        more = f" and {len(surplus) - 1} more" if surplus[1:] else ""
        raise CheckpointError(f"{folder} holds {surplus[0]}{more}, which a {model.config.model_type} does not have")  # type: ignore[union-attr]
    for name, shape in wanted.items():
        if name not in packed and tensors[name].shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(tensors[name].shape)}, the config asks {list(shape)}"
            )
    return {name: tensors[name] for name in wanted if name not in packed}


def _expert_layout(
    tensors: Mapping[str, TensorEntry],
    packed: Mapping[tuple[int, str], str],
    modules: Mapping[int, nn.Module],
    family: Family,
    folder: Path,
) -> ExpertLayout:
    first = next(iter(modules))
    shapes = {part: tuple(modules[first].get_parameter(part).shape) for part in family.expert_parts}
    entries = {key: tensors[name] for key, name in packed.items()}
    dtypes = {entry.dtype for entry in entries.values()}
    if len(dtypes) > 1 or not dtypes <= set(EXPERT_DTYPES):
        named = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise CheckpointError(f"{folder}: experts are of type {named}; one of float32, bfloat16 or float16 is run")
    parts = tuple(_part(part, shapes[part], entries[first, part]) for part in family.expert_parts)
    for (_layer, part), entry in entries.items():
        wanted = (shapes[part][0], *parts[family.expert_parts.index(part)].shape)
        if entry.shape != wanted:
            raise CheckpointError(f"{folder}: {entry.name} has shape {list(entry.shape)}, others have {list(wanted)}")
    ranges = {
        ExpertId(layer, expert): tuple(_slice(entries[layer, part], expert) for part in family.expert_parts)
        for layer in modules
        for expert in range(shapes[family.expert_parts[0]][0])
    }
    size = sum(piece.length for piece in next(iter(ranges.values())))
    return ExpertLayout(dtype=next(iter(dtypes)), parts=parts, ranges=ranges, expert_bytes=size)


def _part(name: str, in_memory: tuple[int, ...], entry: TensorEntry) -> PartShape:
    """Published checkpoints hold each expert transposed; those saved in memory orientation are told by their shape."""
    straight = in_memory[1:]
    if entry.shape == (in_memory[0], *straight):
        return PartShape(name, straight, transposed=False)
    if entry.shape == (in_memory[0], *reversed(straight)):
        return PartShape(name, (straight[1], straight[0]), transposed=True)
    raise CheckpointError(
        f"{entry.file}: {entry.name} has shape {list(entry.shape)}, the config asks {list(in_memory)} or its transpose"
    )


def _slice(entry: TensorEntry, expert: int) -> ExpertRange:
    length = entry.length // entry.shape[0]
    return ExpertRange(entry.file, entry.offset + expert * length, length)


def _spec(config: Any, family: Family, modules: Mapping[int, nn.Module], digest: str) -> ModelSpec:
    text = config.get_text_config()
    return ModelSpec(
        family=family.model_type,
        num_layers=text.num_hidden_layers,
        moe_layers=tuple(modules),
        num_experts=text.num_experts,
        top_k=text.num_experts_per_tok,
        hidden_size=text.hidden_size,
        expert_width=text.moe_intermediate_size,
        fingerprint=digest,
    )

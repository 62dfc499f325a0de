"""Where each routed expert's bytes lie, for every way in which experts are published.

Told from the operations that transformers would run on load: packed (E, a, b); packed and transposed; one tensor an
expert; gate and up as one tensor each. All of them are plain byte ranges. Anything else (interleaved rows, say) would
need the bytes to be moved, which no read does: refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from vismmoe.errors import CheckpointError
from vismmoe.models.conversion import TensorSource
from vismmoe.models.headers import TensorEntry
from vismmoe.types import ExpertId, ExpertLayout, ExpertRange, PartShape

EXPERT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Place = tuple[PartShape, tuple[tuple[ExpertRange, ...], ...]]  # and for each expert its ranges


def expert_layout(
    sources: Mapping[str, TensorSource], modules: Mapping[int, tuple[str, nn.Module]], folder: Path
) -> ExpertLayout:
    """modules: decoder layer -> (path in the model, experts module). CheckpointError names what is not run."""
    _check_dtypes(sources, modules, folder)
    ranges: dict[ExpertId, tuple[ExpertRange, ...]] = {}
    first: tuple[str, tuple[PartShape, ...]] | None = None
    for layer, (path, module) in modules.items():
        places = [
            _place(sources[f"{path}.{part}"], tuple(module.get_parameter(part).shape), folder)
            for part in parts_of(module)
        ]
        parts = tuple(part for part, _ in places)
        if first is None:
            first = (path, parts)
        elif parts != first[1]:
            raise CheckpointError(
                f"{folder}: the experts of {path} have the shapes {_shapes(parts)}, those of {first[0]} "
                f"{_shapes(first[1])}; only experts of one size are run"
            )
        for expert, pieces in enumerate(zip(*(held for _, held in places), strict=True)):
            ranges[ExpertId(layer, expert)] = tuple(piece for part in pieces for piece in part)
    if first is None:
        raise CheckpointError(f"{folder}: no decoder layer of this config has routed experts")
    dtype = sources[f"{first[0]}.{first[1][0].name}"].dtype
    size = sum(piece.length for piece in next(iter(ranges.values())))
    return ExpertLayout(dtype=dtype, parts=first[1], ranges=ranges, expert_bytes=size)


def parts_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the packed parameters of an experts module, one slice an expert, in slab order."""
    return tuple(name for name, value in module._parameters.items() if value is not None)


def _check_dtypes(
    sources: Mapping[str, TensorSource], modules: Mapping[int, tuple[str, nn.Module]], folder: Path
) -> None:
    found = {
        entry.dtype
        for path, module in modules.values()
        for part in parts_of(module)
        for entry in sources[f"{path}.{part}"].recipe.entries
    }
    if len(found) > 1 or not found <= set(EXPERT_DTYPES):
        named = ", ".join(sorted(str(dtype) for dtype in found))
        raise CheckpointError(f"{folder}: experts are of type {named}; one of float32, bfloat16 or float16 is run")


def _place(source: TensorSource, wanted: tuple[int, ...], folder: Path) -> Place:
    """wanted: shape of the packed parameter (E, ...) in the model."""
    if source.shape != wanted:
        origin = source.origin
        raise CheckpointError(
            f"{folder}: {origin.name} has shape {list(origin.shape)}, from which {source.name} {list(wanted)} "
            "cannot be made"
        )
    kind = tuple(type(operation).__name__ for operation in source.recipe.operations)
    name = source.name.rpartition(".")[2]
    entries = list(source.recipe.sources.values())
    if source.recipe.converter is not None:  # gate before up, as the converter lists them
        order = source.recipe.converter.source_patterns
        entries = [source.recipe.sources[pattern] for pattern in order if pattern in source.recipe.sources]
    straight = PartShape(name, wanted[1:], transposed=False)
    if kind in ((), ("Concatenate",)) and _joins_rows(source):
        return straight, tuple(tuple(_slice(held[0], expert) for held in entries) for expert in range(wanted[0]))
    if kind == ("Transpose",):
        held = entries[0][0]
        turned = held.shape != wanted or not source.recipe.operations[0].check_dims
        part = PartShape(name, tuple(reversed(wanted[1:])), transposed=True) if turned else straight
        return part, tuple((_slice(held, expert),) for expert in range(wanted[0]))
    if kind in (("MergeModulelist",), ("MergeModulelist", "Concatenate")) and _joins_rows(source):
        return straight, tuple(tuple(_whole(held[expert]) for held in entries) for expert in range(wanted[0]))
    raise CheckpointError(
        f"{folder}: {source.origin.name} and its like become {source.name} by {', '.join(kind)}, which moves bytes "
        "within an expert and is not run; save the checkpoint in the model's own layout"
    )


def _joins_rows(source: TensorSource) -> bool:
    """Whether parts are stacked expert by expert, and gate above up: then each is one run of bytes."""
    dims = {type(operation).__name__: operation.dim for operation in source.recipe.operations}
    return bool(dims.get("MergeModulelist", 0) == 0 and dims.get("Concatenate", 1) == 1)


def _slice(entry: TensorEntry, expert: int) -> ExpertRange:
    length = entry.length // entry.shape[0]
    return ExpertRange(entry.file, entry.offset + expert * length, length)


def _whole(entry: TensorEntry) -> ExpertRange:
    return ExpertRange(entry.file, entry.offset, entry.length)


def _shapes(parts: tuple[PartShape, ...]) -> str:
    return ", ".join(f"{part.name} {list(part.shape)}" for part in parts)

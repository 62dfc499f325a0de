"""A vision tower that is read block by block while it runs, and let go again: its memory then serves the experts.

The tower of Qwen3-VL-30B-A3B takes a gigabyte and runs once a request. Streamed, it takes two blocks: the one that runs
and the next one, which a thread reads meanwhile. The bytes are the same, so the features are, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from vismmoe.models.checkpoint import Checkpoint

AHEAD = 1  # blocks that are read beside the one that runs


def tower_units(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Module path of each block -> names of its tensors: members of the lists at the top of the tower."""
    if checkpoint.family.vision is None:
        return {}
    tower = f"{checkpoint.family.vision.tower}."
    units: dict[str, list[str]] = {}
    for name in checkpoint.backbone:
        parts = name.removeprefix(tower).split(".")
        if name.startswith(tower) and len(parts) > 2 and parts[1].isdigit():
            units.setdefault(f"{tower}{parts[0]}.{parts[1]}", []).append(name)
    return units


def held_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """What a streamed tower's blocks take at most: the largest ones that are there together."""
    units = tower_units(checkpoint).values()
    sizes = sorted(sum(math.prod(checkpoint.backbone[name].shape) for name in names) for names in units)
    return sum(sizes[-1 - AHEAD :]) * dtype.itemsize


class StreamedTower:
    """Hooks that fill each block before it runs and empty it afterwards. close() ends its thread."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, read: Callable[[str], Tensor]) -> None:
        """read: a tensor by its name, ready to be put into the model."""
        self._read = read
        self._units = tower_units(checkpoint)
        self._next = _followers(self._units)
        self._reader = ThreadPoolExecutor(1, "vismmoe-tower")
        self._coming: dict[str, Future[dict[str, Tensor]]] = {}
        for unit in self._units:
            module = model.get_submodule(unit)
            module.register_forward_pre_hook(self._filler(unit))
            module.register_forward_hook(self._emptier(unit), always_call=True)

    def close(self) -> None:
        """Twice is harmless."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _filler(self, unit: str) -> Callable[[nn.Module, Any], None]:
        def fill(module: nn.Module, args: Any) -> None:
            coming = self._coming.pop(unit, None)
            tensors = self._tensors(unit) if coming is None else coming.result()
            for name, held in tensors.items():
                _put(module, name, held)
            following = self._next.get(unit)
            if following is not None and following not in self._coming:
                self._coming[following] = self._reader.submit(self._tensors, following)

        return fill

    def _emptier(self, unit: str) -> Callable[[nn.Module, Any, Any], None]:
        def empty(module: nn.Module, args: Any, output: Any) -> None:
            for name in self._units[unit]:
                local = name.removeprefix(f"{unit}.")
                _put(module, local, module.get_parameter(local).to("meta"))

        return empty

    def _tensors(self, unit: str) -> dict[str, Tensor]:
        return {name.removeprefix(f"{unit}."): self._read(name) for name in self._units[unit]}


def _followers(units: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Block -> the next one of its list."""
    found = {}
    for unit in units:
        stem, _, number = unit.rpartition(".")
        following = f"{stem}.{int(number) + 1}"
        if following in units:
            found[unit] = following
    return found


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module.get_submodule(parent)._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def streamed_names(checkpoint: Checkpoint) -> frozenset[str]:
    """Tensors that stay on disk until their block runs."""
    names: Iterable[list[str]] = tower_units(checkpoint).values()
    return frozenset(name for unit in names for name in unit)

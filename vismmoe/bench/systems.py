"""The systems that are compared, each with its own way to bring a checkpoint's experts to the arithmetic.

All run transformers' own model and, under a replay, the same choice of experts; the two baselines run transformers'
"eager" experts, which touch only what was chosen (the kindest of its implementations to them).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vismmoe.errors import UsageError
from vismmoe.models.checkpoint import Checkpoint
from vismmoe.models.headers import TensorEntry, read_headers
from vismmoe.models.load import load_model
from vismmoe.models.skeleton import build_skeleton, experts_modules

COPY_MARK = "index.json"  # Accelerate's own list of what it has copied


def mapped_model(checkpoint: Checkpoint) -> nn.Module:
    """transformers over memory-mapped weights: the page cache decides what is in memory. Experts are views."""
    model = build_skeleton(checkpoint.config, checkpoint.family)
    entries = read_headers(checkpoint.folder)
    wanted = {name: tuple(held.shape) for name, held in model.state_dict(keep_vars=True).items()}
    with _maps() as maps:
        for name, shape in wanted.items():
            if name in checkpoint.tied:
                continue
            _put(model, name, _oriented(maps(_entry(entries, name)), shape))
    for name, shared in checkpoint.tied.items():
        _put(model, name, model.get_parameter(shared))
    model.set_experts_implementation("eager")  # type: ignore[operator]
    return model


def accelerate_model(checkpoint: Checkpoint, copies: Path) -> nn.Module:
    """Accelerate's disk offload: experts and blocks of the vision tower lie in its own copy on disk."""
    dispatch = _accelerate().dispatch_model
    model = build_skeleton(checkpoint.config, checkpoint.family)
    offloaded = _offloaded(checkpoint, model)
    resident = load_model(checkpoint, device=torch.device("cpu"), dtype=checkpoint.layout.dtype)
    for name, held in model.state_dict(keep_vars=True).items():
        if not name.startswith(tuple(f"{prefix}." for prefix in offloaded)) and held.is_meta:
            _put(model, name, resident.get_parameter(name))
    del resident
    model.set_experts_implementation("eager")  # type: ignore[operator]
    places = dict.fromkeys(_others(model, offloaded), "cpu") | dict.fromkeys(offloaded, "disk")
    dispatch(model, places, main_device="cpu", offload_dir=str(copies))
    return model


def copy_for_accelerate(checkpoint: Checkpoint, copies: Path) -> None:
    """Write the copy that Accelerate's disk offload reads, once."""
    if (copies / COPY_MARK).is_file():
        return
    offload = _accelerate().utils.offload_state_dict
    model = mapped_model(checkpoint)
    prefixes = tuple(f"{prefix}." for prefix in _offloaded(checkpoint, model))
    copies.mkdir(parents=True, exist_ok=True)
    offload(
        str(copies),
        {name: held.data for name, held in model.state_dict(keep_vars=True).items() if name.startswith(prefixes)},
    )


def _accelerate() -> Any:
    try:
        import accelerate
    except ImportError:
        raise UsageError(
            "The baseline accelerate needs the package accelerate: pip install 'vismmoe[bench]', or leave it out."
        ) from None
    return accelerate


def _offloaded(checkpoint: Checkpoint, model: nn.Module) -> list[str]:
    family = checkpoint.family
    names = [f"{family.layers}.{layer}.{family.experts}" for layer in experts_modules(model, family)]
    if family.vision is not None:
        tower = model.get_submodule(family.vision.tower)
        names += [f"{family.vision.tower}.{name}" for name, part in tower.named_modules() if _is_block(name, part)]
    return names


def _is_block(name: str, part: nn.Module) -> bool:
    """One of a list of equal blocks, at the top of the tower."""
    return name.count(".") == 1 and name.rpartition(".")[2].isdigit() and any(True for _ in part.parameters())


def _others(model: nn.Module, offloaded: list[str]) -> Iterator[str]:
    """The largest modules, and loose parameters, that hold nothing of `offloaded`."""

    def walk(prefix: str, module: nn.Module) -> Iterator[str]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in offloaded:
                continue
            if any(each.startswith(f"{path}.") for each in offloaded):
                yield from walk(f"{path}.", child)
            elif any(True for _ in child.parameters()) or any(True for _ in child.buffers()):
                yield path
        yield from (f"{prefix}{name}" for name in module._parameters)

    yield from walk("", model)


def _entry(entries: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    if name not in entries:
        raise UsageError(
            f"The baselines map weights as they lie on disk, and {name} does not lie there as one tensor: compare "
            "with `resident` only, or save the checkpoint with packed experts."
        )
    return entries[name]


@contextmanager
def _maps() -> Iterator[Any]:
    """A function from entries to tensors within one map a file."""
    files: dict[Path, Tensor] = {}

    def view(entry: TensorEntry) -> Tensor:
        if entry.file not in files:
            size = entry.file.stat().st_size
            files[entry.file] = torch.from_file(str(entry.file), shared=False, size=size, dtype=torch.uint8)
        raw = files[entry.file][entry.offset : entry.offset + entry.length]
        if raw.data_ptr() % entry.dtype.itemsize:
            raw = raw.clone()
        return raw.view(entry.dtype).view(entry.shape)

    yield view


def _oriented(held: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Published experts lie transposed."""
    if tuple(held.shape) == shape:
        return held
    turned = held.transpose(-1, -2)
    if tuple(turned.shape) != shape or math.prod(shape) != held.numel():
        raise UsageError(f"A tensor of shape {list(held.shape)} cannot be mapped where {list(shape)} is asked.")
    return turned


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    else:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)

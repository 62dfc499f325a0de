"""Loads a checkpoint into its transformers model: everything but the routed experts, one tensor at a time."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vismmoe.errors import CheckpointError, UsageError
from vismmoe.models.catalogue import Family, counted_frames
from vismmoe.models.checkpoint import Checkpoint
from vismmoe.models.products import quicken_linears
from vismmoe.models.skeleton import build_skeleton, experts_modules, named_class

EXPERTS_IMPLEMENTATION = "vismmoe"
RUNNER = "_vismmoe_runner"  # attribute of each experts module: what its calls are handed to
ExpertsRunner = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def load_model(
    checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, leave: frozenset[str] = frozenset()
) -> nn.Module:
    """The model in eval mode on `device`, parameters in `dtype`; routed experts and `leave` stay on the meta device.

    Memory beyond the model's own: one tensor of the checkpoint at a time.
    """
    model = build_skeleton(checkpoint.config, checkpoint.family)
    read = tensor_reader(checkpoint, model, device=device, dtype=dtype)
    for name in checkpoint.backbone:
        if name not in leave:
            _assign(model, name, nn.Parameter(read(name), requires_grad=False))
    for name, shared in checkpoint.tied.items():
        _assign(model, name, model.get_parameter(shared))
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)
    quicken_linears(model)
    return model


def tensor_reader(
    checkpoint: Checkpoint, model: nn.Module, *, device: torch.device, dtype: torch.dtype
) -> Callable[[str], Tensor]:
    """A function that reads a tensor of the backbone by its name, on `device`, in the format that it runs in."""
    exact = _kept_exact(model, dtype)
    buffers = {name for name, _ in model.named_buffers()}

    def read(name: str) -> Tensor:
        held = checkpoint.backbone[name].read(model)
        if held.is_floating_point():
            held = held.to(dtype=torch.float32 if name in buffers or exact(name) else dtype)
        return held.to(device)

    return read


def route_experts(model: nn.Module, family: Family, runner_of: Callable[[int], ExpertsRunner]) -> None:
    """Hand the experts' call of every MoE layer l to `runner_of(l)`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, run_experts)
    for layer, module in experts_modules(model, family).items():
        object.__setattr__(module, RUNNER, runner_of(layer))  # not a submodule, not a buffer
    model.set_experts_implementation(EXPERTS_IMPLEMENTATION)  # type: ignore[operator]


def run_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The registered experts function: stateless, the module says who runs it. Shapes (T, H), (T, k), (T, k)."""
    runner: ExpertsRunner | None = getattr(module, RUNNER, None)
    if runner is None:  # experts outside the decoder (in a vision tower, say) are resident
        own: ExpertsRunner = type(module).forward.__wrapped__  # type: ignore[attr-defined]
        return own(module, hidden, top_k_index, top_k_weights)
    return runner(module, hidden, top_k_index, top_k_weights)


def router_weights(model: nn.Module, checkpoint: Checkpoint) -> dict[int, Tensor]:
    """Decoder layer -> its router's weight (E, H) in float32, on the model's device."""
    return _per_layer(model, checkpoint, checkpoint.family.router)


def moe_norm_weights(model: nn.Module, checkpoint: Checkpoint) -> dict[int, Tensor]:
    """Decoder layer -> weight (H,) in float32 of the norm whose output is the MoE input.

    CheckpointError for a family whose router does not look at a plain norm's output.
    """
    if checkpoint.family.moe_norm is None:
        raise _unseen(checkpoint)
    return _per_layer(model, checkpoint, checkpoint.family.moe_norm)


def load_processor(folder: Path, family: Family) -> Any:
    """The checkpoint's processor (images and text; a tokenizer where the family has no images).

    CheckpointError when the folder has none that works. Code of the checkpoint is never run.
    """
    from transformers import AutoProcessor, AutoTokenizer

    kind = AutoTokenizer if family.vision is None else AutoProcessor
    if family.processor_class is not None:
        kind = named_class(family.processor_class)
    try:
        return kind.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises whatever it meets on the way
        raise CheckpointError(f"the processor in {folder} cannot be loaded ({error})") from error


def limit_pixels(processor: Any, family: Family, least: int | None, most: int | None) -> None:
    """Let the processor scale pictures to `least` to `most` pixels; None leaves the checkpoint's own limit, unless it
    lies beyond the other one. UsageError for a processor that scales otherwise."""
    if least is None and most is None:
        return
    images: Any = getattr(processor, "image_processor", None)
    size = dict(getattr(images, "size", None) or {})
    by_area = {"shortest_edge", "longest_edge"} <= set(size) and hasattr(images, "merge_size")
    if family.vision is None or not by_area:
        raise UsageError(
            f"--max-pixels and --min-pixels change nothing for {family.model_type}: it has sizes of its own"
        )
    frames = counted_frames(type(images).__name__)
    low, high = (int(size[name]) for name in ("shortest_edge", "longest_edge"))
    low = min(low, high if most is None else most * frames) if least is None else least * frames
    high = max(high, low) if most is None else most * frames
    images.size = type(images.size)(shortest_edge=low, longest_edge=high)


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer within a processor, or the processor that is one."""
    return getattr(processor, "tokenizer", processor)


def _kept_exact(model: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Which tensors transformers keeps in float32 beside 16-bit ones (router biases and the like)."""
    patterns = list(model._get_dtype_plan(dtype))  # type: ignore[operator]
    matching = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns)) if patterns else None
    return lambda name: matching is not None and matching.search(name) is not None


def _per_layer(model: nn.Module, checkpoint: Checkpoint, path: str) -> dict[int, Tensor]:
    try:
        return {
            layer: model.get_parameter(f"{checkpoint.family.layers}.{layer}.{path}.weight").detach().float()
            for layer in checkpoint.spec.moe_layers
        }
    except AttributeError:
        raise _unseen(checkpoint) from None


def _unseen(checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        f"the routers of {checkpoint.family.model_type} are more than one matrix after one norm, so the next layers' "
        "routers cannot be asked ahead: collect, the next gate and predictors are not run with this family"
    )


def _assign(model: nn.Module, name: str, value: nn.Parameter) -> None:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value.data
    else:
        owner._parameters[leaf] = value

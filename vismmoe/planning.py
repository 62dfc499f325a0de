"""Where a checkpoint's parts go under a budget, decided from headers alone, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

import torch

from vismmoe.config import ModelConfig, PlanConfig, resolve_model
from vismmoe.errors import BudgetError
from vismmoe.experts.files import staging_bytes
from vismmoe.experts.places import slack_bytes
from vismmoe.experts.plan import Machine, MemoryPlan, plan_memory
from vismmoe.limits import available_memory
from vismmoe.models.catalogue import default_prefix_layers
from vismmoe.models.checkpoint import Checkpoint, open_checkpoint
from vismmoe.models.dtypes import resolve_device, resolve_dtype
from vismmoe.models.footprint import model_bytes, request_activations
from vismmoe.types import ModelBytes

IMAGE_SIZE: tuple[int, int] = (256, 256)  # width, height in pixels; as `vismmoe plan` assumes unless told otherwise
CONTEXT_TOKENS = 1024
LINEAR = "linear_attention"  # transformers' name of layers with a running state


def plan_for(config: PlanConfig) -> MemoryPlan:
    """What goes where for the asked image size and context. Raises CheckpointError, BudgetError, UsageError."""
    checkpoint = open_checkpoint(resolve_model(config.model))
    return plan_checkpoint(checkpoint, config, config.seen_size(config.image_size), config.context)


def plan_checkpoint(
    checkpoint: Checkpoint, config: ModelConfig, image_size: tuple[int, int], context_tokens: int
) -> MemoryPlan:
    """The same for an opened checkpoint. image_size: (width, height) in pixels of all images together."""
    return plan_memory(
        sizes_of(checkpoint, config, image_size, context_tokens),
        device_budget_bytes=config.device_memory,
        host_budget_bytes=config.host_memory,
        prefix_layers=prefix_layers(checkpoint, config),
        context_tokens=context_tokens,
        machine=this_machine(resolve_device(config.device)),
    )


def this_machine(device: torch.device) -> Machine:
    """Memory that is left to this process, on the device and beside it."""
    host = available_memory()
    if device.type != "cuda":
        return Machine(host, host, unified=True)
    free, _ = torch.cuda.mem_get_info(device)
    integrated = bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))
    return Machine(free, host, unified=integrated)


def sizes_of(
    checkpoint: Checkpoint, config: ModelConfig, image_size: tuple[int, int], context_tokens: int
) -> ModelBytes:
    """Bytes of the model's parts in the arithmetic's number format."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.compute_dtype, checkpoint.layout, device)
    sizes = model_bytes(
        checkpoint,
        image_size=image_size,
        compute_dtype=dtype,
        context_tokens=context_tokens,
        streamed_vision=config.vision == "streamed",
    )
    layout, on_cpu = checkpoint.layout, device.type == "cpu"
    slack = slack_bytes(layout, packed=not on_cpu)
    buffers = staging_bytes(layout, config.readers) if on_cpu else config.readers * (layout.expert_bytes + slack)
    return replace(sizes, slack_bytes=slack, staging_bytes=sizes.staging_bytes + buffers)


def prefix_layers(checkpoint: Checkpoint, config: ModelConfig) -> int:
    """MoE layers at the front that see all visual tokens; at most all of them."""
    layers = len(checkpoint.spec.moe_layers)
    if config.prefix_layers is not None:
        return min(config.prefix_layers, layers)
    return min(layers, max(default_prefix_layers(checkpoint.family, layers), least_prefix_layers(checkpoint)))


def least_prefix_layers(checkpoint: Checkpoint) -> int:
    """MoE layers that must see every token when some are dropped: up to the first layer with attention over the cache.

    transformers tells the position of a decoded token by how much that layer has cached; layers before it may keep a
    running state instead.
    """
    kinds = getattr(checkpoint.config.get_text_config(), "layer_types", None) or ["full_attention"]
    first = next((index for index, kind in enumerate(kinds) if kind.endswith("_attention") and kind != LINEAR), 0)
    before = sum(layer < first for layer in checkpoint.spec.moe_layers)
    return min(before + 1, len(checkpoint.spec.moe_layers))


def plan_request(
    plan: MemoryPlan,
    sizes: ModelBytes,
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    visual_tokens: int,
    tokens: int,
    requests: int = 1,
    chunk: int | None = None,
) -> tuple[MemoryPlan, ModelBytes] | None:
    """A plan with which a request of `tokens` tokens in all runs within the budget, and what it was made with; None
    where the present plan is enough. Slabs make room for a longer context, and the other way round.

    sizes: what the present plan was made with. Only activations and the KV cache differ between requests. For several
    requests that run together: visual_tokens of the largest, tokens of all of them. chunk: tokens that a layer takes
    at once, None for all.
    Raises BudgetError with the least budget that does.
    """
    if config.device_memory is None:
        return None
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.compute_dtype, checkpoint.layout, device)
    asked = replace(sizes, activation_bytes=request_activations(checkpoint, visual_tokens, tokens, dtype, chunk))
    growth = asked.activation_bytes - sizes.activation_bytes + sizes.kv_bytes_per_token * tokens - plan.planned["kv"]
    if growth <= 0 or plan.planned_bytes + growth <= config.device_memory:
        return None
    told = (
        f"this request has {visual_tokens} visual tokens and up to {tokens} tokens in all"
        if requests == 1
        else f"these {requests} requests have up to {tokens} tokens together"
    )
    try:
        made = plan_memory(
            asked,
            device_budget_bytes=min(config.device_memory, plan.budget_bytes),
            host_budget_bytes=plan.host["expert_copies"],
            prefix_layers=prefix_layers(checkpoint, config),
            context_tokens=tokens,
        )
    except BudgetError as error:
        raise BudgetError(f"{told}. {error}") from None
    return made, asked

"""Where a checkpoint's parts go under a budget, decided from headers alone, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL.Image import Image

from vismmoe.config import ModelConfig, PlanConfig, resolve_model
from vismmoe.errors import BudgetError
from vismmoe.experts.files import staging_bytes
from vismmoe.experts.places import slack_bytes
from vismmoe.experts.plan import Machine, MemoryPlan, plan_memory
from vismmoe.limits import available_memory
from vismmoe.models.catalogue import default_prefix_layers
from vismmoe.models.checkpoint import Checkpoint, open_checkpoint
from vismmoe.models.dtypes import resolve_device, resolve_dtype
from vismmoe.models.footprint import image_tokens, model_bytes, request_activations
from vismmoe.models.load import load_processor, tokenizer_of
from vismmoe.models.prompt import Words, prompt_text
from vismmoe.types import ModelBytes

IMAGE_SIZE: tuple[int, int] = (256, 256)  # width, height in pixels; as `vismmoe plan` assumes unless told otherwise
CONTEXT_TOKENS = 1024
LINEAR = "linear_attention"  # transformers' name of layers with a running state


@dataclass(frozen=True)
class RequestSize:
    """What memory is planned for, in tokens; of several requests that run together, of all of them."""

    visual_tokens: int  # of the largest: they go through the vision tower one by one
    prompt_tokens: int  # visual ones included
    new_tokens: int = 0
    requests: int = 1
    chunk: int | None = None  # tokens that a layer takes at once; None: all

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


def plan_for(config: PlanConfig) -> MemoryPlan:
    """What goes where for the asked image size, context and answer. Raises CheckpointError, BudgetError, UsageError."""
    checkpoint = open_checkpoint(resolve_model(config.model))
    size = assumed_size(checkpoint, config.seen_size(config.image_size), config.context, config.max_new_tokens)
    return plan_sizes(checkpoint, config, sizes_of(checkpoint, config, size), size)


def plan_for_request(config: ModelConfig, images: Sequence[Image], prompt: str, new_tokens: int) -> MemoryPlan:
    """The same for one request, by the checkpoint's own processor."""
    checkpoint = open_checkpoint(resolve_model(config.model))
    processor = load_processor(checkpoint.folder, checkpoint.family)
    asked = Words("user", (*(None for _ in images), prompt))
    size = size_of_request(checkpoint, processor, [image.size for image in images], (asked,), new_tokens)
    return plan_sizes(checkpoint, config, sizes_of(checkpoint, config, size), size)


def assumed_size(
    checkpoint: Checkpoint, image_size: tuple[int, int], context_tokens: int, new_tokens: int = 0
) -> RequestSize:
    """A request that fills its context. image_size: (width, height) in pixels of all images together; new_tokens: how
    many of the context are the answer at most."""
    visual = image_tokens(checkpoint, image_size)
    new = min(new_tokens, context_tokens)
    return RequestSize(visual, max(visual, context_tokens - new), new)


def size_of_request(
    checkpoint: Checkpoint, processor: Any, images: Sequence[tuple[int, int]], messages: Sequence[Words], new: int
) -> RequestSize:
    """Nothing is processed yet. images: (width, height) of each in pixels; new: tokens of the answer, at most."""
    visual = sum(image_tokens(checkpoint, size) for size in images)
    text = prompt_text(processor, messages)
    return RequestSize(visual, visual + len(tokenizer_of(processor)(text)["input_ids"]), new)


def plan_sizes(checkpoint: Checkpoint, config: ModelConfig, sizes: ModelBytes, size: RequestSize) -> MemoryPlan:
    """What goes where, on this machine. sizes: made for the same request."""
    return plan_memory(
        sizes,
        device_budget_bytes=config.device_memory,
        host_budget_bytes=config.host_memory,
        prefix_layers=prefix_layers(checkpoint, config),
        context_tokens=size.tokens,
        requests=size.requests,
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


def sizes_of(checkpoint: Checkpoint, config: ModelConfig, size: RequestSize) -> ModelBytes:
    """Bytes of the model's parts in the arithmetic's number format."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.compute_dtype, checkpoint.layout, device)
    sizes = model_bytes(
        checkpoint,
        visual_tokens=size.visual_tokens,
        prompt_tokens=size.prompt_tokens,
        new_tokens=size.new_tokens,
        compute_dtype=dtype,
        streamed_vision=config.vision == "streamed",
        device=device,
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
    plan: MemoryPlan, sizes: ModelBytes, checkpoint: Checkpoint, config: ModelConfig, size: RequestSize
) -> tuple[MemoryPlan, ModelBytes] | None:
    """A plan with which a request of this size runs within the budget, and what it was made with; None where the
    present plan is enough. Slabs make room for a longer context, and the other way round.

    sizes: what the present plan was made with. Only activations and the KV cache differ between requests.
    Raises BudgetError with the least budget that does.
    """
    if config.device_memory is None:
        return None
    dtype = resolve_dtype(config.compute_dtype, checkpoint.layout, resolve_device(config.device))
    needed = request_activations(checkpoint, size.visual_tokens, size.prompt_tokens, size.new_tokens, dtype, size.chunk)
    asked = replace(sizes, activation_bytes=needed)
    growth = needed + asked.kv_bytes(size.tokens, size.requests) - sizes.activation_bytes - plan.planned["kv"]
    if growth <= 0 or plan.planned_bytes + growth <= config.device_memory:
        return None
    told = (
        f"this request has {size.visual_tokens} visual tokens and up to {size.tokens} tokens in all"
        if size.requests == 1
        else f"these {size.requests} requests have up to {size.tokens} tokens together"
    )
    try:
        made = plan_memory(
            asked,
            device_budget_bytes=min(config.device_memory, plan.budget_bytes),
            host_budget_bytes=plan.host["expert_copies"],
            prefix_layers=prefix_layers(checkpoint, config),
            context_tokens=size.tokens,
            requests=size.requests,
        )
    except BudgetError as error:
        raise BudgetError(f"{told}. {error}") from None
    return made, asked

"""How many bytes a checkpoint needs for what: arithmetic on shapes, nothing is allocated.

Activations are an upper estimate of what is alive at once, written down term by term so that it can be checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vismmoe.models.checkpoint import Checkpoint
from vismmoe.models.headers import TensorEntry
from vismmoe.models.saliency import BLOCK_BYTES
from vismmoe.types import ModelBytes

PAGE_BYTES = 4096


@dataclass(frozen=True)
class ImageLimits:
    """How the processor resizes: patch and merge sizes in pixels and patches, area limits in pixels."""

    patch: int
    merge: int
    least_pixels: int
    most_pixels: int


def image_limits(checkpoint: Checkpoint) -> ImageLimits:
    """From the processor's JSON, without loading the processor; Qwen's own defaults where it is silent."""
    vision = checkpoint.config.vision_config
    size: dict[str, Any] = {}
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        file = checkpoint.folder / name
        try:
            found = json.loads(file.read_text()) if file.is_file() else {}
        except (OSError, ValueError):
            continue  # loading the processor will say what is wrong
        found = found.get(key) if key is not None else found
        size = (found or {}).get("size") or size
    return ImageLimits(
        patch=int(vision.patch_size),
        merge=int(vision.spatial_merge_size),
        least_pixels=int(size.get("shortest_edge", 56 * 56)),
        most_pixels=int(size.get("longest_edge", 28 * 28 * 1280)),
    )


def visual_tokens(limits: ImageLimits, size: tuple[int, int]) -> int:
    """Visual tokens of an image of `size` (width, height) in pixels, as Qwen's smart_resize makes them."""
    factor = limits.patch * limits.merge
    width, height = (max(factor, round(side / factor) * factor) for side in size)
    if width * height > limits.most_pixels:
        shrink = math.sqrt(size[0] * size[1] / limits.most_pixels)
        width, height = (max(factor, math.floor(side / shrink / factor) * factor) for side in size)
    elif width * height < limits.least_pixels:
        grow = math.sqrt(limits.least_pixels / (size[0] * size[1]))
        width, height = (math.ceil(side * grow / factor) * factor for side in size)
    return (width // factor) * (height // factor)


def model_bytes(
    checkpoint: Checkpoint,
    *,
    image_size: tuple[int, int],
    compute_dtype: torch.dtype,
    context_tokens: int,
    readers: int = 1,
) -> ModelBytes:
    """What `plan_memory` reckons with, for a request of `context_tokens` with an image of `image_size` pixels."""
    text = checkpoint.config.get_text_config()
    vision_prefix = f"{checkpoint.family.vision}."
    vision = [entry for name, entry in checkpoint.backbone.items() if name.startswith(vision_prefix)]
    rest = [entry for name, entry in checkpoint.backbone.items() if not name.startswith(vision_prefix)]
    tokens = visual_tokens(image_limits(checkpoint), image_size)
    return ModelBytes(
        backbone=_total(rest, compute_dtype),
        vision=_total(vision, compute_dtype),
        shared_experts=0,
        expert_bytes=checkpoint.layout.expert_bytes,
        experts_per_layer=checkpoint.spec.num_experts,
        moe_layers=len(checkpoint.spec.moe_layers),
        kv_bytes_per_token=2
        * text.num_key_value_heads
        * text.head_dim
        * text.num_hidden_layers
        * compute_dtype.itemsize,
        activation_bytes=request_activations(checkpoint, tokens, max(tokens, context_tokens), compute_dtype),
        staging_bytes=readers * (checkpoint.layout.expert_bytes + 2 * PAGE_BYTES)
        + _upcast_bytes(checkpoint, compute_dtype),
        top_k=checkpoint.spec.top_k,
    )


def request_activations(checkpoint: Checkpoint, visual_tokens: int, tokens: int, dtype: torch.dtype) -> int:
    """Bytes alive at the largest moment of a request of `tokens` tokens, visual ones included."""
    return max(vision_activations(checkpoint, visual_tokens, dtype), text_activations(checkpoint, tokens, dtype))


def vision_activations(checkpoint: Checkpoint, tokens: int, dtype: torch.dtype) -> int:
    """Bytes alive in the vision tower for `tokens` visual tokens: pixels, one block, the DeepStack features."""
    vision = checkpoint.config.vision_config
    patches = tokens * vision.spatial_merge_size**2
    pixels = patches * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    stream = 2 * vision.hidden_size
    block = max(7 * vision.hidden_size, 2 * vision.intermediate_size)  # q, k, v, their rotations; or the MLP
    features = tokens * vision.out_hidden_size * (1 + len(vision.deepstack_visual_indexes))
    scores = 3 * min(BLOCK_BYTES, vision.num_heads * patches**2 * 4)  # while saliency is measured
    needed: int = pixels * (4 + dtype.itemsize) + (patches * (stream + block) + features) * dtype.itemsize + scores
    return needed


def text_activations(checkpoint: Checkpoint, tokens: int, dtype: torch.dtype) -> int:
    """Bytes alive in the decoder while `tokens` go through one layer, with the visual features kept for DeepStack."""
    text = checkpoint.config.get_text_config()
    heads = (text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim
    stream = 4 * text.hidden_size  # embeddings, residual, normed input, output
    experts = (text.num_experts_per_tok + 1) * text.hidden_size + 3 * text.moe_intermediate_size
    features = text.hidden_size * (1 + len(checkpoint.config.vision_config.deepstack_visual_indexes))
    router = 3 * text.num_experts * 4
    needed: int = tokens * ((stream + features + max(2 * heads, experts)) * dtype.itemsize + router)
    needed += text.vocab_size * 8  # logits of one token, twice
    return needed


def _upcast_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """One expert in the arithmetic's format beside its slab, when the two differ."""
    held = checkpoint.layout.dtype
    return 0 if held == dtype else checkpoint.layout.expert_bytes // held.itemsize * dtype.itemsize


def _total(entries: Iterable[TensorEntry], dtype: torch.dtype) -> int:
    return sum(math.prod(entry.shape) * dtype.itemsize for entry in entries)

"""How many bytes a checkpoint needs for what: arithmetic on shapes, nothing is allocated.

Activations are an upper estimate of what is alive at once, written down term by term so that it can be checked.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from vismmoe.errors import CheckpointError
from vismmoe.models.cache_bytes import cache_bytes, heads_of, known
from vismmoe.models.catalogue import counted_frames
from vismmoe.models.checkpoint import Checkpoint
from vismmoe.models.products import round_up_rows
from vismmoe.models.saliency import BLOCK_BYTES
from vismmoe.models.skeleton import named_class
from vismmoe.models.tower import held_bytes, streamed_names
from vismmoe.types import ModelBytes
from vismmoe.untrusted import read_json

AREA = 16_384  # "longest_edge" of a processor is a side in pixels below this and an area above
MAX_EDGE = 1 << 40
OBJECTS_BYTES = 2048  # of an expert or a tensor: modules, names, ranges, views
KERNEL_BYTES = 9 << 18  # of one number of rows through both of an expert's products; measured with AMX


@dataclass(frozen=True)
class ImageLimits:
    """How the processor resizes: patch and merge sizes in pixels and patches, area limits in pixels."""

    patch: int
    merge: int
    least_pixels: int
    most_pixels: int


def image_limits(checkpoint: Checkpoint) -> ImageLimits:
    """From the processor's JSON, without loading the processor; Qwen's own defaults where it is silent."""
    vision = vision_config(checkpoint)
    size: dict[str, Any] = {}
    kind = ""
    for name, key in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        file = checkpoint.folder / name
        try:
            found = read_json(file) if file.is_file() else {}
        except ValueError:
            continue  # loading the processor will say what is wrong
        found = found.get(key) if key is not None and isinstance(found, dict) else found
        found = found if isinstance(found, dict) else {}
        size = found.get("size") or size
        kind = str(found.get("image_processor_type") or kind)
    edges = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280} | (size if isinstance(size, dict) else {})
    least, most = (edges[name] for name in ("shortest_edge", "longest_edge"))
    if not all(isinstance(edge, (int, float)) and 0 < edge < MAX_EDGE for edge in (least, most)):
        raise CheckpointError(f"{checkpoint.folder}: its processor limits pictures to {least!r} to {most!r} pixels")
    if most < AREA:  # given as a side
        most = most**2
    frames = counted_frames(kind)
    return ImageLimits(
        patch=_side(vision, "patch_size", 14),
        merge=_merge(vision),
        least_pixels=int(least) // frames,
        most_pixels=int(most) // frames,
    )


def vision_config(checkpoint: Checkpoint) -> Any | None:
    """Config of the vision tower; None for a family without images."""
    return None if checkpoint.family.vision is None else getattr(checkpoint.config, "vision_config", None)


def image_tokens(checkpoint: Checkpoint, size: tuple[int, int]) -> int:
    """Visual tokens to plan for, for an image of `size` (width, height) in pixels; 0 without images.

    A model class of this project may know better (`count_visual_tokens`); others are reckoned by Qwen's resizing,
    which towers of one fixed size stay below.
    """
    if checkpoint.family.vision is None:
        return 0
    own = getattr(named_class(checkpoint.family.model_class), "count_visual_tokens", None)
    return int(own(checkpoint.config, size)) if own is not None else visual_tokens(image_limits(checkpoint), size)


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
    visual_tokens: int,
    prompt_tokens: int,
    new_tokens: int = 0,
    compute_dtype: torch.dtype,
    streamed_vision: bool = False,
    device: torch.device,
) -> ModelBytes:
    """What `plan_memory` reckons with. prompt_tokens: visual ones included; new_tokens: of the answer.
    How experts are read is the caller's to add: read buffers and slack."""
    tower = f"{checkpoint.family.vision.tower}." if checkpoint.family.vision else None
    shared = re.compile(rf"^{re.escape(checkpoint.family.layers)}\.\d+\..*shared_(expert|mlp)")
    sizes = {"vision": 0, "shared_experts": 0, "backbone": 0}
    for name, source in checkpoint.backbone.items():
        part = "vision" if tower and name.startswith(tower) else "shared_experts" if shared.match(name) else "backbone"
        sizes[part] += math.prod(source.shape) * compute_dtype.itemsize
    if streamed_vision:
        streamed = sum(math.prod(checkpoint.backbone[name].shape) for name in streamed_names(checkpoint))
        sizes["vision"] += held_bytes(checkpoint, compute_dtype) - streamed * compute_dtype.itemsize
    cache = cache_bytes(checkpoint.config, compute_dtype.itemsize)
    return ModelBytes(
        **sizes,
        expert_bytes=checkpoint.layout.expert_bytes,
        experts_per_layer=checkpoint.spec.num_experts,
        moe_layers=len(checkpoint.spec.moe_layers),
        kv_bytes_per_token=cache.per_token,
        kv_window_bytes_per_token=cache.per_window_token,
        kv_window_tokens=cache.window_tokens,
        kv_constant_bytes=cache.constant,
        activation_bytes=request_activations(checkpoint, visual_tokens, prompt_tokens, new_tokens, compute_dtype),
        runtime_bytes=_runtime_bytes(checkpoint, prompt_tokens, device, compute_dtype),
        staging_bytes=_upcast_bytes(checkpoint, compute_dtype),
        top_k=checkpoint.spec.top_k,
    )


def request_activations(
    checkpoint: Checkpoint,
    visual_tokens: int,
    prompt_tokens: int,
    new_tokens: int,
    dtype: torch.dtype,
    chunk: int | None = None,
) -> int:
    """Bytes alive beside the whole request's cache at the largest moment: in the vision tower, when nothing is cached
    yet, at the prompt, or at the last token. prompt_tokens: visual ones included; chunk: how many of them a layer takes
    at once, None for all."""
    cache = cache_bytes(checkpoint.config, dtype.itemsize)
    whole = cache.of(prompt_tokens + new_tokens)
    needed = max(
        vision_activations(checkpoint, visual_tokens, dtype),
        cache.of(prompt_tokens) + text_activations(checkpoint, visual_tokens, prompt_tokens, dtype, chunk),
    )
    return max(needed - whole, text_activations(checkpoint, visual_tokens, 1, dtype))


def vision_activations(checkpoint: Checkpoint, tokens: int, dtype: torch.dtype) -> int:
    """Bytes alive in the vision tower for `tokens` visual tokens: pixels, and position embeddings or one block."""
    vision = vision_config(checkpoint)
    if vision is None or not tokens:
        return 0
    size = dtype.itemsize
    width = int(known(vision, "hidden_size", "embed_dim", "width") or 1024)
    patches = _patches(vision, tokens)
    # q, k, v, their rotations; or the MLP
    block = max(7 * width, 2 * int(known(vision, "intermediate_size") or 4 * width))
    heads = int(known(vision, "num_heads", "num_attention_heads") or 16)
    scores = 3 * min(BLOCK_BYTES, heads * patches**2 * 4)  # while saliency is measured
    positions = 0
    if known(vision, "num_position_embeddings"):  # interpolated between four neighbours each, in float32
        positions = patches * width * (size + 4 * (size + (4 if size == 4 else 8)))
    in_block = (patches * (2 * width + block) + tokens * _feature_width(checkpoint, vision)) * size + scores
    needed: int = _pixel_bytes(vision, patches) + _pixels(vision, patches) * size + max(positions, in_block)
    return needed


def text_activations(
    checkpoint: Checkpoint, visual_tokens: int, tokens: int, dtype: torch.dtype, chunk: int | None = None
) -> int:
    """Bytes alive in the decoder while `tokens` go through one layer, beside the pixels that transformers keeps until
    the answer is complete and the visual features that are kept for DeepStack; in pieces of `chunk`, each with a mask
    over all tokens."""
    text, spec, vision = checkpoint.config.get_text_config(), checkpoint.spec, vision_config(checkpoint)
    hidden = spec.hidden_size
    stream = 6 * hidden  # embeddings, residual, normed input, output, and what hooks and the router look at
    widest = max(_attention_width(text), 3 * _dense_width(text), (spec.top_k + 2) * hidden + 3 * spec.expert_width)
    rows = tokens if chunk is None else min(chunk, tokens)
    needed: int = tokens * stream * dtype.itemsize + rows * (widest * dtype.itemsize + spec.num_experts * 4)
    if rows < tokens:
        needed += rows * tokens * (1 + dtype.itemsize)
    if vision is not None:
        needed += _pixel_bytes(vision, _patches(vision, visual_tokens))
        needed += visual_tokens * (2 * hidden + 2 * _feature_width(checkpoint, vision)) * dtype.itemsize
    return needed + int(text.vocab_size) * 12  # logits of one token: as they come, in float32, and their choice


def _attention_width(text: Any) -> int:
    """Numbers a token in attention: queries as they come and turned, the output; keys and values, and packed ones."""
    heads = heads_of(text)
    return 3 * heads.query * heads.key_width + 4 * heads.cached * max(heads.key_width, heads.value_width)


def _dense_width(text: Any) -> int:
    """Inner width of the widest dense or shared MLP."""
    dense = int(known(text, "intermediate_size") or 0) if _has_dense_layer(text) else 0
    shared = int(known(text, "shared_expert_intermediate_size") or 0)
    count = known(text, "n_shared_experts", "num_shared_experts")
    if isinstance(count, int):
        shared = max(shared, count * int(known(text, "moe_intermediate_size") or 0))
    return max(dense, shared)


def _has_dense_layer(text: Any) -> bool:
    return bool(known(text, "first_k_dense_replace") or known(text, "mlp_only_layers")) or "dense" in (
        known(text, "mlp_layer_types") or ()
    )


def _patches(vision: Any, tokens: int) -> int:
    return tokens * _merge(vision) ** 2


def _pixels(vision: Any, patches: int) -> int:
    """Numbers that the processor makes of a picture."""
    channels = int(known(vision, "in_channels", "num_channels") or 3)
    return patches * channels * _side(vision, "temporal_patch_size", 1) * _side(vision, "patch_size", 14) ** 2


def _pixel_bytes(vision: Any, patches: int) -> int:
    return 4 * _pixels(vision, patches)


def _feature_width(checkpoint: Checkpoint, vision: Any) -> int:
    """Numbers of a visual token's features: the embedding and what DeepStack adds later."""
    out = int(known(vision, "out_hidden_size") or checkpoint.spec.hidden_size)
    return out * (1 + len(known(vision, "deepstack_visual_indexes") or ()))


def _runtime_bytes(checkpoint: Checkpoint, prompt_tokens: int, device: torch.device, dtype: torch.dtype) -> int:
    """What Python holds of each expert and tensor, and matrix kernels that oneDNN compiles for 16-bit products: one for
    each number of rows that an expert may get of the prompt."""
    experts = checkpoint.spec.num_experts * len(checkpoint.spec.moe_layers)
    held = OBJECTS_BYTES * (experts + len(checkpoint.backbone))
    if device.type != "cpu" or dtype.itemsize != 2:
        return held
    return held + KERNEL_BYTES * len({round_up_rows(rows) for rows in range(1, prompt_tokens + 1)})


def _upcast_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """One expert in the arithmetic's format beside its slab, when the two differ."""
    held = checkpoint.layout.dtype
    return 0 if held == dtype else checkpoint.layout.expert_bytes // held.itemsize * dtype.itemsize


def _merge(vision: Any) -> int:
    """Patches along each side of what becomes one visual token."""
    names = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size")
    return next((side for name in names if (side := _side(vision, name, 0))), 1)


def _side(config: Any, name: str, otherwise: int) -> int:
    """A size that some configs give for both sides."""
    value = known(config, name)
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return int(value) if value else otherwise

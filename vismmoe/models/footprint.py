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
from vismmoe.models.catalogue import counted_frames
from vismmoe.models.checkpoint import Checkpoint
from vismmoe.models.saliency import BLOCK_BYTES
from vismmoe.models.skeleton import named_class
from vismmoe.models.tower import held_bytes, streamed_names
from vismmoe.types import ModelBytes
from vismmoe.untrusted import read_json

AREA = 16_384  # "longest_edge" of a processor is a side in pixels below this and an area above
MAX_EDGE = 1 << 40


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
    image_size: tuple[int, int],
    compute_dtype: torch.dtype,
    context_tokens: int,
    streamed_vision: bool = False,
) -> ModelBytes:
    """What `plan_memory` reckons with, for a request of `context_tokens` with an image of `image_size` pixels. How
    experts are read is the caller's to add: read buffers and slack."""
    tower = f"{checkpoint.family.vision.tower}." if checkpoint.family.vision else None
    shared = re.compile(rf"^{re.escape(checkpoint.family.layers)}\.\d+\..*shared_(expert|mlp)")
    sizes = {"vision": 0, "shared_experts": 0, "backbone": 0}
    for name, source in checkpoint.backbone.items():
        part = "vision" if tower and name.startswith(tower) else "shared_experts" if shared.match(name) else "backbone"
        sizes[part] += math.prod(source.shape) * compute_dtype.itemsize
    if streamed_vision:
        streamed = sum(math.prod(checkpoint.backbone[name].shape) for name in streamed_names(checkpoint))
        sizes["vision"] += held_bytes(checkpoint, compute_dtype) - streamed * compute_dtype.itemsize
    tokens = image_tokens(checkpoint, image_size)
    return ModelBytes(
        **sizes,
        expert_bytes=checkpoint.layout.expert_bytes,
        experts_per_layer=checkpoint.spec.num_experts,
        moe_layers=len(checkpoint.spec.moe_layers),
        kv_bytes_per_token=kv_values(checkpoint) * compute_dtype.itemsize,
        activation_bytes=request_activations(checkpoint, tokens, max(tokens, context_tokens), compute_dtype),
        staging_bytes=_upcast_bytes(checkpoint, compute_dtype),
        top_k=checkpoint.spec.top_k,
    )


@dataclass(frozen=True)
class _Heads:
    """Attention heads and their widths, whatever the config calls them."""

    query: int
    cached: int
    key_width: int
    value_width: int


def _heads(text: Any) -> _Heads:
    query = int(_known(text, "num_attention_heads") or 1)
    width = int(_known(text, "head_dim") or text.hidden_size // query)
    latent = _known(text, "kv_lora_rank")  # multi-head latent attention expands to these
    key = int(_known(text, "qk_nope_head_dim") or 0) + int(_known(text, "qk_rope_head_dim") or 0) if latent else width
    return _Heads(
        query=query,
        cached=query if latent else int(_known(text, "num_key_value_heads") or query),
        key_width=key or width,
        value_width=int(_known(text, "v_head_dim") or width) if latent else width,
    )


def kv_values(checkpoint: Checkpoint) -> int:
    """Numbers that the cache holds of one token, all layers together; layers without attention count as if they had.

    Of multi-head latent attention transformers caches the latent and the one rotated key.
    """
    text = checkpoint.config.get_text_config()
    heads = _heads(text)
    if latent := _known(text, "kv_lora_rank"):
        return (int(latent) + int(_known(text, "qk_rope_head_dim") or 0)) * int(text.num_hidden_layers)
    return heads.cached * (heads.key_width + heads.value_width) * int(text.num_hidden_layers)


def request_activations(
    checkpoint: Checkpoint, visual_tokens: int, tokens: int, dtype: torch.dtype, chunk: int | None = None
) -> int:
    """Bytes alive at the largest moment of a request of `tokens` tokens, visual ones included; chunk: how many of them
    a layer takes at once, None for all."""
    text = text_activations(checkpoint, tokens, dtype, chunk)
    return max(vision_activations(checkpoint, visual_tokens, dtype), text)


def vision_activations(checkpoint: Checkpoint, tokens: int, dtype: torch.dtype) -> int:
    """Bytes alive in the vision tower for `tokens` visual tokens: pixels, one block, the DeepStack features."""
    vision = vision_config(checkpoint)
    if vision is None or not tokens:
        return 0
    width = int(_known(vision, "hidden_size", "embed_dim", "width") or 1024)
    patches = tokens * _merge(vision) ** 2
    channels = int(_known(vision, "in_channels", "num_channels") or 3)
    pixels = patches * channels * _side(vision, "temporal_patch_size", 1) * _side(vision, "patch_size", 14) ** 2
    # q, k, v, their rotations; or the MLP
    block = max(7 * width, 2 * int(_known(vision, "intermediate_size") or 4 * width))
    out = int(_known(vision, "out_hidden_size") or checkpoint.spec.hidden_size)
    features = tokens * out * (1 + _deepstack(vision))
    heads = int(_known(vision, "num_heads", "num_attention_heads") or 16)
    scores = 3 * min(BLOCK_BYTES, heads * patches**2 * 4)  # while saliency is measured
    needed: int = pixels * (4 + dtype.itemsize) + (patches * (2 * width + block) + features) * dtype.itemsize + scores
    return needed


def text_activations(checkpoint: Checkpoint, tokens: int, dtype: torch.dtype, chunk: int | None = None) -> int:
    """Bytes alive in the decoder while `tokens` go through one layer, with the visual features kept for DeepStack; in
    pieces of `chunk`, each with a mask over all tokens."""
    text, spec = checkpoint.config.get_text_config(), checkpoint.spec
    heads = _heads(text)
    attention = heads.query * heads.key_width + heads.cached * (heads.key_width + heads.value_width)
    stream = 4 * spec.hidden_size  # embeddings, residual, normed input, output
    experts = (spec.top_k + 1) * spec.hidden_size + 3 * spec.expert_width
    vision = vision_config(checkpoint)
    features = 0 if vision is None else spec.hidden_size * (1 + _deepstack(vision))
    router = 3 * spec.num_experts * 4
    rows = tokens if chunk is None else min(chunk, tokens)
    needed: int = tokens * (stream + features) * dtype.itemsize
    needed += rows * (max(2 * attention, experts) * dtype.itemsize + router)
    if rows < tokens:
        needed += rows * tokens * (1 + dtype.itemsize)
    needed += int(text.vocab_size) * 8  # logits of one token, twice
    return needed


def _upcast_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """One expert in the arithmetic's format beside its slab, when the two differ."""
    held = checkpoint.layout.dtype
    return 0 if held == dtype else checkpoint.layout.expert_bytes // held.itemsize * dtype.itemsize


def _deepstack(vision: Any) -> int:
    return len(_known(vision, "deepstack_visual_indexes") or ())


def _merge(vision: Any) -> int:
    """Patches along each side of what becomes one visual token."""
    names = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size")
    return next((side for name in names if (side := _side(vision, name, 0))), 1)


def _side(config: Any, name: str, otherwise: int) -> int:
    """A size that some configs give for both sides."""
    value = _known(config, name)
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return int(value) if value else otherwise


def _known(config: Any, *names: str) -> Any:
    """The first of the config's values that is set."""
    return next((value for name in names if (value := _value(config, name)) is not None), None)


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers does not tell what differs between layers: the largest is planned for
        return max(getattr(layer, name) for layer in config.per_layer_config)

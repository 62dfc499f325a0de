"""The plan's bytes are those of the tensors that are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vismmoe.models.checkpoint import Checkpoint, open_checkpoint
from vismmoe.models.footprint import image_limits, model_bytes, visual_tokens
from vismmoe.models.load import load_model
from vismmoe.types import ModelBytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backbone_and_vision_are_the_bytes_of_the_loaded_parameters(tiny_checkpoint: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    sizes = sizes_for(checkpoint, 16, 100, dtype=dtype)
    model = load_model(checkpoint, device=torch.device("cpu"), dtype=dtype)
    held = {name: p.numel() * p.element_size() for name, p in model.named_parameters() if not p.is_meta}
    assert sizes.vision == sum(size for name, size in held.items() if ".visual." in name)
    assert sizes.backbone == sum(size for name, size in held.items() if ".visual." not in name)
    assert sizes.expert_bytes == 3 * 32 * 24 * 2
    assert (sizes.experts_per_layer, sizes.moe_layers, sizes.top_k) == (16, 6, 4)
    assert sizes.kv_bytes_per_token == 2 * 2 * 16 * 6 * dtype.itemsize


@pytest.mark.parametrize(
    "size", [(1, 1), (16, 16), (30, 305), (23, 237), (64, 48), (200, 130), (257, 255), (2592, 1944), (12000, 9000)]
)
def test_visual_tokens_are_counted_as_the_processor_makes_them(tiny_checkpoint: Path, size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    limits = image_limits(open_checkpoint(tiny_checkpoint))
    assert (limits.patch, limits.merge, limits.least_pixels, limits.most_pixels) == (8, 2, 32 * 32, 256 * 256)
    height, width = smart_resize(size[1], size[0], 16, limits.least_pixels, limits.most_pixels)
    assert visual_tokens(limits, size) == (height // 16) * (width // 16)


def sizes_for(
    checkpoint: Checkpoint, visual: int, prompt: int, new: int = 0, dtype: torch.dtype = torch.float32
) -> ModelBytes:
    return model_bytes(
        checkpoint,
        visual_tokens=visual,
        prompt_tokens=prompt,
        new_tokens=new,
        compute_dtype=dtype,
        device=torch.device("cpu"),
    )


def test_larger_requests_need_more(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)

    def activations(visual: int, prompt: int) -> int:
        return sizes_for(checkpoint, visual, prompt).activation_bytes

    assert activations(16, 2000) > activations(16, 1000)
    assert activations(256, 256) > activations(16, 256)


def test_what_is_answered_is_cached_but_does_not_go_through_the_layers_at_once(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    prompt, answer = sizes_for(checkpoint, 0, 1000), sizes_for(checkpoint, 0, 100, 900)
    assert prompt.kv_bytes(1000) == answer.kv_bytes(1000)
    assert prompt.activation_bytes > answer.activation_bytes > 0

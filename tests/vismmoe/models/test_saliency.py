"""Saliency is the attention that the vision block itself computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vismmoe.models.saliency as saliency
from vismmoe.models.saliency import received_attention, scale_to_unit


@pytest.mark.parametrize("block_bytes", [1, 10_000, 1 << 20])
def test_received_attention_is_the_mean_of_the_block_s_own_softmax(
    tiny_checkpoint: Path, make_picture: Any, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    from transformers import AutoProcessor, Qwen3VLMoeForConditionalGeneration

    monkeypatch.setattr(saliency, "BLOCK_BYTES", block_bytes)
    model = Qwen3VLMoeForConditionalGeneration.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    pictures: list[Image.Image] = [make_picture(64, 48), make_picture(32, 80, 1)]
    inputs = AutoProcessor.from_pretrained(tiny_checkpoint).image_processor(pictures, return_tensors="pt")
    tower = model.model.visual
    found: list[torch.Tensor] = []
    block: Any = tower.blocks[-1].attn
    block.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(
            received_attention(module, args[0], kwargs["cu_seqlens"], kwargs["position_embeddings"], 4)
        ),
        with_kwargs=True,
    )
    wanted = _eager_attention(tower, inputs, block)
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)
    assert len(found[0]) == 12 + 10
    assert float(found[0][:12].mean()) == pytest.approx(1.0, abs=1e-4), "relative to the uniform share"


@torch.no_grad()
def _eager_attention(tower: Any, inputs: Any, block: Any) -> torch.Tensor:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    weights: list[torch.Tensor] = []
    import transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe as modeling

    def watch(module: Any, *args: Any, **kwargs: Any) -> Any:
        out = modeling.eager_attention_forward(module, *args, **kwargs)
        if module is block:
            weights.append(out[1])  # (1, heads, P, P) of one image
        return out

    ALL_ATTENTION_FUNCTIONS.register("watched", watch)
    before = tower.config._attn_implementation
    tower.config._attn_implementation = "watched"
    try:
        tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    finally:
        tower.config._attn_implementation = before
    per_patch = torch.cat([held[0].mean((0, 1)) * held.shape[-1] for held in weights])
    return per_patch.reshape(-1, 4).mean(1)


def test_scaling_reaches_from_zero_to_one() -> None:
    assert scale_to_unit(torch.tensor([2.0, 4.0, 3.0])).tolist() == [0.0, 1.0, 0.5]
    assert scale_to_unit(torch.tensor([2.0, 2.0])).tolist() == [0.0, 0.0]
    assert scale_to_unit(torch.tensor([])).tolist() == []

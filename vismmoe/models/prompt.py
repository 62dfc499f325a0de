"""From images and a question to the model's inputs, through the checkpoint's own processor and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vismmoe.errors import CheckpointError, ImageError, UsageError


@dataclass(frozen=True)
class Prompt:
    """The tokenised request. N visual tokens of all images, in prompt order."""

    inputs: Mapping[str, Tensor]  # what the model takes, on the CPU
    tokens: int
    visual_positions: Tensor  # (N,) int64 index in the prompt
    image_index: Tensor  # (N,) int64
    grid: tuple[tuple[int, int], ...]  # per image: rows, columns of visual tokens


def encode(processor: Any, config: Any, images: Sequence[Image.Image], question: str, visual_token_id: int) -> Prompt:
    """Raises UsageError for a question that holds the model's special tokens, ImageError for an image whose shape the
    processor refuses, CheckpointError when the processor cannot serve."""
    _check_question(processor, question)
    content = [{"type": "image"} for _ in images] + [{"type": "text", "text": question}]
    try:
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs of the checkpoint
        raise CheckpointError(f"the checkpoint's chat template fails ({error})") from error
    try:
        inputs = dict(processor(text=[text], images=list(images) or None, return_tensors="pt"))
    except ValueError as error:
        sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
        raise ImageError(f"the model's processor refuses an image of {sizes}: {error}") from None
    inputs = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    grids = inputs["image_grid_thw"].tolist() if images else []
    merge = int(config.vision_config.spatial_merge_size)
    grid = tuple((rows // merge, columns // merge) for _, rows, columns in grids)
    positions = (inputs["input_ids"][0] == visual_token_id).nonzero().squeeze(-1)
    counts = torch.tensor([rows * columns for rows, columns in grid], dtype=torch.int64)
    if int(counts.sum()) != len(positions):
        raise CheckpointError(
            f"the processor made {len(positions)} visual tokens for {int(counts.sum())} of the images"
        )
    index = torch.repeat_interleave(torch.arange(len(grid)), counts)
    return Prompt(inputs, inputs["input_ids"].shape[1], positions, index, grid)


def _check_question(processor: Any, question: str) -> None:
    """A question with a placeholder in it would be answered as if another image were there."""
    if not question.strip():
        raise UsageError("the prompt is empty: ask something")
    special = [
        getattr(processor, name, None)
        for name in ("image_token", "video_token", "vision_start_token", "vision_end_token")
    ]
    special += list(getattr(processor.tokenizer, "all_special_tokens", []))
    for token in special:
        if token and str(token) in question:
            raise UsageError(f"the prompt holds {token!r}, which has a meaning to the model: leave it out")

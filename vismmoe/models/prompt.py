"""From images and a question to the model's inputs, through the checkpoint's own processor and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vismmoe.errors import CheckpointError, ImageError, UsageError
from vismmoe.models.catalogue import Family
from vismmoe.models.load import tokenizer_of


@dataclass(frozen=True)
class Prompt:
    """The tokenised request. N visual tokens of all images, in prompt order."""

    inputs: Mapping[str, Any]  # what the model takes, tensors on the CPU
    tokens: int
    visual_positions: Tensor  # (N,) int64 index in the prompt
    image_index: Tensor  # (N,) int64
    grid: tuple[tuple[int, int], ...]  # per image: rows, columns of visual tokens


def encode(processor: Any, config: Any, family: Family, images: Sequence[Image.Image], question: str) -> Prompt:
    """Raises UsageError for a question that holds the model's special tokens or images that the family does not take,
    ImageError for an image whose shape the processor refuses, CheckpointError when the processor cannot serve."""
    if images and family.vision is None:
        raise UsageError(f"{family.model_type} is a text model and takes no images: leave --image out")
    _check_question(processor, question)
    inputs = _inputs(processor, family, images, _text(processor, len(images), question))
    positions = _visual_positions(inputs, config, family)
    grid = _grid(processor, config, family, inputs, images, len(positions))
    counts = torch.tensor([rows * columns for rows, columns in grid], dtype=torch.int64)
    if int(counts.sum()) != len(positions):
        raise CheckpointError(
            f"the processor made {len(positions)} visual tokens for {int(counts.sum())} of the images"
        )
    index = torch.repeat_interleave(torch.arange(len(grid)), counts)
    return Prompt(inputs, inputs["input_ids"].shape[1], positions, index, grid)


def _text(processor: Any, images: int, question: str) -> str:
    """The question in the checkpoint's chat template; a text model without one gets the question as it is."""
    if images == 0 and getattr(processor, "chat_template", None) is None:
        return question
    parts = [{"type": "image"} for _ in range(images)] + [{"type": "text", "text": question}]
    content: Any = parts if hasattr(processor, "image_processor") else question  # text templates want plain text
    try:
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs of the checkpoint
        raise CheckpointError(f"the checkpoint's chat template fails ({error})") from error
    return str(text)


def _inputs(processor: Any, family: Family, images: Sequence[Image.Image], text: str) -> dict[str, Any]:
    """What the model takes, through the processor: tensors, and what the family names beside them."""
    pictures = {"images": list(images) or None} if family.vision is not None else {}
    try:
        inputs = dict(processor(text=[text], return_tensors="pt", **pictures))
    except ValueError as error:
        if not images:
            raise CheckpointError(f"the checkpoint's processor fails ({error})") from error
        sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
        raise ImageError(f"the model's processor refuses an image of {sizes}: {error}") from None
    more = family.vision.list_inputs if family.vision is not None and images else ()
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor) or name in more}


def _visual_positions(inputs: Mapping[str, Any], config: Any, family: Family) -> Tensor:
    """(N,) int64 index of each visual token in the prompt."""
    if family.vision is None:
        return torch.zeros(0, dtype=torch.int64)
    if family.vision.mask_input is not None:
        marked: Tensor = inputs[family.vision.mask_input]
        return marked[0].bool().nonzero().squeeze(-1)
    token = getattr(config, family.vision.token_key)
    ids: Tensor = inputs["input_ids"]
    return (ids[0] == int(token)).nonzero().squeeze(-1)


def _grid(
    processor: Any, config: Any, family: Family, inputs: Mapping[str, Any], images: Sequence[Image.Image], total: int
) -> tuple[tuple[int, int], ...]:
    """Per image: rows and columns of visual tokens; one row where the processor does not tell them."""
    if not images:
        return ()
    if (found := inputs.get("image_grid_thw")) is not None:
        merge = int(getattr(processor.image_processor, "merge_size", None) or 1)
        ends = family.vision.row_ends if family.vision is not None else 0
        return tuple((rows // merge, columns // merge + ends) for _, rows, columns in found.tolist())
    if (own := getattr(processor, "visual_grids", None)) is not None:
        grids: tuple[tuple[int, int], ...] = own(inputs)
        return grids
    if len(images) == 1:
        return ((1, total),)
    alone = (_inputs(processor, family, [image], _text(processor, 1, "?")) for image in images)
    return tuple((1, len(_visual_positions(held, config, family))) for held in alone)


def _check_question(processor: Any, question: str) -> None:
    """A question with a placeholder in it would be answered as if another image were there."""
    try:
        question.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes of another encoding, handed over by a shell
        raise UsageError(f"the prompt is not UTF-8 text (character {error.start + 1})") from None
    if not question.strip():
        raise UsageError("the prompt is empty: ask something")
    special = [
        getattr(processor, name, None)
        for name in ("image_token", "video_token", "vision_start_token", "vision_end_token")
    ]
    special += list(getattr(tokenizer_of(processor), "all_special_tokens", []))
    for token in special:
        if token and str(token) in question:
            raise UsageError(f"the prompt holds {token!r}, which has a meaning to the model: leave it out")

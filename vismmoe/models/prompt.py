"""From images and a question to the model's inputs, through the checkpoint's own processor and chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vismmoe.errors import CheckpointError, ImageError, UsageError
from vismmoe.models.catalogue import Family
from vismmoe.models.load import tokenizer_of

CUT_BY_TRANSFORMERS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
)  # generate() takes these whole and lets the model see what is not in the cache


@dataclass(frozen=True)
class Words:
    """A message whose pictures lie elsewhere, in order: None stands for one."""

    role: str
    parts: tuple[str | None, ...]


@dataclass(frozen=True)
class Prompt:
    """The tokenised request, or what is new of it. N visual tokens of its images, in prompt order."""

    inputs: Mapping[str, Any]  # what generate() takes, tensors on the CPU
    tokens: int
    visual_positions: Tensor  # (N,) int64 index in the prompt
    image_index: Tensor  # (N,) int64
    grid: tuple[tuple[int, int], ...]  # per image: rows, columns of visual tokens


def encode(processor: Any, config: Any, family: Family, images: Sequence[Image.Image], question: str) -> Prompt:
    """One question about `images`; raises what encode_messages raises."""
    asked = Words("user", (*(None for _ in images), question))
    return encode_messages(processor, config, family, images, (asked,))


def encode_messages(
    processor: Any, config: Any, family: Family, images: Sequence[Image.Image], messages: Sequence[Words]
) -> Prompt:
    """A conversation that ends with the user's words, in the checkpoint's chat template; `images` of all messages.

    Raises UsageError for words that hold the model's special tokens or images that the family does not take,
    ImageError for an image whose shape the processor refuses, CheckpointError when the processor cannot serve."""
    if images and family.vision is None:
        raise UsageError(f"{family.model_type} is a text model and takes no images: leave --image out")
    _check_words(processor, messages)
    inputs = _inputs(processor, family, images, prompt_text(processor, messages))
    positions = _visual_positions(inputs, config, family)
    grid = _grid(processor, config, family, inputs, images, len(positions))
    counts = torch.tensor([rows * columns for rows, columns in grid], dtype=torch.int64)
    if int(counts.sum()) != len(positions):
        raise CheckpointError(
            f"the processor made {len(positions)} visual tokens for {int(counts.sum())} of the images"
        )
    index = torch.repeat_interleave(torch.arange(len(grid)), counts)
    return Prompt(inputs, inputs["input_ids"].shape[1], positions, index, grid)


def whole_images(prompt: Prompt, tokens: int) -> int:
    """At most `tokens`: where the prompt can be cut without parting an image."""
    for image in range(len(prompt.grid)):
        places = prompt.visual_positions[prompt.image_index == image]
        if len(places) and int(places[0]) < tokens <= int(places[-1]):
            return int(places[0])
    return tokens


def without_start(prompt: Prompt, processor: Any, tokens: int) -> Prompt | None:
    """What is new after the first `tokens`, which the cache holds and which part no image. None where the family's
    image tensors cannot be taken apart."""
    new = prompt.visual_positions >= tokens
    first = int(prompt.image_index[new][0]) if bool(new.any()) else len(prompt.grid)
    rows = {name: held for name, held in prompt.inputs.items() if _is_row(held, prompt.tokens)}
    inputs = {name: value if name in CUT_BY_TRANSFORMERS else value[:, tokens:] for name, value in rows.items()}
    if first < len(prompt.grid):
        later = _later_images(processor, {k: v for k, v in prompt.inputs.items() if k not in rows}, first)
        if later is None:
            return None
        inputs.update(later)
    return replace(
        prompt,
        inputs=inputs,
        tokens=prompt.tokens - tokens,
        visual_positions=prompt.visual_positions[new] - tokens,
        image_index=prompt.image_index[new] - first,
        grid=prompt.grid[first:],
    )


def _is_row(value: Any, tokens: int) -> bool:
    """Whether it has one entry for each token of a single prompt."""
    return isinstance(value, Tensor) and value.shape[:2] == (1, tokens)


def _later_images(processor: Any, tensors: Mapping[str, Any], first: int) -> dict[str, Any] | None:
    """The image tensors without those of the first `first` images."""
    if first == 0:
        return dict(tensors)
    if (own := getattr(processor, "later_images", None)) is not None:
        held: dict[str, Tensor] = own(tensors, first)
        return held
    if set(tensors) != {"pixel_values", "image_grid_thw"}:
        return None
    grid = tensors["image_grid_thw"]
    patches = int(grid[:first].prod(-1).sum())
    return {"pixel_values": tensors["pixel_values"][patches:], "image_grid_thw": grid[first:]}


def prompt_text(processor: Any, messages: Sequence[Words]) -> str:
    """The words in the checkpoint's chat template; a text model without one gets a single question as it is."""
    if getattr(processor, "chat_template", None) is None and not any(None in said.parts for said in messages):
        if len(messages) > 1:
            raise UsageError("this checkpoint has no chat template, so it takes one question and no conversation")
        return _plain(messages[0])
    told = [{"role": said.role, "content": _content(said, hasattr(processor, "image_processor"))} for said in messages]
    try:
        text = processor.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the checkpoint
        raise CheckpointError(f"the checkpoint's chat template fails ({error})") from error
    return str(text)


def _content(said: Words, images: bool) -> Any:
    """As the template wants it: parts, or plain text for a text model's."""
    if not images:
        return _plain(said)
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in said.parts]


def _plain(said: Words) -> str:
    return "".join(part for part in said.parts if part is not None)


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
    asked = (Words("user", (None, "?")),)
    alone = (_inputs(processor, family, [image], prompt_text(processor, asked)) for image in images)
    return tuple((1, len(_visual_positions(held, config, family))) for held in alone)


def _check_words(processor: Any, messages: Sequence[Words]) -> None:
    """Words with a placeholder in them would be answered as if another image were there."""
    if not messages or messages[-1].role != "user":
        raise UsageError("the conversation must end with the user's words, which are then answered")
    if not _plain(messages[-1]).strip():
        raise UsageError("the prompt is empty: ask something")
    special = [
        getattr(processor, name, None)
        for name in ("image_token", "video_token", "vision_start_token", "vision_end_token")
    ]
    special += list(getattr(tokenizer_of(processor), "all_special_tokens", []))
    for said in messages:
        whose = "prompt" if said is messages[-1] else f"{said.role}'s message"
        _check_text(_plain(said), whose)
        for token in special:
            if token and str(token) in _plain(said):
                raise UsageError(f"the {whose} holds {token!r}, which has a meaning to the model: leave it out")


def _check_text(text: str, whose: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes of another encoding, handed over by a shell
        raise UsageError(f"the {whose} is not UTF-8 text (character {error.start + 1})") from None

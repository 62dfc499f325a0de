"""From pictures and text to the official forward's inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BatchFeature, PreTrainedTokenizerFast
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin

from vismmoe.models.deepseek_vl2.sequence import images_of, tokens_per_image, tokens_per_side
from vismmoe.models.deepseek_vl2.tiling import best_resolution, cut_views, tile_counts

CROPPED_IMAGES = 2  # up to so many images of a prompt are cut into tiles; more get one resolution each
ASSISTANT = "<|Assistant|>:"
CHAT_TEMPLATE = (
    "{%- macro text(content) -%}"
    "{%- if content is string -%}{{ content }}{%- else -%}"
    "{%- for part in content -%}"
    "{%- if part.type == 'image' -%}<image>\n{% elif part.type == 'text' -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{%- for message in messages -%}"
    "{%- set role = message.role | replace('<|', '') | replace('|>', '') | lower -%}"
    "{%- if role == 'user' -%}{{ '<|User|>: ' + text(message.content).strip() + '\n\n<|Assistant|>:' }}"
    "{%- elif role == 'assistant' -%}"
    "{%- if not loop.last or text(message.content) -%}{{ text(message.content).strip() + eos_token }}{%- endif -%}"
    "{%- elif role == 'system' and loop.first -%}{{ text(message.content).strip() }}"
    "{%- else -%}{{ raise_exception('a message of role ' + message.role + ' is not run here') }}"
    "{%- endif -%}{%- endfor -%}"
)


class DeepseekVL2ImageProcessor(BaseImageProcessor):  # type: ignore[misc]
    """Views of a picture: the whole, then the tiles of its best resolution, as numbers around zero."""

    model_input_names = ("images", "images_spatial_crop")

    def __init__(
        self,
        candidate_resolutions: Sequence[Sequence[int]],
        patch_size: int = 14,
        downsample_ratio: int = 2,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        normalize: bool = True,
        **kwargs: Any,
    ) -> None:
        """candidate_resolutions: (width, height) in pixels, all multiples of the first one's width, a tile's side."""
        super().__init__(**kwargs)
        if not candidate_resolutions:
            raise ValueError("candidate_resolutions is empty: a release lists (width, height) pairs there")
        self.candidate_resolutions = [list(pair) for pair in candidate_resolutions]
        self.image_size = int(candidate_resolutions[0][0])
        self.patch_size = patch_size
        self.downsample_ratio = downsample_ratio
        self.image_mean = list(image_mean)
        self.image_std = list(image_std)
        self.normalize_pixels = normalize

    @property
    def side(self) -> int:
        """Visual tokens along one side of a tile."""
        return tokens_per_side(self.image_size, self.patch_size, self.downsample_ratio)

    def preprocess(self, images: Sequence[Image.Image], **kwargs: Any) -> BatchFeature:
        """Images of one prompt -> images (views, 3, S, S) float32, images_spatial_crop (images, 2) tiles wide, high."""
        cropping = len(images) <= CROPPED_IMAGES
        views: list[Tensor] = []
        tiles: list[tuple[int, int]] = []
        for image in images:
            square = (self.image_size, self.image_size)
            best = best_resolution(image.size, self.candidate_resolutions) if cropping else square
            tiles.append(tile_counts(best, self.image_size))
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            views += [self._numbers(view) for view in cut_views(rgb, best, self.image_size, self._padding())]
        return BatchFeature({"images": torch.stack(views), "images_spatial_crop": torch.tensor(tiles)})

    def _padding(self) -> tuple[int, int, int]:
        red, green, blue = (int(value * 255) for value in self.image_mean)
        return red, green, blue

    def _numbers(self, view: Image.Image) -> Tensor:
        """(3, S, S) float32."""
        values = torch.from_numpy(np.asarray(view).copy()).permute(2, 0, 1).contiguous().float().div(255)
        if not self.normalize_pixels:
            return values
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (self.image_mean, self.image_std))
        return values.sub(mean).div(std)


class DeepseekVL2Processor(ProcessorMixin):  # type: ignore[misc]
    """Text with one `<image>` for each picture, or conversations, to inputs of the model."""

    def __init__(
        self,
        image_processor: DeepseekVL2ImageProcessor,
        tokenizer: Any,
        chat_template: str | None = None,
        image_token: str = "<image>",
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template or CHAT_TEMPLATE)
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        if self.image_token_id is None or self.image_token_id == tokenizer.unk_token_id:
            raise ValueError(f"the tokenizer has no {image_token}: this is no DeepSeek-VL2 tokenizer")
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token: this is no DeepSeek-VL2 tokenizer")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **kwargs: Any) -> DeepseekVL2Processor:
        """Reads processor_config.json and tokenizer.json as released; no code of the folder is run."""
        held, _ = cls.get_processor_dict(str(pretrained_model_name_or_path), **kwargs)
        held = {**held, **held.get("image_processor", {})}  # as save_pretrained nests it
        known = ("candidate_resolutions", "patch_size", "downsample_ratio", "image_mean", "image_std", "normalize")
        if "candidate_resolutions" not in held:
            raise ValueError(f"{pretrained_model_name_or_path}: processor_config.json lists no candidate_resolutions")
        # tokenizer_config.json names a Llama tokenizer, whose rules are not those in tokenizer.json
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(pretrained_model_name_or_path), **kwargs)
        images = DeepseekVL2ImageProcessor(**{name: held[name] for name in known if name in held})
        return cls(images, tokenizer, image_token=held.get("image_token", "<image>"))

    def __call__(
        self,
        images: Image.Image | Sequence[Image.Image] | None = None,
        text: str | Sequence[str] | None = None,
        conversations: Sequence[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """text: formatted prompts; their `<image>` marks take the images one after another. Or one conversation of
        messages with role and content, which the chat template formats. Prompts of different length are padded on the
        left. Raises ValueError when marks and images do not match in number.

        Returns input_ids, attention_mask, images_seq_mask (B, T), images (B, views, 3, S, S),
        images_spatial_crop (B, images, 2).
        """
        if (text is None) == (conversations is None):
            raise ValueError("give either text or conversations")
        if conversations is not None:
            text = str(self.apply_chat_template(list(conversations), tokenize=False))
        texts = [text] if isinstance(text, str) else list(text or ())
        listed = [images] if isinstance(images, Image.Image) else list(images or ())
        marks = [each.count(self.image_token) for each in texts]
        if sum(marks) != len(listed):
            raise ValueError(
                f"the text has {sum(marks)} {self.image_token} marks for {len(listed)} images: give one for each"
            )
        rows = []
        for each, count in zip(texts, marks, strict=True):
            rows.append(self._encode(each, listed[:count]))
            listed = listed[count:]
        return self._batch(rows)

    def visual_grids(self, inputs: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
        """Per image of a single prompt: rows and columns of visual tokens; views and newlines make one long row."""
        side = self.image_processor.side
        return tuple((1, tokens_per_image(side, tiles)) for _, tiles in images_of(inputs["images_spatial_crop"][0]))

    def later_images(self, inputs: Mapping[str, Tensor], first: int) -> dict[str, Tensor]:
        """The image tensors of a single prompt without those of its first `first` images."""
        tiles = inputs["images_spatial_crop"]
        views = sum(1 + width * height for _, (width, height) in list(images_of(tiles[0]))[:first])
        return {"images": inputs["images"][:, views:], "images_spatial_crop": tiles[:, first:]}

    def _encode(self, text: str, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """One prompt. Text between images, and an answer after its mark, is encoded piece by piece."""
        size = self.image_processor.image_size
        seen = {"images": torch.zeros(1, 3, size, size), "images_spatial_crop": torch.zeros(1, 2, dtype=torch.int64)}
        if images:
            seen = dict(self.image_processor.preprocess(images))
        ids = [self.tokenizer.bos_token_id]
        for number, piece in enumerate(text.split(self.image_token)):
            if number:
                width, height = seen["images_spatial_crop"][number - 1].tolist()
                ids += [self.image_token_id] * tokens_per_image(self.image_processor.side, (width, height))
            for part in re.split(f"(?<={re.escape(ASSISTANT)})", piece):
                ids += self.tokenizer.encode(part, add_special_tokens=False) if part else []
        row = torch.tensor(ids)
        return {"input_ids": row, "images_seq_mask": row == self.image_token_id, **seen}

    def _batch(self, rows: Sequence[dict[str, Tensor]]) -> BatchFeature:
        length = max(len(row["input_ids"]) for row in rows)
        out: dict[str, list[Tensor]] = {}
        for row in rows:
            lacking = length - len(row["input_ids"])
            pad = {"input_ids": self.tokenizer.pad_token_id, "images_seq_mask": False, "attention_mask": False}
            row = {**row, "attention_mask": torch.ones(len(row["input_ids"]), dtype=torch.bool)}
            for name, value in pad.items():
                out.setdefault(name, []).append(torch.nn.functional.pad(row[name], (lacking, 0), value=value))
            for name in ("images", "images_spatial_crop"):
                out.setdefault(name, []).append(row[name])
        for name in ("images", "images_spatial_crop"):  # zeros stand for no view and no image
            out[name] = list(torch.nn.utils.rnn.pad_sequence(out[name], batch_first=True))
        return BatchFeature({name: torch.stack(values) for name, values in out.items()})

"""The whole model: tower, projector, image sequences put into the prompt, language model."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel, SiglipVisionModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from vismmoe.models.deepseek_vl2.config import DeepseekVL2Config
from vismmoe.models.deepseek_vl2.language import Language
from vismmoe.models.deepseek_vl2.names import UNUSED, expert_transforms, tower_transforms
from vismmoe.models.deepseek_vl2.sequence import (
    Projector,
    image_sequence,
    images_of,
    tokens_per_image,
    tokens_per_side,
)
from vismmoe.models.deepseek_vl2.tiling import best_resolution, tile_counts

IMAGE_INPUTS = ("images", "images_seq_mask", "images_spatial_crop")  # of the prompt's own forward only


class DeepseekVL2Tower(SiglipVisionModel):  # type: ignore[misc]
    """SigLIP; a class of its own because its checkpoints have timm's names."""


class DeepseekVL2ForConditionalGeneration(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """from_pretrained(folder) reads the official layout; forward takes the official input names."""

    config_class = DeepseekVL2Config
    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities = ("image", "text")
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _no_split_modules: ClassVar[list[str]] = ["DecoderLayer", "SiglipEncoderLayer"]
    _tied_weights_keys: ClassVar[dict[str, str]] = {"language.lm_head.weight": "language.model.embed_tokens.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = list(UNUSED)

    def __init__(self, config: DeepseekVL2Config) -> None:
        super().__init__(config)
        width = config.text_config.hidden_size
        self.vision: Any = DeepseekVL2Tower(config.vision_config)
        self.projector = Projector(config.projector_config)
        self.language = Language(config.text_config)
        self.image_newline = nn.Parameter(torch.randn(width) / math.sqrt(width))
        self.view_seperator = nn.Parameter(torch.randn(width) / math.sqrt(width))  # spelt as in the checkpoints
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for the decorator in a class's own file; the experts here are its own."""
        return True

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.language.model.embed_tokens
        return embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.language.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.language.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.language.lm_head = value

    @staticmethod
    def count_visual_tokens(config: DeepseekVL2Config, size: tuple[int, int]) -> int:
        """Rows that an image of `size` (width, height) in pixels takes in the prompt, cropping allowed."""
        vision = config.vision_config
        side = tokens_per_side(vision.image_size, vision.patch_size, config.projector_config.downsample_ratio)
        best = best_resolution(size, config.candidate_resolutions)
        return tokens_per_image(side, tile_counts(best, vision.image_size))

    def image_rows(self, images: Tensor, images_spatial_crop: Tensor) -> list[Tensor]:
        """For each prompt with images, (image tokens, H): its images one after another.

        images: (B, views, 3, S, S), all views of a prompt in one axis; images_spatial_crop: (B, images, 2) tiles
        wide and high of each, zeros for none.
        """
        listed = [list(images_of(tiles)) for tiles in images_spatial_crop]
        counts = [sum(1 + width * height for _, (width, height) in each) for each in listed]
        if not any(counts):
            return []
        views = torch.cat([row[:count] for row, count in zip(images, counts, strict=True)])
        projected: Tensor = self.projector(self.vision(views.to(self.dtype)).last_hidden_state)
        return [
            torch.cat(
                [
                    image_sequence(held[first : first + 1 + w * h], (w, h), self.image_newline, self.view_seperator)
                    for first, (w, h) in each
                ]
            )
            for held, each in zip(torch.split(projected, counts), listed, strict=True)
            if each
        ]

    def prompt_embeddings(
        self, input_ids: Tensor, images: Tensor, images_seq_mask: Tensor, images_spatial_crop: Tensor
    ) -> Tensor:
        """(B, T, H): token embeddings with the images' rows where images_seq_mask (B, T) is true."""
        embeds: Tensor = self.get_input_embeddings()(input_ids)
        rows = self.image_rows(images, images_spatial_crop)
        places = images_seq_mask.bool()
        held = sum(len(each) for each in rows)
        if int(places.sum()) != held:
            raise ValueError(f"images_seq_mask marks {int(places.sum())} positions, the images have {held} rows")
        if not rows:
            return embeds
        return embeds.masked_scatter(places.unsqueeze(-1), torch.cat(rows).to(embeds.dtype))

    def forward(
        self,
        input_ids: Tensor | None = None,
        images: Tensor | None = None,
        images_seq_mask: Tensor | None = None,
        images_spatial_crop: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,  # the same; transformers has renamed it within version 5
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Official inputs in, `logits` (B, T, vocabulary) out; logits_to_keep: only of the last so many positions."""
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("give input_ids or inputs_embeds")
            if images is not None and images_seq_mask is not None and images_spatial_crop is not None:
                inputs_embeds = self.prompt_embeddings(input_ids, images, images_seq_mask, images_spatial_crop)
            else:
                inputs_embeds = self.get_input_embeddings()(input_ids)
        held = {"cache": cache, "past_key_values": past_key_values}
        out = self.language.model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{name: value for name, value in held.items() if value is not None},
            **kwargs,
        )
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.language.lm_head(out.last_hidden_state[:, rows])
        rest = {name: value for name, value in out.items() if name != "last_hidden_state"}
        return MoeCausalLMOutputWithPast(logits=logits, **rest)

    def prepare_inputs_for_generation(self, *args: Any, is_first_iteration: bool = False, **kwargs: Any) -> Any:
        """Images belong to the prompt's forward; decoded tokens see them through the cache."""
        inputs = super().prepare_inputs_for_generation(*args, is_first_iteration=is_first_iteration, **kwargs)
        if not is_first_iteration and kwargs.get("use_cache", True):
            for name in IMAGE_INPUTS:
                inputs.pop(name, None)
        return inputs


register_checkpoint_conversion_mapping(DeepseekVL2Tower.__name__, tower_transforms(), overwrite=True)
register_checkpoint_conversion_mapping(
    DeepseekVL2ForConditionalGeneration.__name__, expert_transforms(), overwrite=True
)

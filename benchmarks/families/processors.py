"""Tokenizers and image processors of tiny checkpoints: each family's own processor class, with small pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vismmoe.models.catalogue import Family

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
IMAGE_TOKEN, VIDEO_TOKEN, FIRST_MORE = 261, 262, 263  # ids of the last two, and of what a family adds
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}  # pixels
_AROUND = "<|vision_start|><|image_pad|><|vision_end|>"


def tokenizer(more: tuple[str, ...] = (), **named: str) -> Any:
    """One token a byte, the special ones after them; named: token names that a processor asks for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2TokenizerFast

    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens([*SPECIAL, *more])
    made = Qwen2TokenizerFast(
        tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=named or [*SPECIAL[3:], *more],
    )  # fmt: skip
    made.chat_template = template()
    return made


def template(mark: str = _AROUND) -> str:
    """A chat template with `mark` for each image."""
    return _TEMPLATE.replace("MARK", mark)


def processor(family: Family, config: Any) -> Any:
    """A processor whose tensors are those that the family's model takes."""
    return _PROCESSORS.get(family.model_type, _qwen)(config)


def _sides(vision: Any) -> dict[str, int]:
    return {
        "patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }  # fmt: skip


def _qwen(config: Any) -> Any:
    """Patches in rows with image_grid_thw, as Qwen and its kin take them."""
    from transformers import Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    sides = _sides(config.vision_config)
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=_SIZES, **sides),
        tokenizer=tokenizer(),
        video_processor=Qwen3VLVideoProcessor(size=_SIZES, **sides),
        chat_template=template(),
    )


def _omni(config: Any) -> Any:
    """Qwen's pictures beside an ear."""
    from transformers import Qwen2VLVideoProcessor, Qwen3OmniMoeProcessor, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    sides = _sides(config.vision_config)
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(size=_SIZES, **sides),
        video_processor=Qwen2VLVideoProcessor(size=_SIZES, **sides),
        feature_extractor=WhisperFeatureExtractor(),
        tokenizer=tokenizer(
            image_token="<|image_pad|>", video_token="<|video_pad|>", audio_token="<|audio|>",
            vision_bos_token="<|vision_start|>", vision_eos_token="<|vision_end|>",
            audio_bos_token="<|audio_start|>", audio_eos_token="<|audio_end|>",
        ),
        chat_template=template(),
    )  # fmt: skip


def _kimi(config: Any) -> Any:
    from transformers import Kimi_K25ImageProcessor, Kimi_K25Processor, Kimi_K25VideoProcessor

    vision = config.vision_config
    sides = {"patch_size": vision.patch_size, "merge_size": vision.merge_kernel_size[0]}
    return Kimi_K25Processor(
        image_processor=Kimi_K25ImageProcessor(max_patches=256, **sides),
        video_processor=Kimi_K25VideoProcessor(**sides),
        tokenizer=tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>"),
        chat_template=template(),
    )


def _minimax(config: Any) -> Any:
    from transformers import MiniMaxM3VLImageProcessor, MiniMaxM3VLProcessor, MiniMaxM3VLVideoProcessor

    sides = _sides(config.vision_config)
    made = MiniMaxM3VLProcessor
    marks = (made.IMAGE_TOKEN, made.VIDEO_TOKEN, made.VISION_START_TOKEN, made.VISION_END_TOKEN)
    return made(
        image_processor=MiniMaxM3VLImageProcessor(size=dict(_SIZES), **sides),
        video_processor=MiniMaxM3VLVideoProcessor(**sides),
        tokenizer=tokenizer(marks),
        chat_template=template(made.IMAGE_TOKEN),
    )


def _aria(config: Any) -> Any:
    from transformers import AriaImageProcessor, AriaProcessor

    return AriaProcessor(
        image_processor=AriaImageProcessor(),
        tokenizer=tokenizer(image_token="<|image_pad|>"),
        chat_template=template(),
        size_conversion={980: 16},
    )


def _gemma(config: Any) -> Any:
    from transformers import (
        Gemma4AudioFeatureExtractor,
        Gemma4ImageProcessor,
        Gemma4Processor,
        Gemma4VideoProcessor,
    )

    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=70, patch_size=config.vision_config.patch_size),
        video_processor=Gemma4VideoProcessor(),
        tokenizer=tokenizer(
            image_token="<|image_pad|>",
            boi_token="<|vision_start|>",
            eoi_token="<|vision_end|>",
            audio_token="<|audio|>",
            boa_token="<|audio_start|>",
            eoa_token="<|audio_end|>",
        ),
        chat_template=template("<|image_pad|>"),
        image_seq_length=70,
    )


def _glm5(config: Any) -> Any:
    from transformers import Glm5NextImageProcessor, Glm5NextProcessor, Glm5NextVideoProcessor

    sides = _sides(config.vision_config)
    return Glm5NextProcessor(
        image_processor=Glm5NextImageProcessor(size=dict(_SIZES), **sides),
        video_processor=Glm5NextVideoProcessor(size=dict(_SIZES), **sides),
        tokenizer=tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>"),
        chat_template=template(),
    )


def _hunyuan(config: Any) -> Any:
    from transformers import HYV4VLImageProcessor, HYV4VLProcessor, HYV4VLVideoProcessor

    vision = config.vision_config
    sides = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
    return HYV4VLProcessor(
        image_processor=HYV4VLImageProcessor(size=dict(_SIZES), **sides),
        video_processor=HYV4VLVideoProcessor(size=dict(_SIZES), **sides),
        tokenizer=tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>"),
        chat_template=template(),
    )


def _pixtral(config: Any) -> Any:
    from transformers import PixtralImageProcessor, PixtralProcessor

    side = config.vision_config.patch_size
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(size={"longest_edge": 64}, patch_size=side),
        tokenizer=tokenizer(),
        patch_size=side,
        spatial_merge_size=config.spatial_merge_size,
        image_token="<|image_pad|>",
        image_break_token="<|vision_start|>",
        image_end_token="<|vision_end|>",
        chat_template=template("<|image_pad|>"),
    )


def _dots(config: Any) -> Any:
    from transformers import Dots3NoteFeatureExtractor, Dots3NoteProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    vision = config.vision_config
    sides = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "temporal_patch_size": 1}
    return Dots3NoteProcessor(
        image_processor=Qwen2VLImageProcessor(size=_SIZES, **sides),
        video_processor=Qwen3VLVideoProcessor(size=_SIZES, **sides),
        feature_extractor=Dots3NoteFeatureExtractor(),
        tokenizer=tokenizer(("<|imgpad|>", "<|audio_comp_pad|>")),
        chat_template=template("<|imgpad|>"),
    )


def _nemotron(config: Any) -> Any:
    from transformers import (
        NemotronH_Omni_Reasoning_V3ImageProcessor,
        NemotronH_Omni_Reasoning_V3Processor,
        NemotronH_Omni_Reasoning_V3VideoProcessor,
        ParakeetFeatureExtractor,
    )

    side = config.vision_config.patch_size
    return NemotronH_Omni_Reasoning_V3Processor(
        image_processor=NemotronH_Omni_Reasoning_V3ImageProcessor(patch_size=side, min_num_patches=4),
        video_processor=NemotronH_Omni_Reasoning_V3VideoProcessor(),
        feature_extractor=ParakeetFeatureExtractor(),
        tokenizer=tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>"),
        chat_template=template("<|image_pad|>"),
    )


def _ocr2(config: Any) -> Any:
    from transformers import DeepseekOcr2ImageProcessor, DeepseekOcr2Processor

    side = config.vision_config.sam_config.image_size
    return DeepseekOcr2Processor(
        image_processor=DeepseekOcr2ImageProcessor(size={"height": side, "width": side}, tile_size=side),
        tokenizer=tokenizer(image_token="<|image_pad|>"),
        chat_template=template("<|image_pad|>"),
    )


def _unlimited(config: Any) -> Any:
    from transformers import UnlimitedOcrImageProcessor, UnlimitedOcrProcessor

    side = config.vision_config.sam_config.image_size
    return UnlimitedOcrProcessor(
        image_processor=UnlimitedOcrImageProcessor(size={"height": side, "width": side}, tile_size=64),
        tokenizer=tokenizer(image_token="<|image_pad|>"),
        chat_template=template("<|image_pad|>"),
    )


def _muse(config: Any) -> Any:
    from transformers import MuseSparkFeatureExtractor, MuseSparkProcessor, Qwen2VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    vision = config.vision_config
    sides = {
        "patch_size": vision.patch_size, "merge_size": vision.merge_size, "temporal_patch_size": vision.patch_temporal,
    }  # fmt: skip
    return MuseSparkProcessor(
        image_processor=Qwen2VLImageProcessor(size=_SIZES, **sides),
        video_processor=Qwen2VLVideoProcessor(size=_SIZES, **sides),
        feature_extractor=MuseSparkFeatureExtractor(),
        tokenizer=tokenizer(
            image_token="<|image_pad|>", image_start_token="<|vision_start|>", image_end_token="<|vision_end|>"
        ),
        chat_template=template("<|image_pad|>"),
    )


_PROCESSORS: Mapping[str, Callable[[Any], Any]] = {
    "aria": _aria,
    "deepseek_ocr2": _ocr2,
    "dots3_note": _dots,
    "gemma4": _gemma,
    "glm5_next": _glm5,
    "hy_v4_vl": _hunyuan,
    "mistral_large4": _pixtral,
    "kimi_k25": _kimi,
    "minimax_m3_vl": _minimax,
    "muse_spark": _muse,
    "nemotron_h_omni": _nemotron,
    "qwen3_omni_moe_thinker": _omni,
    "unlimited_ocr": _unlimited,
}

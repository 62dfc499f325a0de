"""What differs between model families: names of things, nothing that runs.

Every family keeps its routed experts in packed parameters behind transformers' experts interface; an entry says where.
A family that is not listed is refused by name; adding one means adding one entry, which the matrix test then tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vismmoe.errors import CheckpointError, UsageError
from vismmoe.types import Compressor

MANY = 1_000_000  # visual tokens, to ask a compressor whether it drops any
PUBLISHED_PREFIX_LAYERS = 10  # of 48 (VisMMoE §4.3)


def counted_frames(image_processor: str) -> int:
    """How often an image processor of this class counts a picture's pixels against its limits."""
    return 2 if image_processor.startswith("Glm4vImageProcessor") else 1  # once for each of a token's frames


@dataclass(frozen=True)
class Vision:
    """Where a family's images enter. Paths are module paths from the model's top."""

    tower: str
    token_key: str = "image_token_id"  # config key of the placeholder token's id
    saliency_attention: str | None = (
        None  # attention module whose weights tell saliency; None: it cannot be looked into
    )
    saliency: str = "vismmoe.models.saliency:packed_saliency"  # function that looks into it
    mask_input: str | None = None  # processor output (1, T) that marks visual tokens, where the config names no token
    list_inputs: tuple[str, ...] = ()  # processor outputs that the model takes and that are no tensors
    row_ends: int = 0  # visual tokens at the end of each row of an image, beside those of its patches
    keeps_all: str | None = None  # why no visual token can be dropped; None: they can


@dataclass(frozen=True)
class Family:
    """Where a family keeps what the runtime touches. Paths are module paths from the model's top."""

    model_type: str  # of config.json
    model_class: str  # attribute of transformers, or "module:attribute" for a class of this project
    layers: str = "model.layers"  # list of decoder layers; the module that holds it is the decoder
    experts: str = "mlp.experts"  # within a decoder layer that has routed experts
    router: str = "mlp.gate"  # within a decoder layer; its weight is (E, H)
    moe_norm: str | None = "post_attention_layernorm"  # within a decoder layer: the norm whose output is the MoE input
    vision: Vision | None = None  # None: text only
    processor_class: str | None = None  # "module:attribute"; None: what AutoProcessor finds
    default_prefix_layers: int = PUBLISHED_PREFIX_LAYERS

    @property
    def decoder(self) -> str:
        """The text model: receives inputs_embeds and the visual masks."""
        return self.layers.rpartition(".")[0]


def _text(model_type: str, model_class: str, **differences: str | None) -> Family:
    return Family(model_type, model_class, **differences)  # type: ignore[arg-type]


def _image(model_type: str, model_class: str, vision: Vision, **differences: str | None) -> Family:
    return Family(model_type, model_class, vision=vision, **{"layers": "model.language_model.layers", **differences})  # type: ignore[arg-type]


_SPARSE_BLOCK = {"experts": "block_sparse_moe.experts", "router": "block_sparse_moe.router"}
_MIXER = {"experts": "mixer.experts", "router": "mixer.gate", "moe_norm": "norm"}
_BY_PLACE = "its sparse attention finds cached tokens by their place in the cache, which dropping would shift"
_FEED_FORWARD = {"experts": "feed_forward.experts"}

_IMAGE_FAMILIES = (
    _image(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration",
        Vision("model.visual", saliency_attention="model.visual.blocks.-1.attn"),
    ),
    _image(
        "deepseek_vl_v2", "vismmoe.models.deepseek_vl2:DeepseekVL2ForConditionalGeneration",
        Vision(
            "vision", saliency_attention="vision.encoder.layers.-1.self_attn", mask_input="images_seq_mask",
            saliency="vismmoe.models.deepseek_vl2.saliency:view_saliency",
        ),
        layers="language.model.layers", processor_class="vismmoe.models.deepseek_vl2:DeepseekVL2Processor",
    ),
    _image(
        "glm4v_moe", "Glm4vMoeForConditionalGeneration",
        Vision("model.visual", saliency_attention="model.visual.blocks.-1.attn"),
    ),
    _image(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",
        Vision("model.visual", saliency_attention="model.visual.blocks.-1.attn"),
    ),
    _image(
        "qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration",
        Vision("model.visual", saliency_attention="model.visual.blocks.-1.attn"),
    ),
    _image(
        "aria", "AriaForConditionalGeneration", Vision("model.vision_tower", "image_token_index"),
        router="mlp.router",
    ),
    _image("deepseek_ocr2", "DeepseekOcr2ForConditionalGeneration", Vision("model.vision_tower")),
    _image("dots3_note", "Dots3NoteForConditionalGeneration", Vision("model.vision_tower", keeps_all=_BY_PLACE)),
    _image(
        "gemma4", "Gemma4ForConditionalGeneration", Vision("model.vision_tower"),
        experts="experts", router="router", moe_norm=None,
    ),
    _image("glm5_next", "Glm5NextForConditionalGeneration", Vision("model.visual", keeps_all=_BY_PLACE)),
    _image("hy_v4_vl", "HYV4VLForConditionalGeneration", Vision("model.vision_tower", row_ends=1, keeps_all=_BY_PLACE)),
    _image("kimi_k25", "Kimi_K25ForConditionalGeneration", Vision("model.vision_tower")),
    _image(
        "minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration",
        Vision("model.vision_tower", "image_token_index", keeps_all=_BY_PLACE),
    ),
    _image(
        "mistral_large4", "MistralLarge4ForConditionalGeneration",
        Vision("model.vision_tower", "image_token_index", keeps_all=_BY_PLACE),
    ),
    _image(
        "muse_spark", "MuseSparkForConditionalGeneration", Vision("model.vision_tower"),
        moe_norm="pre_feedforward_layernorm",
    ),
    _image(
        "nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", Vision("vision_model"),
        layers="language_model.model.layers", **_MIXER,
    ),
    _image(
        "qwen4_exp", "Qwen4ExpForConditionalGeneration",
        Vision("model.visual", saliency_attention="model.visual.blocks.-1.attn", keeps_all=_BY_PLACE),
    ),
    _image(
        "unlimited_ocr", "UnlimitedOcrForConditionalGeneration",
        Vision(
            "model.vision_tower", list_inputs=("num_local_patches", "patches_grid"),
            keeps_all="its cache takes it that every layer has seen the whole prompt",
        ),
    ),
)  # fmt: skip

_TEXT_FAMILIES = (
    _text("afmoe", "AfmoeForCausalLM", router="mlp.router.gate", moe_norm="pre_mlp_layernorm"),
    _text("aria_text", "AriaTextForCausalLM", router="mlp.router"),
    _text("axk1", "AXK1ForCausalLM"),
    _text("axk2", "AXK2ForCausalLM"),
    _text("bailing_hybrid", "BailingHybridForCausalLM"),
    _text("beam", "BeamForCausalLM", moe_norm="pre_feedforward_layernorm"),
    _text("cohere2_moe", "Cohere2MoeForCausalLM", moe_norm="input_layernorm"),
    _text("deepseek_v2", "DeepseekV2ForCausalLM"),
    _text("deepseek_v3", "DeepseekV3ForCausalLM"),
    _text("deepseek_v32", "DeepseekV32ForCausalLM"),
    _text("deepseek_v4", "DeepseekV4ForCausalLM"),
    _text("dots1", "Dots1ForCausalLM"),
    _text("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    _text("exaone_moe", "ExaoneMoeForCausalLM"),
    _text("flex_olmo", "FlexOlmoForCausalLM", moe_norm=None),
    _text("flint", "FlintForCausalLM"),
    _text("gemma4_text", "Gemma4ForCausalLM", experts="experts", router="router", moe_norm=None),
    _text("glm4_moe", "Glm4MoeForCausalLM"),
    _text("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    _text("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    _text("gpt_oss", "GptOssForCausalLM", router="mlp.router"),
    _text("granitemoe", "GraniteMoeForCausalLM", **_SPARSE_BLOCK),
    _text("granitemoe_swa", "GraniteMoeSWAForCausalLM", **_SPARSE_BLOCK),
    _text("granitemoehybrid", "GraniteMoeHybridForCausalLM", **_SPARSE_BLOCK),
    _text("granitemoeshared", "GraniteMoeSharedForCausalLM", **_SPARSE_BLOCK),
    _text("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", router="mlp.gate.wg"),
    _text("hy_v3", "HYV3ForCausalLM"),
    _text("hy_v4", "HYV4ForCausalLM"),
    _text("jamba", "JambaForCausalLM", router="feed_forward.router", moe_norm="pre_ff_layernorm", **_FEED_FORWARD),
    _text("kimi_linear", "KimiLinearForCausalLM"),
    _text("kolibri1", "Kolibri1ForCausalLM"),
    _text("laguna", "LagunaForCausalLM"),
    _text("lara_mini", "LaraMiniForCausalLM"),
    _text("lfm2_moe", "Lfm2MoeForCausalLM", router="feed_forward.gate", moe_norm="ffn_norm", **_FEED_FORWARD),
    _text("mellum", "MellumForCausalLM"),
    _text("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
    _text("minimax_m2", "MiniMaxM2ForCausalLM"),
    _text("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"),
    _text("mistral4", "Mistral4ForCausalLM"),
    _text("mixtral", "MixtralForCausalLM"),
    _text("nemotron_h", "NemotronHForCausalLM", **_MIXER),
    _text("olmoe", "OlmoeForCausalLM"),
    _text("phimoe", "PhimoeForCausalLM", router="mlp.router"),
    _text("qwen2_moe", "Qwen2MoeForCausalLM"),
    _text("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    _text("qwen3_moe", "Qwen3MoeForCausalLM"),
    _text("qwen3_next", "Qwen3NextForCausalLM"),
    _text("sarvam_mla", "DeepseekV3ForCausalLM"),
    _text("sarvam_moe", "Glm4MoeForCausalLM"),
    _text("solar_open", "SolarOpenForCausalLM"),
    _text("zaya", "ZayaForCausalLM", moe_norm=None),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (*_IMAGE_FAMILIES, *_TEXT_FAMILIES)}


REFUSED: Mapping[str, str] = {
    "diffusion_gemma": "it answers by diffusion over blocks, not token by token",
    "ernie4_5_vl_moe": "text and visual tokens have experts of their own and different sizes in one layer",
    "inkling2": "its published experts have interleaved rows, which are not plain byte ranges",
    "inkling2_loop": "its published experts are quantised",
    "inkling_mm_model": "its published experts have interleaved rows, which are not plain byte ranges",
    "llama4": "its experts weight the tokens before the matrix products and do not use transformers' experts interface",
    "longcat_flash": "its experts include such that do nothing, outside transformers' experts interface",
    "minimax": "it brings a key-value cache of its own, which the engine does not allocate",
    "openai_privacy_filter": "it labels tokens and does not answer",
    "qwen3_omni_moe": "it speaks and listens; only text and images are run",
}


def family_of(model_type: object) -> Family:
    """The family's entry, or CheckpointError that says why it is refused, or which families run."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None and isinstance(model_type, str) and model_type in REFUSED:
        raise CheckpointError(f"model_type {model_type!r} is not run: {REFUSED[model_type]}")
    if family is None:
        raise CheckpointError(
            f"model_type {model_type!r} is not built yet; this version runs {', '.join(sorted(FAMILIES))}"
        )
    return family


def check_compression(family: Family, compressor: Compressor, keep_ratio: float) -> None:
    """UsageError where visual tokens of the family cannot be dropped, or not by this compressor."""
    if keep_ratio == 1 or family.vision is None:
        return
    drops = compressor.count(MANY, keep_ratio) < MANY
    if drops and family.vision.keeps_all is not None:
        raise UsageError(
            f"no visual token of {family.model_type} can be dropped: {family.vision.keeps_all}; "
            "leave the keep ratio at 1, or use the compressor 'downsample'"
        )
    if compressor.needs_saliency and family.vision.saliency_attention is None:
        raise UsageError(
            f"the vision tower of {family.model_type} does not tell what it attends to, which the compressor "
            f"{compressor.name!r} asks for: use uniform, random or downsample"
        )


def default_prefix_layers(family: Family, moe_layers: int) -> int:
    """MoE layers at the front that see all visual tokens: the published 10 of 48, a quarter of a shallower model."""
    return max(1, min(family.default_prefix_layers, moe_layers // 4))

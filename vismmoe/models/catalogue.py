"""What differs between model families: names of things, nothing that runs.

Every family keeps its routed experts in packed parameters behind transformers' experts interface; an entry says where.
A family that is not listed is refused by name; adding one means adding one entry, which the matrix test then tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vismmoe.errors import CheckpointError

PUBLISHED_PREFIX_LAYERS = 10  # of 48 (VisMMoE §4.3)


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


@dataclass(frozen=True)
class Family:
    """Where a family keeps what the runtime touches. Paths are module paths from the model's top."""

    model_type: str  # of config.json
    model_class: str  # attribute of transformers, or "module:attribute" for a class of this project
    layers: str = "model.layers"  # list of decoder layers; the module that holds it is the decoder
    experts: str = "mlp.experts"  # within a decoder layer that has routed experts
    router: str = "mlp.gate"  # within a decoder layer; its weight is (E, H)
    moe_norm: str = "post_attention_layernorm"  # within a decoder layer: the norm whose output is the MoE input
    vision: Vision | None = None  # None: text only
    processor_class: str | None = None  # "module:attribute"; None: what AutoProcessor finds
    default_prefix_layers: int = PUBLISHED_PREFIX_LAYERS

    @property
    def decoder(self) -> str:
        """The text model: receives inputs_embeds and the visual masks."""
        return self.layers.rpartition(".")[0]


def _text(model_type: str, model_class: str, **differences: str) -> Family:
    return Family(model_type, model_class, **differences)  # type: ignore[arg-type]


def _image(model_type: str, model_class: str, vision: Vision, **differences: str) -> Family:
    return Family(model_type, model_class, vision=vision, **{"layers": "model.language_model.layers", **differences})  # type: ignore[arg-type]


_ENTRIES = (
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
    _text("mixtral", "MixtralForCausalLM"),
    _text("olmoe", "OlmoeForCausalLM"),
    _text("qwen2_moe", "Qwen2MoeForCausalLM"),
    _text("qwen3_moe", "Qwen3MoeForCausalLM"),
    _text("gpt_oss", "GptOssForCausalLM", router="mlp.router"),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ENTRIES}


def family_of(model_type: object) -> Family:
    """The family's entry, or CheckpointError that says which families run."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise CheckpointError(
            f"model_type {model_type!r} is not built yet; this version runs {', '.join(sorted(FAMILIES))}"
        )
    return family


def default_prefix_layers(family: Family, moe_layers: int) -> int:
    """MoE layers at the front that see all visual tokens: the published 10 of 48, a quarter of a shallower model."""
    return max(1, min(family.default_prefix_layers, moe_layers // 4))

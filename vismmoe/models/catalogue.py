"""What differs between model families: names of things, nothing that runs.

A family that is not listed is refused by name; adding one means adding one entry and its tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vismmoe.errors import CheckpointError


@dataclass(frozen=True)
class Family:
    """Where a family keeps what the runtime touches. Paths are module paths from the model's top."""

    model_type: str  # of config.json
    model_class: str  # attribute of transformers
    decoder: str  # text model: receives inputs_embeds and the visual masks
    layers: str  # list of decoder layers
    vision: str  # vision tower
    vision_blocks: str
    experts: str  # within a decoder layer that has routed experts
    router: str  # within a decoder layer; its weight is (E, H)
    moe_norm: str  # within a decoder layer: the norm whose output is the MoE input
    expert_parts: tuple[str, ...]  # packed parameters of `experts`, in slab order
    saliency_block: int  # vision block whose attention tells saliency
    visual_token_key: str  # config key of the placeholder token's id
    default_prefix_layers: int  # published depth of the prefix for the published model size


FAMILIES: Mapping[str, Family] = {
    "qwen3_vl_moe": Family(
        model_type="qwen3_vl_moe",
        model_class="Qwen3VLMoeForConditionalGeneration",
        decoder="model.language_model",
        layers="model.language_model.layers",
        vision="model.visual",
        vision_blocks="model.visual.blocks",
        experts="mlp.experts",
        router="mlp.gate",
        moe_norm="post_attention_layernorm",
        expert_parts=("gate_up_proj", "down_proj"),
        saliency_block=-1,
        visual_token_key="image_token_id",
        default_prefix_layers=10,
    ),
}


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

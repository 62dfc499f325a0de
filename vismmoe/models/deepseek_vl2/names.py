"""From the published checkpoints' names to the modules here: SigLIP as timm names it, one linear per expert."""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    SplitModulelist,
    WeightConverter,
    WeightRenaming,
)

_VISION = (
    (r"^blocks\.", "encoder.layers."),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"\.norm1\.", ".layer_norm1."),
    (r"\.norm2\.", ".layer_norm2."),
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
)
UNUSED = (r"^vision\.attn_pool\.",)  # in the checkpoint, read by nobody


def tower_transforms() -> list[Any]:
    """transformers' rules, for loading and turned round for saving, of names below `vision.`"""
    return [
        *(WeightRenaming(source, target) for source, target in _VISION),
        WeightConverter("pos_embed", "embeddings.position_embedding.weight", [SplitModulelist(dim=0)]),
        WeightConverter(".attn.qkv", [".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"], [Chunk(dim=0)]),
    ]


def expert_transforms() -> list[Any]:
    """The same for one linear an expert, gate and up apart."""
    return [
        WeightConverter(
            ["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            "mlp.experts.gate_up_proj",
            [MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter("mlp.experts.*.down_proj.weight", "mlp.experts.down_proj", [MergeModulelist(dim=0)]),
    ]

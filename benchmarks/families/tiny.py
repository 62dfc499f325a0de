"""Tiny checkpoints of every family, with random weights, written as transformers publishes them.

The sizes below are given to whatever key of a family's default config bears the name; DIFFERENCES holds what a family
needs beyond that. `save_pretrained` turns transformers' own conversion around, so that the files have the layout of
the published checkpoints: one linear an expert here, packed and transposed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from differences import DIFFERENCES
from processors import processor, tokenizer
from torch import nn

from vismmoe.models.catalogue import Family
from vismmoe.models.skeleton import named_class

LAYERS, EXPERTS, TOP_K, VOCABULARY = 4, 8, 2, 300
SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY,
    "num_experts": EXPERTS, "n_routed_experts": EXPERTS, "num_local_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "num_experts_per_token": TOP_K, "moe_topk": TOP_K, "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "max_position_embeddings": 2048, "sliding_window": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "depth": 2, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32, "num_position_embeddings": 64,
    "pad_token_id": 256, "bos_token_id": 256, "eos_token_id": 258,
}  # fmt: skip


def tiny_config(family: Family) -> Any:
    """The family's default config in small."""
    from transformers import CONFIG_MAPPING

    kind = named_class(family.model_class).config_class or CONFIG_MAPPING[family.model_type]
    shrunk = _shrink(kind().to_dict())
    return kind.from_dict(_merge(shrunk, DIFFERENCES.get(family.model_type, {})))


def build(family: Family, folder: Path) -> Path:
    """Write the family's tiny checkpoint, with tokenizer or processor, into `folder`."""
    torch.manual_seed(0)
    model = named_class(family.model_class)(tiny_config(family)).eval()
    enliven(model, family)
    model.generation_config.eos_token_id = None  # answers run to their full length
    model.save_pretrained(folder)
    (tokenizer() if family.vision is None else processor(family, model.config)).save_pretrained(folder)
    return folder


def enliven(model: nn.Module, family: Family) -> None:
    """Weights larger than the usual 0.02: routers must choose and answers must vary."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:
                value.normal_(0, 0.6 if name.endswith(f"{family.router}.weight") else 1.0 / value.shape[-1] ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                value.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                value.normal_(0, 0.1)


def _shrink(config: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in config.items():
        if key == "per_layer_config":  # of layers that are not there any more
            out[key] = {}
        elif isinstance(value, dict) and key.endswith("config"):
            out[key] = _shrink(value)
        elif key in SIZES and value is not None:
            out[key] = SIZES[key]
        elif isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            out[key] = value[:LAYERS]
        else:
            out[key] = value
    return out


def _merge(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = _merge(inner, value) if isinstance(value, Mapping) and isinstance(inner, dict) else value
    return merged

"""What a tiny model of a family needs beyond the common sizes of tiny.py: lists of one entry a layer, and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
DIFFERENCES: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "deepseek_v32": {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "deepseek_v4": {"index_n_heads": 2, "index_head_dim": 8, "o_groups": 2, "o_lora_rank": 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm_moe_dsa": {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "granitemoehybrid": {
        "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_chunk_size": 16,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 8, "moe_topk": 2, "num_key_value_heads": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "laguna": {"num_attention_heads_per_layer": [4, 4, 4, 4]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1,
        "rope_parameters": _ROPE,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip

"""What a tiny model of a family needs beyond the common sizes of tiny.py: lists of one entry a layer, and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_LATENT = {"num_key_value_heads": 4}  # multi-head latent attention has as many heads in the cache as queries
_MIXED = ["linear_attention", "full_attention"] * 2
_WITH_IMAGES = {
    "image_token_id": 261, "video_token_id": 262, "vision_start_token_id": 259, "vision_end_token_id": 260,
    "image_start_token_id": 259, "image_end_token_id": 260, "video_start_token_id": 259, "video_end_token_id": 260,
    "vision_config": {"deepstack_visual_indexes": [0], "image_size": 64, "hidden_size": 32, "intermediate_size": 48},
}  # fmt: skip
DIFFERENCES: Mapping[str, Mapping[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "deepseek_v4": {"index_n_heads": 2, "index_head_dim": 8, "o_groups": 2, "o_lora_rank": 8},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm4_moe_lite": _LATENT,
    "glm4v_moe": {
        **_WITH_IMAGES,
        "text_config": {
            "head_dim": 16,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    },
    "glm_moe_dsa": {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "granitemoehybrid": {
        "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_chunk_size": 16,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
    },
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 8, "moe_topk": 2, "num_key_value_heads": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    "kimi_linear": {**_LATENT, "layer_types": _MIXED, "linear_head_dim": 8, "linear_num_heads": 2},
    "laguna": {"num_attention_heads_per_layer": [4, 4, 4, 4]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1,
        "rope_parameters": _ROPE,
    },
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    "qwen3_5_moe": {**_WITH_IMAGES, "text_config": {"layer_types": _MIXED, "rope_parameters": _SECTIONS}},
    "qwen3_vl_moe": {**_WITH_IMAGES, "text_config": {"rope_parameters": _SECTIONS}},
    "sarvam_mla": _LATENT,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip

"""What a tiny model of a family needs beyond the common sizes of tiny.py: lists of one entry a layer, and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from processors import FIRST_MORE, IMAGE_TOKEN, VIDEO_TOKEN

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_LATENT = {"num_key_value_heads": 4}  # multi-head latent attention has as many heads in the cache as queries
_INDEXED = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64}
_WINDOWED = ("indexed_attention", "sliding_attention")
_WIDER = {"head_dim": 16}
_SAM = {
    "patch_size": 16, "num_hidden_layers": 2, "global_attn_indexes": [], "downsample_channels": [32, 32], "mlp_dim": 48,
    "output_channels": 32,
}  # fmt: skip
_GEMMA = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24,
    "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "per_layer_config": {1: _WIDER, 3: _WIDER},
}  # fmt: skip
_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
_MIXED = ["linear_attention", "full_attention"] * 2
_WITH_IMAGES = {
    "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": 259, "vision_end_token_id": 260,
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
    "nemotron_h": _MAMBA,
    "qwen3_5_moe": {**_WITH_IMAGES, "text_config": {"layer_types": _MIXED, "rope_parameters": _SECTIONS}},
    "aria": {
        "image_token_index": IMAGE_TOKEN, "projector_patch_to_query_dict": {49: 16},
        "vision_config": {"image_size": 980, "patch_size": 140},  # its processor knows pictures of 980 pixels only
    },
    "deepseek_ocr2": {
        "image_token_id": IMAGE_TOKEN,
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {"sam_config": {**_SAM, "image_size": 768}},
    },
    "unlimited_ocr": {
        "image_token_id": IMAGE_TOKEN, "text_config": {"sliding_window": 2},
        "vision_config": {"sam_config": {**_SAM, "image_size": 128}, "encoder_config": {"image_size": 28}},
    },
    "bailing_hybrid": {**_LATENT, "layer_types": _MIXED, "num_expert_group": 1, "head_dim": 16},
    "gemma4_text": _GEMMA,
    "mistral4": {**_LATENT, "head_dim": 16},
    "gemma4": {
        "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "boi_token_id": 259, "eoi_token_id": 260,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64,
        },
        "text_config": {**_GEMMA, "use_bidirectional_attention": "vision"},
    },
    "dots3_note": {
        "image_token_id": FIRST_MORE, "video_token_id": VIDEO_TOKEN, "audio_token_id": FIRST_MORE + 1,
        "text_config": {
            **_INDEXED, **_LATENT, "head_dim": 16, "shared_experts_intermediate_size": 24,
            "layer_types": list(_WINDOWED * 2),
            "rope_parameters": {name: {**_ROPE, "partial_rotary_factor": 0.5} for name in _WINDOWED},
            "per_layer_config": {1: {"kv_lora_rank": 24}, 3: {"kv_lora_rank": 24}},
        },
        "vision_config": {
            "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 32, "adapter_out_dim": 32,
            "head_dim": 8,
        },
        "audio_config": {
            "num_hidden_layers": 1, "downsample_hidden_size": 8, "adapter_input_size": 32, "adapter_out_dim": 32,
            "conv_output_size": 128, "num_key_value_heads": 4,
        },
    },
    "nemotron_h_omni": {
        "image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, "projector_hidden_size": 48,
        "vision_hidden_size": 32, "vision_config": {"max_img_size": 64, "num_hidden_layers": 2, "mlp_ratio": 1.5},
        "text_config": {
            **_MAMBA, "layers_block_type": ["linear_attention", "moe"] + ["full_attention", "moe"] * 2,
        },
    },
    "glm5_next": {
        **_WITH_IMAGES, "video_start_token_id": FIRST_MORE, "video_end_token_id": FIRST_MORE + 1,
        "text_config": {
            **_INDEXED, "num_key_value_heads": 4, "qk_rope_head_dim": 0, "index_kpool": 4,
            "layer_types": ["linear_attention", "indexed_attention"] * 2, "linear_head_dim": 8, "linear_num_heads": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        "vision_config": {"projection_intermediate_size": 48},
    },
    "hy_v4_vl": {
        **_WITH_IMAGES, "text_config": {**_INDEXED, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
        "vision_config": {"max_image_size": 64},
    },
    "mistral_large4": {
        "image_token_index": IMAGE_TOKEN, "vision_config": {"image_size": 64},
        "text_config": {**_INDEXED, "num_key_value_heads": 4},
    },
    "qwen4_exp": {
        **_WITH_IMAGES,
        "text_config": {
            "layer_types": ["linear_attention", "indexed_attention"] * 2, "rope_parameters": _SECTIONS,
            "hc_lowrank": 16, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
            "indexer_budget": 64, "indexer_compress_ratio": 4,
        },
    },
    "kimi_k25": {
        **_WITH_IMAGES, "text_config": _LATENT, "projection_hidden_size": 32,
        "vision_config": {"pos_emb_height": 8, "pos_emb_width": 8},
    },
    "minimax_m3_vl": {
        "image_token_index": FIRST_MORE, "video_token_index": FIRST_MORE + 1, "vision_config": {"image_size": 64},
        "text_config": {"dense_intermediate_size": 48, "shared_intermediate_size": 24},
        "projection_dim": 32, "projector_hidden_size": 32,
    },
    "muse_spark": {
        **_WITH_IMAGES, "out_hidden_size": 128, "projector_hidden_size": 48,
        "vision_config": {"layer_types": ["window_attention", "full_attention"] * 2},
        "text_config": {
            "moe_hidden_size": 48, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "layer_rope_theta": [10000.0, 0] * 2,
        },
        "audio_config": {"hidden_sizes": [8, 8, 8, 16], "depths": [1, 1, 1, 1]},
    },
    "qwen3_omni_moe_thinker": {
        **_WITH_IMAGES, "text_config": {"rope_parameters": _SECTIONS},
        "audio_config": {
            "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "output_dim": 32,
            "downsample_hidden_size": 32,
        },
    },
    "qwen3_vl_moe": {**_WITH_IMAGES, "text_config": {"rope_parameters": _SECTIONS}},
    "sarvam_mla": _LATENT,
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip

"""The planned cache is what transformers holds after an answer, for each kind of layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from vismmoe.models.cache_bytes import cache_bytes

TOKENS, WINDOW = 40, 16
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}  # fmt: skip
WINDOWS = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("qwen3_moe", {}),
        ("qwen3_next", LINEAR),
        ("gpt_oss", WINDOWS),
        ("deepseek_v3", LATENT),
        ("lfm2_moe", {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    ],
)
def test_the_planned_cache_is_what_is_held_at_the_end(model_type: str, own: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **(SMALL | EXPERTS | own))
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model(input_ids=torch.ones(1, TOKENS, dtype=torch.int64), past_key_values=cache)
    planned = cache_bytes(config, itemsize=4)
    assert held(cache) <= planned.of(TOKENS) <= held(cache) * 1.05
    longer = planned.of(2 * TOKENS) - planned.of(TOKENS)
    assert longer == planned.per_token * TOKENS  # neither windows nor states grow


def held(cache: Any) -> int:
    """Bytes of all tensors of the cache."""
    found = 0
    for layer in cache.layers:
        states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
        tensors = [getattr(layer, "keys", None), getattr(layer, "values", None), *states]
        found += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return found

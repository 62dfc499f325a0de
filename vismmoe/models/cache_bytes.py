"""How many bytes a request's cache takes: arithmetic on the config, layer by layer as transformers caches it.

Attention over everything grows with each token, a sliding window up to its width, a running state not at all. Of
multi-head latent attention the latent and the one rotated key are cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

_STATE_BYTES = 4  # running states are float32, whatever the model is


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of one request, all layers together."""

    per_token: int  # of layers that keep every token
    per_window_token: int  # of layers that keep the last `window_tokens`
    window_tokens: int
    constant: int

    def of(self, tokens: int) -> int:
        """Bytes of a request of so many tokens."""
        return self.per_token * tokens + self.per_window_token * min(tokens, self.window_tokens) + self.constant


@dataclass(frozen=True)
class Heads:
    """Attention heads and their widths, whatever the config calls them."""

    query: int
    cached: int
    key_width: int
    value_width: int


def heads_of(text: Any) -> Heads:
    """text: the decoder's config."""
    query = int(known(text, "num_attention_heads") or 1)
    width = int(known(text, "head_dim") or text.hidden_size // query)
    latent = known(text, "kv_lora_rank")  # multi-head latent attention expands to these
    key = int(known(text, "qk_nope_head_dim") or 0) + int(known(text, "qk_rope_head_dim") or 0) if latent else width
    return Heads(
        query=query,
        cached=query if latent else int(known(text, "num_key_value_heads") or query),
        key_width=key or width,
        value_width=int(known(text, "v_head_dim") or width) if latent else width,
    )


def cache_bytes(config: Any, itemsize: int) -> CacheBytes:
    """config: the model's; itemsize: bytes of one number of the arithmetic."""
    text = config.get_text_config(decoder=True)
    token = _token_values(text) * itemsize
    layers = DynamicCache(config=config).layers
    windows = [int(layer.sliding_window) for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)]
    states = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    only_states = [layer for layer in states if not isinstance(layer, LinearAttentionAndFullAttentionLayer)]
    empty = sum(isinstance(layer, DummyLayer) for layer in layers)
    return CacheBytes(
        per_token=token * (len(layers) - len(windows) - len(only_states) - empty),
        per_window_token=token * len(windows),
        window_tokens=max(windows, default=0),
        constant=len(states) * _state_values(text) * _STATE_BYTES,
    )


def _token_values(text: Any) -> int:
    """Numbers that a layer of attention keeps of one token."""
    heads = heads_of(text)
    if latent := known(text, "kv_lora_rank"):
        index = int(known(text, "index_head_dim") or 0)  # keys by which a layer looks up what it attends to
        return int(latent) + int(known(text, "qk_rope_head_dim") or 0) + index
    return heads.cached * (heads.key_width + heads.value_width)


def _state_values(text: Any) -> int:
    """Numbers of a layer's running state, the last inputs of its convolution included."""
    kernel = int(known(text, "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache") or 4)
    hidden = int(text.hidden_size)
    if values := known(text, "linear_num_value_heads"):  # gated delta rule
        keys, key, value = text.linear_num_key_heads, text.linear_key_head_dim, text.linear_value_head_dim
        return int((2 * keys * key + values * value) * kernel + values * key * value)
    if count := known(text, "linear_num_heads"):
        width = text.linear_head_dim
        return int(3 * count * width * kernel + count * width**2)
    inner = hidden * int(known(text, "mamba_expand", "expand") or 1)
    if state := known(text, "mamba_d_state", "ssm_state_size"):
        grouped = known(text, "mamba_n_heads", "mamba_num_heads") is not None  # the second kind keeps its input's state
        beside = 2 * int(known(text, "mamba_n_groups", "n_groups") or 1) * state if grouped else 0
        count, width = known(text, "mamba_n_heads", "mamba_num_heads"), known(text, "mamba_d_head", "mamba_head_dim")
        inner = int(count * width) if grouped and isinstance(width, int) else inner
        return int((inner + beside) * kernel + inner * state)
    return hidden * kernel  # a convolution alone


def known(config: Any, *names: str) -> Any:
    """The first of the config's values that is set."""
    return next((value for name in names if (value := _value(config, name)) is not None), None)


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers does not tell what differs between layers: the largest is planned for
        return max(getattr(layer, name) for layer in config.per_layer_config)

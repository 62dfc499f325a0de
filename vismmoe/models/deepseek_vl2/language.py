"""The language model: DeepSeek-V3's layers with the gate and the attention that the release asks for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3MLP,
    DeepseekV3Model,
    DeepseekV3MoE,
    DeepseekV3PreTrainedModel,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from vismmoe.models.deepseek_vl2.config import DeepseekVL2TextConfig


class SoftmaxRouter(DeepseekV2TopkRouter):  # type: ignore[misc]
    """Greedy top-k of softmax probabilities (tiny, small), renormalised where the config says so."""

    def __init__(self, config: DeepseekVL2TextConfig) -> None:
        super().__init__(config)
        self.norm_topk_prob = bool(config.norm_topk_prob) and self.top_k > 1

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(..., H) -> logits (T, E), weights (T, k), indices (T, k)."""
        logits, weights, indices = super().forward(hidden_states)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True) * self.routed_scaling_factor
        return logits, weights, indices


class Experts(DeepseekV3MoE):  # type: ignore[misc]
    """Routed experts behind transformers' interface, beside the shared ones, which every token goes through."""

    def __init__(self, config: DeepseekVL2TextConfig) -> None:
        super().__init__(config)
        if config.scoring_func == "softmax":
            self.gate = SoftmaxRouter(config)


class HeadOutput(nn.Linear):
    """Linear over heads of `width` numbers, of which it may be given wider, padded ones."""

    def __init__(self, heads: int, width: int, hidden: int, bias: bool) -> None:
        super().__init__(heads * width, hidden, bias=bias)
        self.heads, self.width = heads, width

    def forward(self, values: Tensor) -> Tensor:
        """(..., heads * padded width) -> (..., H)."""
        heads = values.reshape(*values.shape[:-1], self.heads, -1)
        return super().forward(heads[..., : self.width].flatten(-2))


class LatentAttention(DeepseekV3Attention):  # type: ignore[misc]
    """Values are padded to the keys' width: torch's blockwise kernels want one width, and without them all heads'
    scores of all token pairs are held at once (0.7 GiB for 1,450 tokens of base)."""

    def __init__(self, config: DeepseekVL2TextConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.o_proj = HeadOutput(self.num_heads, self.v_head_dim, config.hidden_size, bool(config.attention_bias))

    def expand_kv(self, *latents: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().expand_kv(*latents)
        return keys, functional.pad(values, (0, max(0, keys.shape[-1] - values.shape[-1])))


class DecoderLayer(DeepseekV3DecoderLayer):  # type: ignore[misc]
    """Latent attention (small, base) or Llama's (tiny), then experts or one dense MLP."""

    def __init__(self, config: DeepseekVL2TextConfig, layer: int) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = (LatentAttention if config.use_mla else LlamaAttention)(config, layer)
        self.mlp = Experts(config) if config.is_moe_layer(layer) else DeepseekV3MLP(config)
        self.input_layernorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DeepseekVL2TextModel(DeepseekV3Model):  # type: ignore[misc]
    """Embeddings to the last norm's output; its forward is DeepSeek-V3's."""

    config_class = DeepseekVL2TextConfig

    def __init__(self, config: DeepseekVL2TextConfig) -> None:
        DeepseekV3PreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DeepseekV3RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for the decorator in a class's own file; the experts here are its own."""
        return True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SoftmaxRouter):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)


class Language(nn.Module):
    """What the checkpoint calls `language`: the model and its head."""

    def __init__(self, config: DeepseekVL2TextConfig) -> None:
        super().__init__()
        self.model: Any = DeepseekVL2TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

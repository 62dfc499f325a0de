"""How large the reference model is, and how its parts are built and saved."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessor,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from vismmoe_training.reference.tokenizer import CHAT_TEMPLATE, special_id


@dataclass(frozen=True)
class ReferenceShape:
    """Sizes of the model. One visual token shows `patch_px * merge` pixels a side."""

    layers: int = 10
    hidden_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 128
    top_k: int = 8
    expert_width: int = 32
    vision_layers: int = 4
    vision_hidden: int = 96
    vision_heads: int = 4
    vision_width: int = 288
    vision_positions: int = 256
    deepstack_layers: tuple[int, ...] = (1, 2)
    patch_px: int = 8
    merge: int = 2
    max_side_tokens: int = 64  # larger pictures are scaled down to this many visual tokens squared

    @property
    def token_px(self) -> int:
        """Pixels a side that one visual token shows."""
        return self.patch_px * self.merge


def build_config(shape: ReferenceShape, tokenizer: PreTrainedTokenizerBase) -> Qwen3VLMoeConfig:
    """The transformers config of this shape, with the ids of the tokenizer's special tokens."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden_size,
        "intermediate_size": 4 * shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.expert_width,
        "max_position_embeddings": 8192,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": special_id(tokenizer, "<|im_end|>"),
        "pad_token_id": special_id(tokenizer, "<|endoftext|>"),
    }
    vision = {
        "depth": shape.vision_layers,
        "hidden_size": shape.vision_hidden,
        "intermediate_size": shape.vision_width,
        "num_heads": shape.vision_heads,
        "patch_size": shape.patch_px,
        "spatial_merge_size": shape.merge,
        "out_hidden_size": shape.hidden_size,
        "num_position_embeddings": shape.vision_positions,
        "deepstack_visual_indexes": list(shape.deepstack_layers),
    }
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{key}_token_id": special_id(tokenizer, f"<|{name}|>") for key, name in names.items()}
    return Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)


def build_model(config: Qwen3VLMoeConfig, seed: int) -> Qwen3VLMoeForConditionalGeneration:
    """A float32 model with weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = Qwen3VLMoeForConditionalGeneration(config).float()
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: Qwen3VLMoeForConditionalGeneration) -> None:
    """Draw the weights for a width of a hundred, not of thousands: the library's 0.02 starves so narrow a model."""
    text = model.model.language_model
    nn.init.normal_(text.embed_tokens.weight, std=1 / math.sqrt(text.config.hidden_size))  # length one
    for layer in text.layers:
        _initialise_attention(layer.self_attn)
        fan_in = 1 / math.sqrt(text.config.hidden_size)
        nn.init.normal_(layer.mlp.experts.gate_up_proj, std=fan_in)
        nn.init.normal_(layer.mlp.experts.down_proj, std=0.5 * fan_in)
        nn.init.normal_(layer.mlp.gate.weight, std=0.5 * fan_in)
    _initialise_vision(model)


def _initialise_attention(attention: Any) -> None:
    """Mimetic initialisation (Trockman and Kolter, 2023): like looks at like, and what is seen is copied.

    Queries start as the keys of their group, so that a word attends to what resembles it; output times value starts
    near a multiple of the identity. Visual embeddings lie in the words' own space (see `vision`): a question's "circle"
    finds the circle from the first step on.
    """
    hidden, head_dim = attention.q_proj.in_features, attention.head_dim
    for linear in (attention.k_proj, attention.v_proj):
        nn.init.normal_(linear.weight, std=1 / math.sqrt(hidden))
    groups, shape = attention.num_key_value_groups, (-1, head_dim, hidden)
    keys, values = (
        linear.weight.view(shape).repeat_interleave(groups, dim=0).reshape(-1, hidden)
        for linear in (attention.k_proj, attention.v_proj)
    )
    noise = torch.randn_like(keys) / math.sqrt(hidden)
    attention.q_proj.weight.copy_(0.9 * keys + 0.4 * noise)
    # Small: what writes into the residual stream leaves it almost as it was, so that the next router sees most of it.
    attention.o_proj.weight.copy_(0.25 * (0.8 * values + 0.6 * torch.randn_like(values) / math.sqrt(hidden)).t())


def _initialise_vision(model: Qwen3VLMoeForConditionalGeneration) -> None:
    for name, module in model.model.visual.named_modules():
        if isinstance(module, nn.Linear):
            writes_residual = name.endswith(("attn.proj", "mlp.linear_fc2"))
            nn.init.normal_(module.weight, std=(0.4 if writes_residual else 1.0) / math.sqrt(module.in_features))
    patch = model.model.visual.patch_embed.proj.weight
    nn.init.normal_(patch, std=1 / math.sqrt(patch[0].numel() / 2))  # both frames of a still show the same
    nn.init.normal_(model.model.visual.pos_embed.weight, std=0.3)


def build_processor(shape: ReferenceShape, tokenizer: PreTrainedTokenizerBase) -> Qwen3VLProcessor:
    """Qwen3-VL's own processor with this model's patch size and picture limits."""
    factor = shape.token_px
    size = {"shortest_edge": factor * factor * 4, "longest_edge": (factor * shape.max_side_tokens) ** 2 // 4}
    common = {
        "patch_size": shape.patch_px,
        "merge_size": shape.merge,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": size,
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**common),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**common),
        chat_template=CHAT_TEMPLATE,
    )


def save_reference(model: Qwen3VLMoeForConditionalGeneration, processor: Qwen3VLProcessor, folder: Path) -> None:
    """Write the published layout in bfloat16: packed, *transposed* experts, config, processor, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: _published(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(folder)
    text = config.text_config
    GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id).save_pretrained(folder)
    processor.save_pretrained(folder)


def _published(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Experts lie on the hub as (experts, in, out); transformers holds them as (experts, out, in)."""
    value = tensor.detach().to(torch.bfloat16)
    return (value.transpose(1, 2) if ".experts." in name else value).contiguous()

"""DeepSeek-VL2 base in its official layout at true width: loads, answers, and plan against peak.

    python benchmarks/families/true_shapes_deepseek.py

Writes a checkpoint of random weights with the published names and shapes (2 of 30 decoder layers, the whole vocabulary,
the whole vision tower, one linear an expert, 6 shards; about 4 GB), asks it about a picture in a process for each
budget, and deletes it. The text means nothing; names, shapes and bytes are what is tried. Exit status 1 when a peak
lies more than a tenth above its plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shards import measure, run_request, write_shards, write_tokenizer

from vismmoe.models.deepseek_vl2 import DeepseekVL2Config
from vismmoe.models.deepseek_vl2.config import RESOLUTIONS
from vismmoe.sizes import format_size

LAYERS, SHARDS = 2, 6
CONFIG: dict[str, Any] = {  # as released, but for the number of layers
    "candidate_resolutions": [list(pair) for pair in RESOLUTIONS],
    "global_view_pos": "head",
    "language_config": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "max_position_embeddings": 4096,
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 72,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_experts_per_tok": 6,
        "num_hidden_layers": LAYERS,
        "q_lora_rank": None,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "vocab_size": 129280,
    },
    "model_type": "deepseek_vl_v2",
    "projector_config": {"model_type": "mlp_projector", "n_embed": 2560},
    "tile_tag": "2D",
    "torch_dtype": "bfloat16",
    "vision_config": {
        "layers": 27,
        "mlp_ratio": 3.7362,
        "model_name": "siglip_so400m_patch14_384",
        "model_type": "vision",
        "patch_size": 14,
        "width": 1152,
    },
}
PROCESSOR = {
    "candidate_resolutions": CONFIG["candidate_resolutions"],
    "downsample_ratio": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_token": "<image>",
    "normalize": True,
    "patch_size": 14,
    "processor_class": "DeepseekVLV2Processor",
}
SPECIAL = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, "<｜▁pad▁｜>": 2, "<image>": 128815}
SPECIAL |= {"<|User|>": 128816, "<|Assistant|>": 128817}


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Official names with their shapes."""
    config = DeepseekVL2Config(**CONFIG)
    text, vision = config.text_config, config.vision_config
    hidden = text.hidden_size
    yield "image_newline", (hidden,)
    yield "view_seperator", (hidden,)
    yield "language.model.embed_tokens.weight", (text.vocab_size, hidden)
    yield "language.lm_head.weight", (text.vocab_size, hidden)
    yield "language.model.norm.weight", (hidden,)
    for layer in range(LAYERS):
        yield from _decoder_layer(text, layer)
    merged = vision.hidden_size * config.projector_config.downsample_ratio**2
    for name, side in (("0", merged), ("2", hidden)):
        yield f"projector.layers.{name}.weight", (hidden, side)
        yield f"projector.layers.{name}.bias", (hidden,)
    yield from _tower(vision)


def _decoder_layer(text: Any, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    at, hidden, heads, latent = f"language.model.layers.{layer}", text.hidden_size, text.num_attention_heads, 512
    nope, rope, value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
    yield f"{at}.input_layernorm.weight", (hidden,)
    yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield f"{at}.self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{at}.self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield f"{at}.self_attn.kv_a_layernorm.weight", (latent,)
    yield f"{at}.self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    yield f"{at}.self_attn.o_proj.weight", (hidden, heads * value)
    if not text.is_moe_layer(layer):
        yield from _mlp(f"{at}.mlp", hidden, text.intermediate_size)
        return
    yield f"{at}.mlp.gate.weight", (text.n_routed_experts, hidden)
    yield f"{at}.mlp.gate.e_score_correction_bias", (text.n_routed_experts,)
    yield from _mlp(f"{at}.mlp.shared_experts", hidden, text.n_shared_experts * text.moe_intermediate_size)
    for expert in range(text.n_routed_experts):
        yield from _mlp(f"{at}.mlp.experts.{expert}", hidden, text.moe_intermediate_size)


def _mlp(at: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (width, hidden)
    yield f"{at}.up_proj.weight", (width, hidden)
    yield f"{at}.down_proj.weight", (hidden, width)


def _tower(vision: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """timm's names; the pooling head is in the release too and read by nobody."""
    width, inner = vision.hidden_size, vision.intermediate_size
    yield "vision.pos_embed", (1, (vision.image_size // vision.patch_size) ** 2, width)
    yield from _affine("vision.patch_embed.proj", (width, 3, vision.patch_size, vision.patch_size))
    yield from _affine("vision.norm", (width,))
    for block in range(vision.num_hidden_layers):
        at = f"vision.blocks.{block}"
        yield from _affine(f"{at}.norm1", (width,))
        yield from _affine(f"{at}.attn.qkv", (3 * width, width))
        yield from _affine(f"{at}.attn.proj", (width, width))
        yield from _affine(f"{at}.norm2", (width,))
        yield from _affine(f"{at}.mlp.fc1", (inner, width))
        yield from _affine(f"{at}.mlp.fc2", (width, inner))
    yield "vision.attn_pool.latent", (1, 1, width)
    for name, shape in (
        ("q", (width, width)),
        ("kv", (2 * width, width)),
        ("proj", (width, width)),
        ("norm", (width,)),
    ):
        yield from _affine(f"vision.attn_pool.{name}", shape)
    yield from _affine("vision.attn_pool.mlp.fc1", (inner, width))
    yield from _affine("vision.attn_pool.mlp.fc2", (width, inner))


def _affine(at: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.weight", shape
    yield f"{at}.bias", shape[:1]


def write_checkpoint(folder: Path) -> None:
    listed = list(shapes())
    total = write_shards(listed, folder, SHARDS)
    print(f"{len(listed)} tensors in {SHARDS} shards, {format_size(total)}", file=sys.stderr)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    write_tokenizer(folder, CONFIG["language_config"]["vocab_size"], SPECIAL)
    bos, eos, pad, *_ = SPECIAL
    told = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def main() -> int:
    parser = argparse.ArgumentParser(description="DeepSeek-VL2 base at true width: plan against peak.")
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder; default: the system's")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(run_request(asked.row[0], float(asked.row[1]))))
        return 0
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="deepseek-vl2-") as folder:
        write_checkpoint(Path(folder))
        return measure(__file__, folder, f"DeepSeek-VL2 base, {LAYERS} layers, official layout, on the CPU")


if __name__ == "__main__":
    sys.exit(main())

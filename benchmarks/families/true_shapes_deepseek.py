"""DeepSeek-VL2 base in its official layout at true width: loads, answers, and plan against peak.

    python benchmarks/families/true_shapes_deepseek.py

Writes a checkpoint of random weights with the published names and shapes (2 of 30 decoder layers, the whole vocabulary,
the whole vision tower, one linear an expert, 6 shards; about 4 GB), asks it about a picture in a process for each
budget, and deletes it. The text means nothing; names, shapes and bytes are what is tried.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vismmoe.models.deepseek_vl2 import DeepseekVL2Config
from vismmoe.models.deepseek_vl2.config import RESOLUTIONS
from vismmoe.sizes import format_size
from vismmoe.talk import table

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


def write_checkpoint(folder: Path) -> int:
    """Bytes written."""
    listed = list(shapes())
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    total = sum(2 * torch.Size(shape).numel() for _, shape in listed)
    shards: list[dict[str, Tensor]] = [{}]
    files: dict[str, str] = {}
    written = 0
    for name, shape in listed:
        if written * SHARDS // total >= len(shards):
            _save(shards[-1], folder, len(shards))
            shards[-1].clear()
            shards.append({})
        shards[-1][name] = _weights(name, shape, noise)
        files[name] = _file(len(shards))
        written += 2 * torch.Size(shape).numel()
    _save(shards[-1], folder, len(shards))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "processor_config.json").write_text(json.dumps(PROCESSOR))
    write_tokenizer(folder, CONFIG["language_config"]["vocab_size"])
    return total


def _weights(name: str, shape: tuple[int, ...], noise: Tensor) -> Tensor:
    """Norms near one, matrices scaled by what goes in: values that stay finite through the model."""
    if len(shape) == 1 and name.endswith("weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    count = torch.Size(shape).numel()
    values = noise[:count] if count <= len(noise) else noise.repeat(-(-count // len(noise)))[:count]
    return (values * (torch.Size(shape[1:]).numel() ** -0.5 if len(shape) > 1 else 0.02)).view(shape)


def _file(number: int) -> str:
    return f"model-{number:05d}-of-{SHARDS:06d}.safetensors"


def _save(tensors: dict[str, Tensor], folder: Path, number: int) -> None:
    save_file(tensors, folder / _file(number), metadata={"format": "pt"})


def write_tokenizer(folder: Path, size: int) -> None:
    """Bytes as tokens, the special tokens at their published ids, and filling in between."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = dict(SPECIAL)
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        ids[letter] = len(ids) - 3
    taken = set(ids.values())
    ids |= {f"<fill {number}>": number for number in range(size) if number not in taken}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos, pad, *_ = SPECIAL
    told = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "tokenizer_class": "LlamaTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def run(folder: str, share: float) -> dict[str, Any]:
    """One request in this process; share of the way from the least budget to everything resident."""
    from PIL import Image

    from vismmoe.config import EngineConfig, PlanConfig
    from vismmoe.engine import Engine, Request, plan_for

    size, tokens = (1000, 700), 1500
    least = plan_for(PlanConfig(model=folder, image_size=size, context=tokens, prefix_layers=0))
    budget = least.minimum_bytes + int(share * (least.all_resident_bytes - least.minimum_bytes))
    config = EngineConfig(model=folder, device_memory=budget, prefix_layers=0)
    picture = Image.effect_noise(size, 60).convert("RGB")
    with Engine.load(config, image_size=size, context_tokens=tokens) as engine:
        told = engine.generate(Request((picture,), "What is in this picture?", 8))
    return {
        "prompt": told.usage.prompt_tokens,
        "answer": told.usage.completion_tokens,
        "slabs": told.experts.slabs,
        "loads": told.experts.prefill.demand_loads + told.experts.decode.demand_loads,
        "planned": told.memory.device_planned_bytes,
        "peak": told.memory.device_peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="DeepSeek-VL2 base at true width: plan against peak.")
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder; default: the system's")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(run(asked.row[0], float(asked.row[1]))))
        return
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="deepseek-vl2-") as folder:
        total = write_checkpoint(Path(folder))
        print(f"{len(list(shapes()))} tensors in {SHARDS} shards, {format_size(total)}, on the CPU", file=sys.stderr)
        rows = []
        for share in (0.1, 1.0):
            words = [sys.executable, __file__, "--row", folder, str(share)]
            told = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
            counts = (str(told[name]) for name in ("prompt", "answer", "slabs", "loads"))
            sizes = (format_size(told[name]) for name in ("planned", "peak"))
            rows.append((f"{share:.0%}", *counts, *sizes, f"{told['peak'] / told['planned'] - 1:+.1%}"))
    titles = ("budget", "prompt", "answer", "slabs", "loads", "planned", "peak", "difference")
    print(table(rows, titles))


if __name__ == "__main__":
    main()

"""A checkpoint with the shapes of Qwen3-VL-30B-A3B, as many decoder layers as are asked for, and random weights.

Published: hidden 2048, 128 experts of width 768, top 8, 32 query and 4 key heads, bfloat16, packed and transposed
experts; a vision tower of 27 blocks of width 1152. Only the vocabulary is the reference model's, so that its tokenizer
serves (published: 151,936 words, 1.2 GB that no system here would offload).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TEXT = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 128, "num_experts_per_tok": 8,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_theta": 5000000.0, "rope_type": "default",
    },
    "tie_word_embeddings": False,
}  # fmt: skip
VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
PIXELS_PER_TOKEN_RATIO = 2  # the reference model's visual token is 16 pixels wide, this one's 32
_SPARE = "config.json"
_BLOCK = 1 << 24  # random numbers that are tiled over the tensors


def write_checkpoint(folder: Path, reference: Path, layers: int) -> Path:
    """Write it, or take the one that an earlier run has left there, complete."""
    if (folder / _SPARE).is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in reference.iterdir():
        if file.suffix in (".jinja", ".json") and file.name not in ("config.json", "measured.json"):
            shutil.copy(file, folder / file.name)
    _settings(folder, reference)
    config = _config(reference, layers)
    _weights(folder, config)
    (folder / _SPARE).write_text(json.dumps(config, indent=1))  # last: its presence says that all is there
    return folder


def _config(reference: Path, layers: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((reference / "config.json").read_text())
    config["text_config"] |= TEXT | {"num_hidden_layers": layers, "eos_token_id": None}
    config["vision_config"] |= VISION
    config["vision_config"]["deepstack_visual_indexes"] = VISION["deepstack_visual_indexes"][:layers]  # type: ignore[index]
    config["tie_word_embeddings"] = False
    return config


def _settings(folder: Path, reference: Path) -> None:
    processor = json.loads((reference / "processor_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        processor[part]["patch_size"] = VISION["patch_size"]
        processor[part]["size"] = {"longest_edge": 4 * 262144, "shortest_edge": 4 * 1024}
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=1))
    vocabulary = json.loads((reference / "config.json").read_text())["text_config"]["vocab_size"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": vocabulary - 1, "pad_token_id": 0}))


def _weights(folder: Path, config: dict[str, Any]) -> None:
    """One shard for each layer's experts, one for all the rest."""
    from transformers import CONFIG_MAPPING, Qwen3VLMoeForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration._from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    noise = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    rest: dict[str, torch.Tensor] = {}
    shards: dict[str, dict[str, torch.Tensor]] = {"rest": rest}
    where: dict[str, str] = {}
    for number, (name, held) in enumerate(model.state_dict().items()):
        shape = tuple(held.shape)
        experts = ".mlp.experts." in name
        shard = f"layer-{name.split('.layers.')[1].split('.')[0]}" if experts else "rest"
        if experts:
            shape = (shape[0], shape[2], shape[1])  # published transposed
        where[name] = f"{shard}.safetensors"
        shards.setdefault(shard, {})[name] = _tensor(name, shape, noise, number)
        if experts and len(shards[shard]) == 2:
            save_file(shards.pop(shard), folder / f"{shard}.safetensors")
    rest["lm_head.weight"][-1] = 0  # the end token: never the likeliest
    save_file(rest, folder / "rest.safetensors")
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _tensor(name: str, shape: tuple[int, ...], noise: torch.Tensor, number: int) -> torch.Tensor:
    if len(shape) == 1:
        fill = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        return torch.full(shape, fill, dtype=torch.bfloat16)
    out = torch.empty(torch.Size(shape).numel(), dtype=torch.bfloat16)
    start = (number * 7919) % len(noise)
    place = 0
    while place < len(out):
        count = min(len(noise) - start, len(out) - place)
        out[place : place + count] = noise[start : start + count]
        place, start = place + count, 0
    return out.view(shape)

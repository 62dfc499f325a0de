"""Qwen3-VL-30B-A3B at true width, as on the hub and as transformers saves it: loads, answers, and plan against peak.

    python benchmarks/families/true_shapes.py [--folder DIR] [--layout hub | saved]

Writes a checkpoint of random weights with the published names and shapes (2 of 48 decoder layers, the whole vocabulary,
the whole vision tower; about 4.6 GB) in either layout (hub: packed and transposed experts in 4 shards; saved: packed
experts as the model holds them, one tensor a shard), asks it about a picture in a process for each budget, and deletes
it. The text means nothing; names, shapes and bytes are what is tried. Exit status 1 when a peak lies more than a tenth
above its plan.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from shards import Listed, measure, run_request, write_shards, write_tokenizer

from vismmoe.config import REFERENCE_MODEL
from vismmoe.sizes import format_size

LAYERS = 2
SPECIAL = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652,
    "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656,
}  # fmt: skip
CONFIG: dict[str, Any] = {  # as published, but for the number of layers
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": SPECIAL["<|image_pad|>"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "video_token_id": SPECIAL["<|video_pad|>"],
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_vl_moe",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "vision_end_token_id": SPECIAL["<|vision_end|>"],
    "vision_start_token_id": SPECIAL["<|vision_start|>"],
}  # fmt: skip


def shapes(transposed: bool) -> Iterator[Listed]:
    """Names with their shapes; transposed: experts as on the hub, (E, in, out)."""
    from transformers import CONFIG_MAPPING, Qwen3VLMoeForConditionalGeneration

    with torch.device("meta"):
        config = CONFIG_MAPPING[CONFIG["model_type"]].from_dict(json.loads(json.dumps(CONFIG)))
        model = Qwen3VLMoeForConditionalGeneration._from_config(config)
    for name, held in model.state_dict().items():
        count, *sides = held.shape
        turned = transposed and ".mlp.experts." in name
        yield name, (count, *(reversed(sides) if turned else sides))


def write_checkpoint(folder: Path, layout: str) -> None:
    hub = layout == "hub"
    total = write_shards(list(shapes(hub)), folder, 4 if hub else None)
    print(f"{layout}: {format_size(total)} written", file=sys.stderr)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    reference = Path(__file__).parents[2] / REFERENCE_MODEL
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(reference / name, folder / name)
    processor = json.loads((reference / "processor_config.json").read_text())
    for part in ("image_processor", "video_processor"):
        processor[part] |= {"patch_size": 16, "size": {"longest_edge": 16777216, "shortest_edge": 65536}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    write_tokenizer(folder, 151669, SPECIAL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Qwen3-VL-30B-A3B at true width: plan against peak.")
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder; default: the system's")
    parser.add_argument("--layout", choices=("hub", "saved"), help="default: one after the other")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(run_request(asked.row[0], float(asked.row[1]))))
        return 0
    status = 0
    for layout in (asked.layout,) if asked.layout else ("hub", "saved"):
        with tempfile.TemporaryDirectory(dir=asked.folder, prefix="qwen3-vl-") as folder:
            write_checkpoint(Path(folder), layout)
            status |= measure(__file__, folder, f"Qwen3-VL-30B-A3B, {LAYERS} layers, layout: {layout}, on the CPU")
    return status


if __name__ == "__main__":
    sys.exit(main())

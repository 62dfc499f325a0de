"""Shared fixtures: a tiny Qwen3-VL-MoE with random weights in the published checkpoint layout, and pictures."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("MLFLOW_TRACKING_URI", None)  # what a developer's shell may hold
os.environ.pop("COLUMNS", None)

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from PIL import Image

# The same examples everywhere, and no example that fails for its time. HYPOTHESIS_PROFILE=hunt looks for new ones.
calm = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "database": None}
settings.register_profile("steady", derandomize=True, **calm)
settings.register_profile("hunt", derandomize=False, max_examples=1000, **calm)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

LAYERS, EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 16, 4, 32, 24
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def few_threads() -> None:
    """The same bits on every machine, and room for other work on this one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with config, processor, tokenizer and bfloat16 weights, experts packed and transposed as published."""
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def picture() -> Image.Image:
    """64 x 48 pixels of coloured noise: 12 visual tokens for the tiny model."""
    return noise(64, 48)


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., Path]:
    """build_tiny, for tests that want another layout: conftest cannot be imported."""
    return build_tiny


@pytest.fixture(scope="session")
def make_picture() -> Callable[..., Image.Image]:
    """noise(width, height, seed)."""
    return noise


@pytest.fixture(scope="session")
def spread_over_files() -> Callable[[Path], Path]:
    """shard_singly."""
    return shard_singly


@pytest.fixture
def checkpoint_copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def build_tiny(
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    tied: bool = False,
    deepstack: tuple[int, ...] = (0, 1),
    width: int = WIDTH,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
) -> Path:
    """Write a tiny checkpoint; `change` may alter the published tensors before they are written."""
    from safetensors.torch import save_file
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen3VLMoeConfig(**_config(tied, deepstack, width))
    model = Qwen3VLMoeForConditionalGeneration(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() > 1:  # larger than the usual 0.02: routers must choose, answers must vary
                value.normal_(0, 0.6 if name.endswith("gate.weight") else 1.5 / value.shape[-1] ** 0.5)
            elif "norm" in name:
                value.uniform_(0.5, 1.5)
    tensors = {name: value.detach().to(dtype) for name, value in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(change(tensors) if change else tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}))
    _processor().save_pretrained(folder)
    return folder


def shard_singly(folder: Path) -> Path:
    """Spread model.safetensors of `folder` over one file per tensor, numbered in a shuffled order."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    order = np.random.default_rng(1).permutation(len(tensors))
    weight_map = {}
    for number, name in zip(order, tensors, strict=True):
        file = f"model-{number + 1:05d}-of-{len(tensors):05d}.safetensors"
        save_file({name: tensors[name]}, folder / file, metadata={"format": "pt"})
        weight_map[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def _config(tied: bool, deepstack: tuple[int, ...], width: int) -> dict[str, object]:
    text = {
        "vocab_size": 256 + len(SPECIAL), "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K, "moe_intermediate_size": width, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
                            "mrope_interleaved": True},
        "tie_word_embeddings": tied, "eos_token_id": 258, "pad_token_id": 256,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": HIDDEN, "num_position_embeddings": 64,
        "deepstack_visual_indexes": list(deepstack),
    }  # fmt: skip
    ids = {name: 256 + SPECIAL.index(token) for name, token in (
        ("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>"),
        ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"),
    )}  # fmt: skip
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied, **ids}


def _processor() -> object:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2TokenizerFast, Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    alphabet = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytewise = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(list(SPECIAL))
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=bytewise,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL[3:]),
    )
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 256 * 256}
    images = Qwen2VLImageProcessor(patch_size=8, merge_size=2, temporal_patch_size=2, size=sizes)
    videos = Qwen3VLVideoProcessor(patch_size=8, merge_size=2, temporal_patch_size=2, size=sizes)
    return Qwen3VLProcessor(image_processor=images, tokenizer=tokenizer, video_processor=videos, chat_template=TEMPLATE)

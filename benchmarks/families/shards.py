"""Checkpoints of random weights with the published names and shapes, and what plan and peak say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vismmoe.sizes import format_size
from vismmoe.talk import table

Listed = tuple[str, tuple[int, ...]]
PICTURE = (1000, 700)  # pixels
ANSWER = 8  # tokens
SHARES = (0.0, 0.5, 1.0)  # of the way from the least budget to everything resident
WITHIN = 0.1  # peak against plan


def write_shards(listed: Sequence[Listed], folder: Path, shards: int | None) -> int:
    """bfloat16 tensors in about equal shards (None: one tensor a shard), with their index; bytes written."""
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    total = sum(2 * torch.Size(shape).numel() for _, shape in listed)
    count = len(listed) if shards is None else shards
    held: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    written, number = 0, 1
    for place, (name, shape) in enumerate(listed):
        due = place if shards is None else written * shards // total
        if due >= number:
            save_file(held, folder / _file(number, count), metadata={"format": "pt"})
            held.clear()
            number += 1
        held[name] = _weights(name, shape, noise)
        files[name] = _file(number, count)
        written += 2 * torch.Size(shape).numel()
    save_file(held, folder / _file(number, count), metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _file(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:06d}.safetensors"


def _weights(name: str, shape: tuple[int, ...], noise: Tensor) -> Tensor:
    """Norms near one, matrices scaled by what goes in: values that stay finite through the model."""
    if len(shape) == 1:
        whole = "norm" in name and name.endswith("weight")
        return torch.ones(shape, dtype=torch.bfloat16) if whole else noise[: shape[0]] * 0.02
    count = torch.Size(shape).numel()
    values = noise[:count] if count <= len(noise) else noise.repeat(-(-count // len(noise)))[:count]
    return (values * torch.Size(shape[1:]).numel() ** -0.5).view(shape)


def write_tokenizer(folder: Path, size: int, special: Mapping[str, int]) -> None:
    """tokenizer.json: bytes as tokens, the special tokens at their published ids, and filling in between."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ids = dict(special)
    free = (number for number in range(size) if number not in set(special.values()))
    ids |= {letter: next(free) for letter in sorted(pre_tokenizers.ByteLevel.alphabet())}
    ids |= {f"<fill {number}>": number for number in free}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))


def run_request(folder: str, share: float) -> dict[str, Any]:
    """One request in this process, with the memory planned for it."""
    from PIL import Image

    from vismmoe.config import EngineConfig
    from vismmoe.engine import Engine, Request
    from vismmoe.memory import process_peak_bytes
    from vismmoe.planning import plan_for_request

    picture = Image.effect_noise(PICTURE, 60).convert("RGB")
    request = Request((picture,), "What is in this picture?", ANSWER)
    config = EngineConfig(model=folder, device="cpu", prefix_layers=0)
    least = plan_for_request(config, request.images, request.prompt, ANSWER)
    budget = least.minimum_bytes + int(share * (least.all_resident_bytes - least.minimum_bytes))
    with Engine.load(replace(config, device_memory=budget), request=request) as engine:
        loaded = engine.peak_bytes
        told = engine.generate(request)
    return {
        "prompt": told.usage.prompt_tokens,
        "answer": told.usage.completion_tokens,
        "slabs": told.experts.slabs,
        "loads": told.experts.prefill.demand_loads + told.experts.decode.demand_loads,
        "process": process_peak_bytes() - told.memory.device_peak_bytes,
        "planned": told.memory.device_planned_bytes,
        "loaded": loaded,
        "peak": told.memory.device_peak_bytes,
    }


def measure(script: str, folder: str, title: str) -> int:
    """A process for each budget; prints the table. 1 when a peak lies more than WITHIN above its plan, else 0."""
    found: list[dict[str, Any]] = []
    for share in SHARES:
        words = [sys.executable, script, "--row", folder, str(share)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        found.append({"share": share, **json.loads(done.stdout)})
    return report(title, found)


def report(title: str, found: Iterable[Mapping[str, Any]]) -> int:
    rows, beyond = [], 0
    for told in found:
        ratio = told["peak"] / told["planned"]
        beyond += ratio > 1 + WITHIN
        counts = (str(told[name]) for name in ("prompt", "answer", "slabs", "loads"))
        sizes = (format_size(told[name]) for name in ("process", "planned", "loaded", "peak"))
        rows.append((f"{told['share']:.0%}", *counts, *sizes, f"{ratio:.3f}"))
    titles = ("budget", "prompt", "answer", "slabs", "loads", "process", "planned", "loaded", "peak", "ratio")
    print(f"{title}\n\n{table(rows, titles)}\n", flush=True)
    return 1 if beyond else 0

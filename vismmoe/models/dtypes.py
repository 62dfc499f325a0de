"""Where and in which number format the arithmetic runs."""

from __future__ import annotations

import torch

from vismmoe.errors import UsageError

NAMED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """UsageError when CUDA is asked for and there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no CUDA device that torch can use; take --device cpu")
    return torch.device(name)


def resolve_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The number format of the arithmetic. "auto" keeps the checkpoint's, but a CPU without native support computes
    16-bit formats in float32: emulated bfloat16 matrix products were measured 50 times slower."""
    if name != "auto":
        return NAMED[name]
    if device.type == "cpu" and (stored is torch.float16 or (stored is torch.bfloat16 and not _native_bfloat16())):
        return torch.float32
    return stored


def _native_bfloat16() -> bool:
    cpu = torch.cpu
    return any(bool(getattr(cpu, name, bool)()) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))

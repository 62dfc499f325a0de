"""Where and in which number format the arithmetic runs."""

from __future__ import annotations

import torch

from vismmoe.errors import UsageError
from vismmoe.memory import SMALL_EXPERT_BYTES
from vismmoe.types import ExpertLayout

NAMED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """UsageError when CUDA is asked for and there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this machine has no CUDA device that torch can use; take --device cpu")
    return torch.device(name)


def resolve_dtype(name: str, layout: ExpertLayout, device: torch.device) -> torch.dtype:
    """The number format of the arithmetic. "auto" keeps the checkpoint's, but a CPU computes 16-bit formats in float32
    where it has no native support (emulated bfloat16 matrix products were measured 50 times slower) and where experts
    are small: the library then compiles a kernel for each new number of rows, which for the reference model took 100
    to 200 MiB, six times the whole plan, and more time than it saved."""
    if name != "auto":
        return NAMED[name]
    stored = layout.dtype
    if device.type != "cpu" or stored is torch.float32:
        return stored
    small = layout.expert_bytes < SMALL_EXPERT_BYTES
    return stored if stored is torch.bfloat16 and not small and _native_bfloat16() else torch.float32


def _native_bfloat16() -> bool:
    cpu = torch.cpu
    return any(bool(getattr(cpu, name, bool)()) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))

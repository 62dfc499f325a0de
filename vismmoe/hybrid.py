"""Where a missing expert runs whose bytes lie in host memory: there, on the CPU, or on the device after a copy.

On the CPU device the two memories are one, so it always runs where it lies: the same bits, and nothing is moved. On
CUDA the CPU rounds differently, so that running there is only done when it is asked for, and then by what both ways
cost on this machine, measured at the start (the idea of Fiddler, arXiv 2402.07033).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from vismmoe.experts.slabs import SlabPool
from vismmoe.models.products import product
from vismmoe.types import ExpertLayout

Hybrid = Literal["auto", "on", "off"]
_TRIES = 3
_MANY = 16  # tokens of the second measurement, which tells what a further token costs


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one expert."""

    copy: float  # from host memory to the device
    first_token: float  # on the CPU
    further_token: float

    def cheaper_on_cpu(self, tokens: int) -> bool:
        """Whether so many tokens are through on the CPU before the copy would have ended."""
        return self.first_token + self.further_token * (tokens - 1) < self.copy


ALWAYS_ON_CPU = Costs(math.inf, 0.0, 0.0)
NEVER_ON_CPU = Costs(0.0, math.inf, 0.0)


def measure(mode: Hybrid, layout: ExpertLayout, device: torch.device, dtype: torch.dtype) -> Costs:
    """What decides on this machine. dtype: of the arithmetic."""
    if mode == "off" or (mode == "auto" and device.type != "cpu"):
        return NEVER_ON_CPU
    if device.type == "cpu":
        return ALWAYS_ON_CPU
    one, many = (_cpu_ms(layout, dtype, tokens) for tokens in (1, _MANY))
    return Costs(_copy_ms(layout, device), one, max(0.0, many - one) / (_MANY - 1))


def _cpu_ms(layout: ExpertLayout, dtype: torch.dtype, tokens: int) -> float:
    weights = [weight.to(dtype) for weight in SlabPool(1, layout).weights(0).values() if weight.dim() == 2]
    rows = [torch.zeros(tokens, weight.shape[-1], dtype=dtype) for weight in weights]

    def run() -> None:
        for weight, row in zip(weights, rows, strict=True):
            product(row, weight)

    return _best(run)


def _copy_ms(layout: ExpertLayout, device: torch.device) -> float:
    slab = SlabPool(1, layout, device).bytes(0)
    try:
        host = SlabPool(1, layout, pin=True).bytes(0)
    except RuntimeError:  # pageable memory is what it will be then
        host = SlabPool(1, layout).bytes(0)

    def run() -> None:
        slab.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)

    return _best(run)


def _best(run: Callable[[], None]) -> float:
    run()
    times = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return min(times)

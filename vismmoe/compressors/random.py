"""Random dropping: the baseline that a compressor must beat. Seeded by the image, so a request repeats exactly."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vismmoe.compressors.base import Method, check_count
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class RandomCompressor(Method):
    """Each subset of the asked size is equally likely; the same visual tokens give the same subset."""

    seed: int = 0
    needs_saliency: ClassVar[bool] = False
    name: str = "random"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices."""
        total = len(visual.saliency)
        check_count(count, total)
        order = torch.randperm(total, generator=torch.Generator().manual_seed(self._seed_of(visual)))
        return order[:count].sort().values.to(visual.saliency.device)

    def _seed_of(self, visual: VisualTokens) -> int:
        # Rounded: the last bits of an attention map depend on thread counts and devices.
        levels = (visual.saliency.float().cpu() * 1000).round().to(torch.int64)
        told = f"{self.seed} {visual.grid} {levels.tolist()}"
        return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "big") >> 1

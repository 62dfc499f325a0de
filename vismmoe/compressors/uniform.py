"""Every n-th token in reading order: keeps the picture's layout, knows nothing of its content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vismmoe.compressors.base import Method, check_count
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class UniformCompressor(Method):
    """An even stride over all visual tokens, centred in each stretch."""

    needs_saliency: ClassVar[bool] = False
    name: str = "uniform"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices: floor((i + 1/2) * N / count)."""
        total = len(visual.saliency)
        check_count(count, total)
        steps = torch.arange(count, device=visual.saliency.device)
        return (2 * steps + 1) * total // max(2 * count, 1)

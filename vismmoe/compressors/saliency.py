"""Keep the tokens that the vision tower attends to most, whatever experts they ask for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vismmoe.compressors.base import Method, best, check_count
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class SaliencyCompressor(Method):
    """The published method without its expert term: lambda = 0 or alpha >= beta."""

    name: str = "saliency"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices of the most salient tokens."""
        check_count(count, len(visual.saliency))
        return best(visual.saliency, count).sort().values

"""Image downsampling to the same number of tokens: the baseline that plain resizing sets (VTC-Bench)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vismmoe.compressors.base import Method
from vismmoe.compressors.uniform import UniformCompressor
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class DownsampleCompressor(Method):
    """The picture is made smaller before the vision tower sees it; all of its tokens are kept."""

    needs_saliency: ClassVar[bool] = False
    name: str = "downsample"

    def resize(self, width: int, height: int, keep_ratio: float, token_px: int) -> tuple[int, int]:
        """The largest grid of whole tokens of about the same shape with at most floor(beta N) of them, in pixels."""
        columns, rows = max(1, round(width / token_px)), max(1, round(height / token_px))
        limit = max(1, super().count(columns * rows, keep_ratio))
        if limit >= columns * rows:
            return width, height
        fits = [(c, min(limit // c, rows)) for c in range(1, columns + 1) if limit // c]
        across, down = max(fits, key=lambda grid: grid[0] * grid[1] * _likeness(grid, columns / rows))
        return across * token_px, down * token_px

    def count(self, total: int, keep_ratio: float) -> int:
        """All: the picture was made smaller already."""
        return total

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices; a stride, should fewer than all be asked for."""
        return UniformCompressor().keep(visual, count)


def _likeness(grid: tuple[int, int], shape: float) -> float:
    """1 when columns / rows is `shape`, less the more it is off."""
    ratio = grid[0] / grid[1] / shape
    return min(ratio, 1 / ratio)

"""Sheets of writing: strips with text, cut from many scenes and stacked.

A scene holds one word at the most, a few of its hundred tokens; a tower that is to learn 36 characters from those needs
days. A sheet holds three, so that every other batch can be about reading alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vismmoe_training.reference.pool import LABELS, PooledScene, frames_of

STRIP_ROWS, STRIP_COLS, STRIPS = 3, 8, 3
READING_TARGETS = ("text", "tens", "ones", "left_character", "right_character", "place")


@dataclass(frozen=True)
class Strip:
    """STRIP_ROWS rows of visual tokens of one scene; `row` is the first."""

    scene: int
    row: int


def find_strips(pool: Sequence[PooledScene], token_px: int = 16) -> list[Strip]:
    """Where the texts of the narrow scenes lie."""
    strips = []
    for index, pooled in enumerate(pool):
        rows, cols = pooled.scene.height_px // token_px, pooled.scene.width_px // token_px
        written = pooled.labels[LABELS.index("text")].reshape(rows, cols).any(1).nonzero()[0]
        if cols == STRIP_COLS and 0 < len(written) <= STRIP_ROWS:
            strips.append(Strip(index, int(min(written[0], rows - STRIP_ROWS))))
    return strips


def sheet_batch(
    pool: Sequence[PooledScene], strips: Sequence[Strip], sheets: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, (B, 3) grids and labels (len(LABELS), N) of `sheets` sheets of STRIPS random strips each."""
    chosen = [strips[int(i)] for i in rng.integers(len(strips), size=sheets * STRIPS)]
    parts = [_cut(pool[strip.scene], strip.row) for strip in chosen]
    merge = round((parts[0][0].shape[0] / parts[0][1].shape[1]) ** 0.5)
    grid = (1, STRIPS * STRIP_ROWS * merge, STRIP_COLS * merge)
    labels = torch.from_numpy(np.concatenate([labels for _, labels in parts], axis=1))
    return frames_of([patches for patches, _ in parts]), torch.tensor([grid] * sheets), labels


def _cut(pooled: PooledScene, row: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    start, end = row * STRIP_COLS, (row + STRIP_ROWS) * STRIP_COLS
    patches_a_token = pooled.patches.shape[0] // pooled.tokens
    return pooled.patches[start * patches_a_token : end * patches_a_token], pooled.labels[:, start:end]

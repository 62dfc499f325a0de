"""From the tower's patches to the rows that stand for an image in the prompt (arXiv:2412.10302, §2.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from vismmoe.models.deepseek_vl2.config import DeepseekVL2ProjectorConfig


class Projector(nn.Module):
    """Merges ratio x ratio neighbouring patches into one visual token of the language model's width."""

    def __init__(self, config: DeepseekVL2ProjectorConfig) -> None:
        super().__init__()
        self.ratio = config.downsample_ratio
        inner = config.n_embed * config.mlp_ratio
        layers: list[nn.Module] = [nn.Linear(config.input_dim * self.ratio**2, inner)]
        for _ in range(1, config.depth - 1):
            layers += [nn.GELU(), nn.Linear(inner, inner)]
        self.layers = nn.Sequential(*layers, nn.GELU(), nn.Linear(inner, config.n_embed))

    def forward(self, patches: Tensor) -> Tensor:
        """(tiles, P, D) patches of square tiles -> (tiles, s * s, H)."""
        out: Tensor = self.layers(merge_patches(patches, self.ratio))
        return out


def merge_patches(patches: Tensor, ratio: int) -> Tensor:
    """(tiles, P, D) -> (tiles, s * s, D * ratio^2); an odd grid gets a row and a column of zeros at its far side.

    The merged vector is channel-major: its index is channel * ratio^2 + ratio * row + column.
    """
    tiles, count, width = patches.shape
    side = math.isqrt(count)
    grid = patches.transpose(1, 2).reshape(tiles, width, side, side)
    lacking = -side % ratio
    grid = functional.pad(grid, (0, lacking, 0, lacking))
    # In order: of rows that lie across memory, torch multiplies each tile with a copy of the weight of its own.
    return functional.unfold(grid, kernel_size=ratio, stride=ratio).transpose(1, 2).contiguous()


def tokens_per_side(image_size: int, patch_size: int, ratio: int) -> int:
    """Visual tokens along one side of a tile."""
    return math.ceil(image_size // patch_size / ratio)


def tokens_per_image(side: int, tiles: tuple[int, int]) -> int:
    """Rows of one image in the prompt: the global view and (width, height) `tiles`, newlines, the separator."""
    width, height = tiles
    return side * (side + 1) + 1 + height * side * (width * side + 1)


def image_sequence(views: Tensor, tiles: tuple[int, int], newline: Tensor, separator: Tensor) -> Tensor:
    """views: (1 + width * height, s * s, H), the global one, then the tiles row by row; newline, separator: (H,).

    Returns (tokens_per_image, H): the global view's rows, each closed by `newline`; `separator`; then the tiles laid
    out as one picture, each of its rows closed by `newline`.
    """
    side = math.isqrt(views.shape[1])
    whole, parts = views[0].reshape(side, side, -1), views[1:]
    rows = [_with_newlines(whole, newline), separator.unsqueeze(0), _with_newlines(_join(parts, tiles, side), newline)]
    return torch.cat(rows)


def images_of(tiles: Tensor) -> Iterator[tuple[int, tuple[int, int]]]:
    """(first view, (tiles wide, tiles high)) of each image of a prompt; tiles: (images, 2), rows of zeros are none."""
    first = 0
    for width, height in tiles.tolist():
        if width and height:
            yield first, (width, height)
            first += 1 + width * height


def _join(parts: Tensor, tiles: tuple[int, int], side: int) -> Tensor:
    width, height = tiles
    grid = parts.reshape(height, width, side, side, -1)
    return grid.transpose(1, 2).reshape(height * side, width * side, -1)


def _with_newlines(grid: Tensor, newline: Tensor) -> Tensor:
    """(rows, columns, H) -> (rows * (columns + 1), H)."""
    ends = newline.expand(grid.shape[0], 1, -1)
    return torch.cat((grid, ends), dim=1).flatten(0, 1)

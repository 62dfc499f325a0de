"""Which resolution an image is brought to, and the views it is cut into (arXiv:2412.10302, §2.1)."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image, ImageOps

Size = tuple[int, int]  # width, height in pixels


def best_resolution(size: Size, candidates: Sequence[Sequence[int]]) -> Size:
    """The candidate in which the most of the image's own pixels survive; then the least waste; then list order."""
    width, height = size
    best, most, least = (int(candidates[0][0]), int(candidates[0][1])), -1, 0
    for across, down in candidates:
        scale = min(across / width, down / height)
        fitted = int(width * scale) * int(height * scale)
        kept = min(fitted, width * height)
        waste = across * down - kept
        if kept > most or (kept == most and waste < least):
            best, most, least = (int(across), int(down)), kept, waste
    return best


def tile_counts(resolution: Size, side: int) -> tuple[int, int]:
    """Tiles of `side` pixels (wide, high)."""
    return resolution[0] // side, resolution[1] // side


def cut_views(image: Image.Image, resolution: Size, side: int, padding: tuple[int, int, int]) -> list[Image.Image]:
    """RGB views of side x side: the whole picture, then the tiles of `resolution` row by row.

    Pictures are scaled up or down with their aspect kept, centred, and padded.
    """
    views = [ImageOps.pad(image, (side, side), color=padding)]
    spread = ImageOps.pad(image, resolution, color=padding)
    for top in range(0, resolution[1], side):
        for left in range(0, resolution[0], side):
            views.append(spread.crop((left, top, left + side, top + side)))
    return views

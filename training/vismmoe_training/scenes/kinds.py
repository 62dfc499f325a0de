"""Every kind's drawing, with the shape of its box and how it may be turned."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from . import kinds_shapes as shapes
from . import kinds_things as things
from .pen import EMPTY, Pen

SUPERSAMPLE: Final = 2

DRAWINGS: Final[Mapping[str, Callable[[Pen], None]]] = MappingProxyType({
    "circle": shapes.circle, "square": shapes.square, "triangle": shapes.triangle, "star": shapes.star,
    "heart": shapes.heart, "cross": shapes.cross, "diamond": shapes.diamond, "pentagon": shapes.pentagon,
    "ring": shapes.ring, "moon": shapes.moon, "arrow": shapes.arrow, "sun": shapes.sun,
    "crown": shapes.crown, "cloud": shapes.cloud, "tree": things.tree, "house": things.house,
    "flower": things.flower, "fish": things.fish, "boat": things.boat, "car": things.car,
    "cup": things.cup, "key": things.key, "flag": things.flag, "mushroom": things.mushroom,
    "umbrella": things.umbrella, "ladder": things.ladder, "bell": things.bell, "bottle": things.bottle,
})  # fmt: skip

# Width over height of the box; kinds that are not listed are as wide as high.
ASPECTS: Final[Mapping[str, float]] = MappingProxyType({
    "diamond": 0.72, "moon": 0.8, "tree": 0.8, "bottle": 0.5, "ladder": 0.62, "crown": 1.25,
    "cloud": 1.45, "fish": 1.5, "car": 1.6, "key": 1.8, "arrow": 1.25,
})  # fmt: skip

# Kinds that stay recognisable when tilted. A tilted square is still no diamond, which is tall.
TILTABLE: Final = frozenset((
    "square", "triangle", "star", "heart", "cross", "pentagon", "sun", "flower",
    "tree", "house", "boat", "cup", "mushroom", "umbrella", "bell", "flag",
))  # fmt: skip
MAX_TILT_DEGREES: Final = 20


def box_size(kind: str, longer_px: int) -> tuple[int, int]:
    """Width and height in pixels of a box whose longer side is `longer_px`."""
    aspect = ASPECTS.get(kind, 1.0)
    if aspect >= 1.0:
        return longer_px, round(longer_px / aspect)
    return round(longer_px * aspect), longer_px


@lru_cache(maxsize=512)
def index_tile(kind: str, width_px: int, height_px: int, rotation_degrees: int) -> npt.NDArray[np.uint8]:
    """Read-only index values (see `pen`) of shape (2 * height, 2 * width) that fill the tile edge to edge."""
    size = (width_px * SUPERSAMPLE, height_px * SUPERSAMPLE)
    pen = Pen(*size)
    DRAWINGS[kind](pen)
    tile = pen.tile.rotate(rotation_degrees, expand=True) if rotation_degrees else pen.tile
    fitted = tile.resize(size, Image.Resampling.NEAREST, box=tile.getbbox())
    values = np.asarray(fitted)
    values.setflags(write=False)
    return values


def shrink(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Mean of every SUPERSAMPLE by SUPERSAMPLE block of the first two axes (faster than `mean` over reshaped axes)."""
    steps = range(SUPERSAMPLE)
    parts = [values[row::SUPERSAMPLE, col::SUPERSAMPLE] for row in steps for col in steps]
    total: npt.NDArray[np.float32] = parts[0].copy()
    for part in parts[1:]:
        total += part
    total *= np.float32(1 / SUPERSAMPLE**2)
    return total


def coverage(kind: str, width_px: int, height_px: int, rotation_degrees: int) -> npt.NDArray[np.float32]:
    """Share of each pixel, shape (height, width), that the drawing covers."""
    tile = index_tile(kind, width_px, height_px, rotation_degrees) != EMPTY
    return shrink(tile.astype(np.float32))


def silhouette(kind: str, width_px: int, height_px: int, rotation_degrees: int) -> npt.NDArray[np.bool_]:
    """Pixels, shape (height, width), of which the drawing covers at least half."""
    solid: npt.NDArray[np.bool_] = coverage(kind, width_px, height_px, rotation_degrees) >= 0.5
    return solid

"""Textured backdrops in muted colours, from light to dark and different across one picture."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from .scene import Background

Floats = npt.NDArray[np.float32]
Texture = Callable[[int, int, np.random.Generator], Floats]


def smooth_noise(height: int, width: int, rng: np.random.Generator, cells: int = 4) -> Floats:
    """Soft blobs from about -1 to 1, shape (height, width)."""
    coarse = rng.uniform(-1, 1, (cells, cells)).astype(np.float32)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)


def _ramp(height: int, width: int, rng: np.random.Generator) -> Floats:
    """Distance in pixels along a random direction, shape (height, width)."""
    angle = rng.uniform(0, 2 * np.pi)
    y = np.arange(height, dtype=np.float32)[:, None] * np.float32(np.sin(angle))
    ramp: Floats = y + np.arange(width, dtype=np.float32)[None, :] * np.float32(np.cos(angle))
    return ramp


def _gradient(height: int, width: int, rng: np.random.Generator) -> Floats:
    ramp = _ramp(height, width, rng)
    low, high = float(ramp.min()), float(ramp.max())
    ramp -= np.float32((low + high) / 2)
    ramp *= np.float32(2 / (high - low + 1e-6))
    return ramp


def _blobs(height: int, width: int, rng: np.random.Generator) -> Floats:
    return 1.3 * smooth_noise(height, width, rng, int(rng.integers(6, 16)))


def _stripes(height: int, width: int, rng: np.random.Generator) -> Floats:
    period = rng.uniform(6, 28)
    wave: Floats = np.sin(_ramp(height, width, rng) * np.float32(2 * np.pi / period))
    return wave if rng.random() < 0.5 else np.sign(wave)


def _checks(height: int, width: int, rng: np.random.Generator) -> Floats:
    step = int(rng.integers(5, 22))
    odd = (np.arange(height)[:, None] // step + np.arange(width)[None, :] // step) % 2
    return (2 * odd - 1).astype(np.float32)


def _speckle(height: int, width: int, rng: np.random.Generator) -> Floats:
    grain = int(rng.integers(2, 4))
    coarse = rng.standard_normal((height // grain + 1, width // grain + 1), dtype=np.float32)
    coarse *= np.float32(0.8)
    grains: Floats = coarse.repeat(grain, 0).repeat(grain, 1)
    return grains[:height, :width]


TEXTURES: Final[Mapping[str, Texture]] = MappingProxyType(
    {"gradient": _gradient, "blobs": _blobs, "stripes": _stripes, "checks": _checks, "speckle": _speckle}
)


def sample_background(rng: np.random.Generator) -> Background:
    """Pick two textures, a seed and whether the backdrop is dark."""
    names = tuple(TEXTURES)
    first, second = (names[int(index)] for index in rng.integers(len(names), size=2))
    return Background(int(rng.integers(2**63)), (first, second), bool(rng.random() < 0.4))


def _muted(rng: np.random.Generator, dark: bool) -> Floats:
    """An RGB value whose channels differ little, so that it is never taken for an object's colour."""
    grey = rng.uniform(45, 105) if dark else rng.uniform(140, 215)
    return (grey + rng.uniform(-22, 22, 3)).astype(np.float32)


def paint_background(background: Background, height: int, width: int) -> Floats:
    """Paint the backdrop: RGB from 0 to 255 of shape (height, width, 3)."""
    rng = np.random.default_rng(background.seed)
    first, second = (TEXTURES[name](height, width, rng) for name in background.textures)
    where = np.clip(0.5 + 1.6 * smooth_noise(height, width, rng, 3), 0, 1)
    ends = [_muted(rng, background.dark) for _ in range(3)]
    amounts = rng.uniform(4, 20, 2).astype(np.float32)
    blend = np.clip(0.5 + 0.5 * smooth_noise(height, width, rng), 0, 1)
    shade = where * first * amounts[0] + (1 - where) * second * amounts[1]
    tint = (ends[2] - ends[0]) * np.float32(0.01)
    image = np.empty((height, width, 3), dtype=np.float32)
    for channel in range(3):  # planes are faster than a last axis of three
        slope = ends[1][channel] - ends[0][channel]
        image[..., channel] = ends[0][channel] + slope * blend + (1 + tint[channel]) * shade
    return image

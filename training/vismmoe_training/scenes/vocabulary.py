"""Closed vocabulary of the scenes: everything that can be drawn, written or answered."""

from typing import Final

import numpy as np
import numpy.typing as npt

Rgb = tuple[int, int, int]

# The order is the order of popularity (see `kind_weights`), so plain shapes and things alternate.
KINDS: Final[tuple[str, ...]] = (
    "circle", "tree", "square", "house", "star", "car", "triangle", "flower", "heart", "cup",
    "cross", "fish", "sun", "arrow", "boat", "ring", "cloud", "key", "diamond", "moon",
    "flag", "bell", "pentagon", "mushroom", "umbrella", "bottle", "crown", "ladder",
)  # fmt: skip

# Kinds of one theme often share a scene; an absent kind of a present theme is a hard negative.
THEMES: Final[tuple[tuple[str, ...], ...]] = (
    ("sun", "moon", "cloud", "star", "umbrella"),
    ("tree", "flower", "mushroom", "house", "car"),
    ("fish", "boat", "flag", "bottle", "ladder"),
    ("cup", "key", "crown", "heart", "bell"),
    ("circle", "square", "triangle", "diamond", "pentagon", "cross", "ring", "arrow"),
)

COLOURS: Final[tuple[tuple[str, Rgb], ...]] = (
    ("red", (222, 26, 32)),
    ("orange", (255, 134, 0)),
    ("yellow", (255, 226, 20)),
    ("green", (24, 150, 44)),
    ("cyan", (30, 214, 226)),
    ("blue", (28, 62, 222)),
    ("purple", (132, 30, 176)),
    ("pink", (255, 130, 200)),
    ("brown", (118, 66, 22)),
    ("black", (18, 18, 20)),
)
COLOUR_NAMES: Final[tuple[str, ...]] = tuple(name for name, _ in COLOURS)

WORDS: Final[tuple[str, ...]] = (
    "apple", "bread", "chair", "dance", "eagle", "field", "glass", "horse",
    "juice", "knife", "lemon", "mango", "night", "ocean", "piano", "queen",
    "river", "sheep", "table", "uncle", "voice", "water", "youth", "zebra",
)  # fmt: skip

CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789"  # all that texts are made of

CELLS: Final[tuple[str, ...]] = tuple(
    f"{row} {column}" for row in ("top", "middle", "bottom") for column in ("left", "centre", "right")
)


def kind_weights() -> npt.NDArray[np.float64]:
    """Probability of each kind, shape (28,), falling with its rank; the first is 4 times the last."""
    rank = np.arange(len(KINDS)) / (len(KINDS) - 1)
    weights = 1.0 / (1.0 + 3.0 * rank)
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def colour_rgb(name: str) -> Rgb:
    """RGB value (0 to 255 each) of a colour name."""
    return COLOURS[COLOUR_NAMES.index(name)][1]


def luminance(rgb: Rgb) -> float:
    """Perceived brightness from 0 (black) to 1 (white)."""
    return (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]) / 255.0

"""Absent kinds to ask for, picked in the three ways of the POPE benchmark."""

from typing import Final

import numpy as np

from .scene import Scene
from .vocabulary import KINDS, THEMES

NEGATIVES: Final = ("random", "popular", "adversarial")
POPULAR: Final = 8  # an absent kind counts as popular among so many of the most frequent ones


def absent_kinds(scene: Scene) -> list[str]:
    """Kinds that the scene lacks, most popular first."""
    present = scene.kinds()
    return [kind for kind in KINDS if kind not in present]


def negatives(scene: Scene, count: int, rng: np.random.Generator) -> list[tuple[str, str]]:
    """`count` distinct absent kinds, each with how it was picked; the ways take turns from a random start."""
    start = int(rng.integers(len(NEGATIVES)))
    picked: dict[str, str] = {}
    for turn in range(count):
        origin = NEGATIVES[(start + turn) % len(NEGATIVES)]
        pool = [kind for kind in negative_pool(scene, origin) if kind not in picked]
        if not pool:  # every companion is present already
            origin = "random"
            pool = [kind for kind in absent_kinds(scene) if kind not in picked]
        picked[pool[int(rng.integers(len(pool)))]] = origin
    return list(picked.items())


def negative_pool(scene: Scene, origin: str) -> list[str]:
    """Absent kinds that may be picked the way of `origin`; none where every companion is present."""
    absent = absent_kinds(scene)
    if origin == "popular":
        return absent[:POPULAR]
    if origin == "adversarial":
        present = scene.kinds()
        themes = [theme for theme in THEMES if any(kind in theme for kind in present)]
        return [kind for kind in absent if any(kind in theme for theme in themes)]
    return absent

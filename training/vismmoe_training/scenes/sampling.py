"""Random scenes: which objects there are and where they lie."""

from typing import Final

import numpy as np

from .background import sample_background
from .kinds import MAX_TILT_DEGREES, TILTABLE, box_size
from .lettering import plate_size
from .placement import is_allowed
from .scene import Box, Scene, SceneObject, SceneSpec, SceneText
from .vocabulary import COLOUR_NAMES, KINDS, THEMES, WORDS, kind_weights

THEME_PROBABILITY: Final = 0.5
REPEAT_PROBABILITY: Final = 0.3
MAX_SHARE_OF_SIDE: Final = 0.38  # an object never fills more of the shorter side
PLACE_TRIES: Final = 40
SCENE_TRIES: Final = 50


def sample_scene(rng: np.random.Generator, spec: SceneSpec | None = None) -> Scene:
    """Draw one scene; the generator is used once, for the seed of the scene."""
    return scene_from_seed(int(rng.integers(2**63)), spec or SceneSpec())


def scene_from_seed(seed: int, spec: SceneSpec) -> Scene:
    """The scene of this seed; ValueError where the spec leaves no room for `min_objects`."""
    for attempt in range(SCENE_TRIES):
        scene = _attempt(seed, np.random.default_rng((seed, attempt)), spec)
        if len(scene.objects) >= spec.min_objects:
            return scene
    raise ValueError(f"no room for {spec.min_objects} objects in scenes of {spec}")


def _attempt(seed: int, rng: np.random.Generator, spec: SceneSpec) -> Scene:
    width, height = _side(rng, spec), _side(rng, spec)
    background = sample_background(rng)
    text = _text(rng, spec, width, height) if rng.random() < spec.text_probability else None
    objects: list[SceneObject] = []
    for kind in _kinds(rng, int(rng.integers(spec.min_objects, spec.max_objects + 1))):
        placed = _place(rng, spec, kind, Scene(width, height, background, tuple(objects), text, seed))
        if placed is not None:
            objects.append(placed)
    return Scene(width, height, background, tuple(objects), text, seed)


def _side(rng: np.random.Generator, spec: SceneSpec) -> int:
    steps = np.arange((spec.max_side_px - spec.min_side_px) // spec.side_step_px + 1)
    weights = np.exp(-spec.size_skew * steps)
    return spec.min_side_px + spec.side_step_px * int(rng.choice(steps, p=weights / weights.sum()))


def _kinds(rng: np.random.Generator, count: int) -> list[str]:
    """Kinds of one theme or of all, some of them repeated so that there is something to count."""
    weights = kind_weights()
    if rng.random() < THEME_PROBABILITY:
        theme = THEMES[int(rng.integers(len(THEMES)))]
        weights = weights * np.isin(KINDS, theme)
        weights /= weights.sum()
    kinds: list[str] = []
    for _ in range(count):
        if kinds and rng.random() < REPEAT_PROBABILITY:
            kinds.append(kinds[int(rng.integers(len(kinds)))])
        else:
            kinds.append(KINDS[int(rng.choice(len(KINDS), p=weights))])
    return kinds


def _place(rng: np.random.Generator, spec: SceneSpec, kind: str, scene: Scene) -> SceneObject | None:
    """An object where the scene has room for it, or None after some tries."""
    largest = min(spec.max_object_px, int(MAX_SHARE_OF_SIDE * min(scene.width_px, scene.height_px)))
    colour = COLOUR_NAMES[int(rng.integers(len(COLOUR_NAMES)))]
    tilt = int(rng.integers(-MAX_TILT_DEGREES, MAX_TILT_DEGREES + 1)) if kind in TILTABLE else 0
    for _ in range(PLACE_TRIES):
        longer_px = int(rng.integers(spec.min_object_px, max(largest, spec.min_object_px) + 1))
        box = _box(rng, box_size(kind, longer_px), scene.width_px, scene.height_px)
        candidate = SceneObject(kind, colour, box, tilt)
        if is_allowed(candidate, scene):
            return candidate
    return None


def _box(rng: np.random.Generator, size: tuple[int, int], width: int, height: int) -> Box:
    x = int(rng.integers(1, width - size[0]))
    y = int(rng.integers(1, height - size[1]))
    return x, y, x + size[0], y + size[1]


def _text(rng: np.random.Generator, spec: SceneSpec, width: int, height: int) -> SceneText:
    is_number = bool(rng.random() < 0.5)
    text = str(rng.integers(10, 100)) if is_number else WORDS[int(rng.integers(len(WORDS)))]
    font_px = int(rng.integers(spec.min_text_px, spec.max_text_px + 1))
    colour = COLOUR_NAMES[int(rng.integers(len(COLOUR_NAMES)))]
    box = _box(rng, plate_size(text, font_px), width, height)
    return SceneText(text, is_number, colour, box, font_px)

"""Pixels of a scene, together with the mask of every object."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from .background import paint_background
from .kinds import coverage, index_tile, shrink, silhouette
from .lettering import contrasting, draw_text
from .pen import DETAIL, EMPTY
from .scene import Scene, SceneObject
from .vocabulary import colour_rgb

Floats = npt.NDArray[np.float32]
DRAWING_STREAM: Final = 0x5CE7E  # keeps the light on objects independent of where they were placed
SMALL_PX: Final = 40  # below this longer side the outline is half a pixel, so that thin parts keep their colour


@dataclass(frozen=True)
class Rendering:
    """A drawn scene: an RGB image and bool masks of shape (objects, height, width), hidden parts included."""

    image: Image.Image
    masks: npt.NDArray[np.bool_]


def render(scene: Scene) -> Rendering:
    """Draw the scene and the mask of each object, in the order of `scene.objects`."""
    return Rendering(draw_scene(scene), object_masks(scene))


def draw_scene(scene: Scene) -> Image.Image:
    """Draw the scene as an RGB image of width_px by height_px."""
    rng = np.random.default_rng((scene.seed, DRAWING_STREAM))
    canvas = paint_background(scene.background, scene.height_px, scene.width_px)
    for item in scene.objects:
        _paste(canvas, item, rng)
    image = Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))
    if scene.text is not None:
        draw_text(image, scene.text)
    return image


def object_masks(scene: Scene) -> npt.NDArray[np.bool_]:
    """Bool masks of shape (objects, height, width), the parts that later objects hide included."""
    masks = np.zeros((len(scene.objects), scene.height_px, scene.width_px), dtype=np.bool_)
    for mask, item in zip(masks, scene.objects, strict=True):
        x0, y0, x1, y1 = item.box_px
        mask[y0:y1, x0:x1] = silhouette(item.kind, *item.size_px, item.rotation_degrees)
    return masks


def _paste(canvas: Floats, item: SceneObject, rng: np.random.Generator) -> None:
    """Blend the object into the canvas, in place, with soft edges: body in soft light, details and outline."""
    width, height = item.size_px
    tile = index_tile(item.kind, width, height, item.rotation_degrees)
    line_at = _outline(tile != EMPTY, 1 if max(width, height) < SMALL_PX else 2)
    line_share, detail_share = _share(line_at), _share((tile == DETAIL) & ~line_at)
    covered = coverage(item.kind, width, height, item.rotation_degrees)
    body_share = covered - line_share - detail_share
    light = _light(height, 13, rng)[:, None] + _light(width, 9, rng)[None, :]
    rgb = colour_rgb(item.colour)
    x0, y0, x1, y1 = item.box_px
    for channel, (tone, line) in enumerate(zip(rgb, contrasting(rgb), strict=True)):
        body = np.float32(tone + rng.uniform(-7, 7))
        ink = body_share * (body + light) + detail_share * (0.3 * body + 0.7 * np.float32(line)) + line_share * line
        part = canvas[y0:y1, x0:x1, channel]
        part *= 1 - covered
        part += ink


def _share(points: npt.NDArray[np.bool_]) -> Floats:
    """Share of each pixel that the points of a supersampled tile fill."""
    return shrink(points.astype(np.float32))


def _light(length: int, strength: float, rng: np.random.Generator) -> Floats:
    """A slow change of brightness along one axis, shape (length,)."""
    start, end = (float(value) for value in rng.uniform(-strength, strength, 2))
    return np.linspace(start, end, length).astype(np.float32)


def _outline(solid: npt.NDArray[np.bool_], thickness: int) -> npt.NDArray[np.bool_]:
    """Points of a bool mask that lie within `thickness` of its outside; the tile's border is outside."""
    padded = np.pad(solid, thickness)
    height, width = solid.shape
    inner = solid.copy()
    for shift in (0, 2 * thickness):
        inner &= padded[shift : shift + height, thickness : thickness + width]
        inner &= padded[thickness : thickness + height, shift : shift + width]
    edge: npt.NDArray[np.bool_] = solid & ~inner
    return edge

"""Where an object may lie: in one clear cell, off the text, and hiding little of the others."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from .kinds import silhouette
from .scene import Scene, SceneObject, centre, overlap_px

CELL_MARGIN: Final = 0.04  # of the side; nearer to a cell border the position would be a matter of taste
MIN_VISIBLE: Final = 0.72
MAX_BOX_OVERLAP: Final = 0.35  # of the smaller box; more would make two objects look like one
MIN_CENTRE_DISTANCE_PX: Final = 17
TEXT_GAP_PX: Final = 3


def is_allowed(candidate: SceneObject, scene: Scene) -> bool:
    """Whether the scene stays readable with this object drawn on top of it."""
    x, y = centre(candidate.box_px)
    if _near_border(x / scene.width_px) or _near_border(y / scene.height_px):
        return False
    if scene.text is not None and overlap_px(candidate.box_px, scene.text.box_px, TEXT_GAP_PX):
        return False
    if any(_too_close(candidate, other) for other in scene.objects):
        return False
    if not any(overlap_px(candidate.box_px, other.box_px) for other in scene.objects):
        return True
    return min(visible_shares((*scene.objects, candidate), scene.width_px, scene.height_px)) >= MIN_VISIBLE


def _near_border(share: float) -> bool:
    return min(abs(share - 1 / 3), abs(share - 2 / 3)) < CELL_MARGIN


def _too_close(a: SceneObject, b: SceneObject) -> bool:
    (ax, ay), (bx, by) = centre(a.box_px), centre(b.box_px)
    smaller = min(a.size_px[0] * a.size_px[1], b.size_px[0] * b.size_px[1])
    near = max(abs(ax - bx), abs(ay - by)) < MIN_CENTRE_DISTANCE_PX
    return near or overlap_px(a.box_px, b.box_px) > MAX_BOX_OVERLAP * smaller


def visible_shares(objects: Sequence[SceneObject], width_px: int, height_px: int) -> list[float]:
    """Share of each object's own drawing that no later object hides."""
    owner = np.full((height_px, width_px), -1, dtype=np.int8)
    areas: list[int] = []
    for index, item in enumerate(objects):
        x0, y0, x1, y1 = item.box_px
        mask = silhouette(item.kind, *item.size_px, item.rotation_degrees)
        owner[y0:y1, x0:x1][mask] = index
        areas.append(int(mask.sum()))
    return [float((owner == index).sum()) / area for index, area in enumerate(areas)]

"""A pen that draws kinds in the unit square onto an index tile."""

from collections.abc import Sequence
from math import cos, pi, sin

from PIL import Image, ImageDraw

Point = tuple[float, float]

# Values of an index tile: nothing, the object's colour, a detail in contrast to that colour.
EMPTY, BODY, DETAIL = 0, 1, 2


class Pen:
    """Draws in coordinates from 0 to 1 (x right, y down) on a tile of whole pixels."""

    def __init__(self, width_px: int, height_px: int) -> None:
        """Start with an empty tile of the given size."""
        self.tile = Image.new("L", (width_px, height_px), EMPTY)
        self._draw = ImageDraw.Draw(self.tile)
        self._scale = (width_px - 1, height_px - 1)

    def _at(self, points: Sequence[Point]) -> list[Point]:
        return [(x * self._scale[0], y * self._scale[1]) for x, y in points]

    def polygon(self, points: Sequence[Point], value: int = BODY) -> None:
        """Fill a polygon."""
        self._draw.polygon(self._at(points), fill=value)

    def box(self, x0: float, y0: float, x1: float, y1: float, value: int = BODY) -> None:
        """Fill an upright rectangle."""
        self._draw.rectangle(self._at([(x0, y0), (x1, y1)]), fill=value)

    def oval(self, x0: float, y0: float, x1: float, y1: float, value: int = BODY) -> None:
        """Fill the ellipse inside a rectangle."""
        self._draw.ellipse(self._at([(x0, y0), (x1, y1)]), fill=value)

    def disc(self, x: float, y: float, radius: float, value: int = BODY) -> None:
        """Fill a circle."""
        self.oval(x - radius, y - radius, x + radius, y + radius, value)

    def slice(self, x0: float, y0: float, x1: float, y1: float, start: float, end: float) -> None:
        """Fill a sector, clockwise from `start` to `end` degrees (0 points right)."""
        self._draw.pieslice(self._at([(x0, y0), (x1, y1)]), start, end, fill=BODY)


def around(count: int, radius: float, turn: float = -0.25) -> list[Point]:
    """`count` points evenly on a circle about the centre; `turn` in full turns, -0.25 is up."""
    angles = [2 * pi * (turn + index / count) for index in range(count)]
    return [(0.5 + radius * cos(angle), 0.5 + radius * sin(angle)) for angle in angles]

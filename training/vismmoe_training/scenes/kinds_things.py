"""Drawings of the things of daily life. A drawing is fitted to its box afterwards."""

from .pen import DETAIL, EMPTY, Pen, around


def tree(pen: Pen) -> None:
    """A fir of three storeys."""
    pen.box(0.4, 0.8, 0.6, 1.0)
    for top, bottom, half in ((0.0, 0.36, 0.28), (0.18, 0.6, 0.39), (0.4, 0.85, 0.5)):
        pen.polygon([(0.5, top), (0.5 + half, bottom), (0.5 - half, bottom)])


def house(pen: Pen) -> None:
    """A gable over a body with door and window."""
    pen.polygon([(0.5, 0.0), (1.0, 0.45), (0.0, 0.45)])
    pen.box(0.12, 0.42, 0.88, 1.0)
    pen.box(0.24, 0.6, 0.44, 1.0, DETAIL)
    pen.box(0.56, 0.56, 0.76, 0.76, DETAIL)


def flower(pen: Pen) -> None:
    """Five round petals about a heart."""
    for x, y in around(5, 0.3):
        pen.disc(x, y, 0.2)
    pen.disc(0.5, 0.5, 0.2)
    pen.disc(0.5, 0.5, 0.14, DETAIL)


def fish(pen: Pen) -> None:
    """A fish that swims to the left."""
    pen.oval(0.0, 0.0, 0.74, 1.0)
    pen.polygon([(0.58, 0.5), (1.0, 0.05), (1.0, 0.95)])
    pen.oval(0.13, 0.28, 0.25, 0.46, DETAIL)


def boat(pen: Pen) -> None:
    """A hull under two sails."""
    pen.polygon([(0.0, 0.68), (1.0, 0.68), (0.8, 1.0), (0.2, 1.0)])
    pen.box(0.45, 0.0, 0.53, 0.7)
    pen.polygon([(0.6, 0.04), (0.6, 0.58), (0.98, 0.58)])
    pen.polygon([(0.38, 0.16), (0.38, 0.58), (0.08, 0.58)])


def car(pen: Pen) -> None:
    """A car from the side."""
    pen.polygon([(0.2, 0.45), (0.32, 0.0), (0.7, 0.0), (0.84, 0.45)])
    pen.box(0.0, 0.4, 1.0, 0.8)
    pen.polygon([(0.29, 0.4), (0.37, 0.12), (0.65, 0.12), (0.74, 0.4)], DETAIL)
    pen.oval(0.12, 0.6, 0.38, 1.0, DETAIL)
    pen.oval(0.62, 0.6, 0.88, 1.0, DETAIL)


def cup(pen: Pen) -> None:
    """A mug with its handle on the right."""
    pen.oval(0.5, 0.18, 1.0, 0.78)
    pen.oval(0.64, 0.34, 0.86, 0.62, EMPTY)
    pen.polygon([(0.0, 0.0), (0.7, 0.0), (0.6, 1.0), (0.1, 1.0)])
    pen.box(0.09, 0.1, 0.61, 0.2, DETAIL)


def key(pen: Pen) -> None:
    """A key with its bow on the left."""
    pen.oval(0.0, 0.0, 0.46, 1.0)
    pen.oval(0.13, 0.29, 0.33, 0.71, EMPTY)
    pen.box(0.42, 0.36, 1.0, 0.64)
    pen.box(0.68, 0.6, 0.79, 0.9)
    pen.box(0.88, 0.6, 1.0, 0.98)


def flag(pen: Pen) -> None:
    """A swallow-tailed flag on a pole."""
    pen.box(0.0, 0.0, 0.13, 1.0)
    pen.polygon([(0.1, 0.03), (1.0, 0.03), (0.78, 0.32), (1.0, 0.6), (0.1, 0.6)])


def mushroom(pen: Pen) -> None:
    """A dotted cap on a thick stem."""
    pen.slice(0.0, 0.0, 1.0, 1.14, 180, 360)
    pen.polygon([(0.36, 0.5), (0.64, 0.5), (0.72, 1.0), (0.28, 1.0)])
    for x, y in ((0.24, 0.36), (0.5, 0.2), (0.76, 0.36)):
        pen.disc(x, y, 0.085, DETAIL)


def umbrella(pen: Pen) -> None:
    """A scalloped canopy over a hooked stick."""
    pen.slice(0.0, 0.0, 1.0, 1.1, 180, 360)
    for x in (1 / 6, 3 / 6, 5 / 6):
        pen.oval(x - 1 / 6, 0.44, x + 1 / 6, 0.68, EMPTY)
    pen.oval(0.18, 0.68, 0.56, 1.0)
    pen.oval(0.29, 0.72, 0.45, 0.9, EMPTY)
    pen.box(0.15, 0.66, 0.44, 0.83, EMPTY)
    pen.box(0.445, 0.3, 0.56, 0.86)


def ladder(pen: Pen) -> None:
    """Two rails with three rungs."""
    for x in (0.0, 0.8):
        pen.box(x, 0.0, x + 0.2, 1.0)
    for y in (0.14, 0.44, 0.74):
        pen.box(0.1, y, 0.9, y + 0.13)


def bell(pen: Pen) -> None:
    """A hand bell with its clapper."""
    pen.disc(0.5, 0.88, 0.12)
    pen.oval(0.42, 0.0, 0.58, 0.2)
    pen.oval(0.22, 0.08, 0.78, 0.8)
    pen.polygon([(0.22, 0.42), (0.78, 0.42), (0.86, 0.7), (1.0, 0.84), (0.0, 0.84), (0.14, 0.7)])


def bottle(pen: Pen) -> None:
    """A long-necked bottle with a label."""
    pen.box(0.32, 0.0, 0.68, 0.4)
    pen.oval(0.0, 0.28, 1.0, 0.68)
    pen.box(0.0, 0.48, 1.0, 1.0)
    pen.box(0.16, 0.62, 0.84, 0.84, DETAIL)

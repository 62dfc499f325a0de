"""Drawings of the plain shapes and signs. A drawing is fitted to its box afterwards."""

from math import cos, pi, sin

from .pen import BODY, EMPTY, Pen, around


def circle(pen: Pen) -> None:
    """A full disc."""
    pen.disc(0.5, 0.5, 0.5)


def square(pen: Pen) -> None:
    """A full square."""
    pen.box(0.0, 0.0, 1.0, 1.0)


def triangle(pen: Pen) -> None:
    """An upright triangle."""
    pen.polygon([(0.5, 0.0), (1.0, 1.0), (0.0, 1.0)])


def star(pen: Pen) -> None:
    """A star of five points."""
    outer, inner = around(5, 0.5), around(5, 0.21, -0.25 + 0.1)
    pen.polygon([point for pair in zip(outer, inner, strict=True) for point in pair])


def heart(pen: Pen) -> None:
    """The usual heart curve."""
    steps = [2 * pi * index / 48 for index in range(48)]
    ys = [13 * cos(t) - 5 * cos(2 * t) - 2 * cos(3 * t) - cos(4 * t) for t in steps]
    pen.polygon([(0.5 + sin(t) ** 3 / 2, (12 - y) / 29) for t, y in zip(steps, ys, strict=True)])


def cross(pen: Pen) -> None:
    """A plus sign."""
    pen.box(0.32, 0.0, 0.68, 1.0)
    pen.box(0.0, 0.32, 1.0, 0.68)


def diamond(pen: Pen) -> None:
    """A tall rhombus."""
    pen.polygon([(0.5, 0.0), (1.0, 0.5), (0.5, 1.0), (0.0, 0.5)])


def pentagon(pen: Pen) -> None:
    """A regular pentagon."""
    pen.polygon(around(5, 0.5))


def ring(pen: Pen) -> None:
    """A disc with a hole."""
    pen.disc(0.5, 0.5, 0.5)
    pen.disc(0.5, 0.5, 0.24, EMPTY)


def moon(pen: Pen) -> None:
    """A waning crescent."""
    pen.disc(0.5, 0.5, 0.5)
    pen.disc(0.8, 0.42, 0.44, EMPTY)


def arrow(pen: Pen) -> None:
    """An arrow to the right."""
    pen.box(0.0, 0.33, 0.55, 0.67)
    pen.polygon([(0.48, 0.0), (1.0, 0.5), (0.48, 1.0)])


def sun(pen: Pen) -> None:
    """A disc with eight separate rays."""
    for index in range(8):
        angle = 2 * pi * index / 8
        along, across = (cos(angle), sin(angle)), (-sin(angle), cos(angle))
        corners = [(0.5, 0.065), (0.36, 0.065), (0.36, -0.065), (0.5, -0.065)]
        pen.polygon([(0.5 + r * along[0] + s * across[0], 0.5 + r * along[1] + s * across[1]) for r, s in corners])
    pen.disc(0.5, 0.5, 0.29)


def crown(pen: Pen) -> None:
    """Three spikes on a band."""
    pen.polygon([(0.0, 0.1), (0.27, 0.5), (0.5, 0.0), (0.73, 0.5), (1.0, 0.1), (0.9, 1.0), (0.1, 1.0)], BODY)


def cloud(pen: Pen) -> None:
    """Three puffs on a flat base."""
    pen.oval(0.0, 0.42, 0.45, 1.0)
    pen.oval(0.18, 0.0, 0.68, 0.85)
    pen.oval(0.5, 0.25, 1.0, 1.0)
    pen.box(0.2, 0.7, 0.76, 0.99)

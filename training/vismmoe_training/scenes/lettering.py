"""Text on a plain plate, in Pillow's built-in font so that no system font is needed."""

import itertools
from functools import lru_cache
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from .scene import SceneText
from .vocabulary import Rgb, colour_rgb, luminance

PAD_PX: Final = 4
LIGHT: Final[Rgb] = (250, 250, 246)
DARK: Final[Rgb] = (14, 14, 18)


@lru_cache(maxsize=64)
def font(size_px: int) -> ImageFont.FreeTypeFont:
    """The built-in scalable font; reading it takes longer than drawing a scene, hence the cache."""
    loaded = ImageFont.load_default(size=size_px)
    if not isinstance(loaded, ImageFont.FreeTypeFont):
        raise TypeError("Pillow was built without FreeType, which the scalable font needs")
    return loaded


def plate_size(text: str, font_px: int) -> tuple[int, int]:
    """Width and height in pixels of the plate that holds the text."""
    left, _, right, _ = font(font_px).getbbox(text, anchor="ls")
    return int(right - left) + 2 * PAD_PX, font_px + 6


def character_centres(text: SceneText) -> list[float]:
    """Middle of each character along the picture's width, in pixels."""
    face = font(text.font_px)
    start = text.box_px[0] + PAD_PX - face.getbbox(text.text, anchor="ls")[0]
    ends = [face.getlength(text.text[:count]) for count in range(len(text.text) + 1)]
    return [start + (left + right) / 2 for left, right in itertools.pairwise(ends)]


def contrasting(rgb: Rgb) -> Rgb:
    """A near white or near black that stands out against the colour."""
    return DARK if luminance(rgb) > 0.45 else LIGHT


def draw_text(image: Image.Image, text: SceneText) -> None:
    """Paint plate and text onto an RGB image, in place."""
    x0, y0, x1, y1 = text.box_px
    ink = colour_rgb(text.colour)
    draw = ImageDraw.Draw(image)
    draw.rectangle((x0, y0, x1 - 1, y1 - 1), fill=contrasting(ink))
    left = font(text.font_px).getbbox(text.text, anchor="ls")[0]
    baseline = y0 + 3 + round(0.8 * text.font_px)
    draw.text((x0 + PAD_PX - left, baseline), text.text, fill=ink, font=font(text.font_px), anchor="ls")

"""From whatever names an image to an upright, opaque RGB picture.

Order matters and is the same for every source: decode, make smaller what is far larger than any vision tower looks
at, turn by EXIF (once), flatten transparency on white, bring to 8-bit RGB. A JPEG is made smaller while it is decoded,
so that a photograph of 108 million pixels takes the memory of 27; other formats must be decoded whole and have a
limit. All refusals are ImageError with a sentence. What was left out of a source (later frames, pixels) is noted in
the picture's `info`, so that a report can say it.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from vismmoe.errors import ImageError
from vismmoe.fetch import fetch

ImageSource = str | Path | bytes | Image.Image  # path, http(s) URL, data URL, "-" for stdin; encoded bytes; a picture

MAX_BYTES = 256 * 1024**2  # encoded size
MAX_PIXELS = 89_478_485  # that are decoded; Pillow warns of more
ENOUGH_PIXELS = 4096 * 4096  # the most that a family's processor leaves of a picture, unless it is told otherwise
SHRINKING = 4  # pictures with so many times the pixels that are enough are made smaller before the processor sees them
NOTE = "vismmoe_note"  # key in a picture's info
DRAFTS = ("JPEG", "MPO")  # formats that can be decoded at a half, a quarter or an eighth of their sides
# Raster formats that Pillow decodes by itself; EPS and friends start other programs.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")


TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # EXIF orientation -> what makes it upright


def load_images(sources: Iterable[ImageSource], enough: int = ENOUGH_PIXELS) -> tuple[Image.Image, ...]:
    """All images of a request, in order; stdin may be named once."""
    listed = list(sources)
    if sum(source == "-" for source in listed if isinstance(source, str)) > 1:
        raise ImageError("'-' (standard input) can be given for one image only")
    return tuple(load_image(source, enough) for source in listed)


def load_image(source: ImageSource, enough: int = ENOUGH_PIXELS) -> Image.Image:
    """Return mode "RGB", upright, opaque. Of an animation the first frame counts. Of a picture with SHRINKING times
    `enough` pixels about as many are left.

    Raises ImageError when the source cannot be read, is no image, or is too large.
    """
    name = describe(source)
    if isinstance(source, Image.Image):
        with _damage_told(name):
            return _normalise(source, name, enough)
    return decode(_read(source, name), name, enough)


def notes_of(images: Iterable[Image.Image]) -> tuple[str, ...]:
    """What was left out of the images of a request, each sentence once."""
    return tuple(dict.fromkeys(note for image in images for note in image.info.get(NOTE, ())))


def decode(data: bytes, name: str, enough: int = ENOUGH_PIXELS) -> Image.Image:
    """Decode one encoded image of at most MAX_BYTES; `name` is for the messages."""
    if not data:
        raise ImageError(f"{name} is empty: give a PNG, JPEG, WebP, GIF, BMP or TIFF image")
    if len(data) > MAX_BYTES:
        raise ImageError(f"{name} has {len(data)} bytes, more than the {MAX_BYTES} that are read of one image")
    with _damage_told(name, data[:16]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of size; the limit below decides
        Image.init()  # registers all formats; which of them are built in differs between machines
        with Image.open(io.BytesIO(data), formats=[kind for kind in FORMATS if kind in Image.OPEN]) as image:
            image.info.pop(NOTE, None)
            size = image.size
            if image.format in DRAFTS and _factor(size, enough) > 1:
                image.draft(image.mode, tuple(side // _factor(size, enough) for side in size))
            _check_pixels(image, name)
            image.load()
            return _normalise(image, name, enough, size)


@contextmanager
def _damage_told(name: str, start: bytes = b"") -> Iterator[None]:
    """Pillow's decoders answer damaged files with almost anything: one sentence instead."""
    try:
        yield
    except UnidentifiedImageError:
        raise ImageError(f"{name} is no image in a known format (it starts with {start!r})") from None
    except Image.DecompressionBombError:
        raise ImageError(f"{name} would decode to far more than {MAX_PIXELS} pixels: scale it down first") from None
    except ImageError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ImageError(f"{name} is damaged and cannot be decoded ({error})") from None


def describe(source: ImageSource) -> str:
    """A short name for messages: never the whole of a data URL."""
    if isinstance(source, Image.Image):
        return "an image handed over in memory"
    if isinstance(source, bytes):
        return f"an image of {len(source)} bytes"
    text = str(source)
    if text == "-":
        return "the image on standard input"
    if text[:5].lower() == "data:":
        return f"the data URL {text[:32]}…"
    return text


def _read(source: str | Path | bytes, name: str) -> bytes:
    if isinstance(source, bytes):
        return source
    text = str(source)
    if text == "-":
        return sys.stdin.buffer.read(MAX_BYTES + 1)
    scheme = text.split(":", 1)[0].lower() if ":" in text else ""
    if scheme == "data":
        return _data_url(text, name)
    if scheme in ("http", "https") and "//" in text:
        return fetch(text, max_bytes=MAX_BYTES)
    if "://" in text:
        raise ImageError(f"{name}: {scheme} addresses are not read; give a path, an http(s) or a data URL")
    return _read_file(Path(source), name)


def _read_file(path: Path, name: str) -> bytes:
    try:
        if path.is_dir():
            raise ImageError(f"{name} is a folder, not an image")
        if path.exists() and not path.is_file():
            raise ImageError(f"{name} is no regular file; pipe it in and give '-' instead")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ImageError(f"there is no image at {name}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ImageError(f"the image {name} cannot be read ({error})") from None


def _data_url(text: str, name: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        raise ImageError(f"{name} has no comma between its type and its data")
    try:
        if head.lower().endswith(";base64"):
            return base64.b64decode("".join(unquote_to_bytes(body).decode("ascii").split()), validate=True)
        return unquote_to_bytes(body)
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ImageError(f"{name} is not valid base64 ({error})") from None


def _check_pixels(image: Image.Image, name: str) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{name} is {width} x {height}, more than the {MAX_PIXELS} pixels that are decoded: scale it down first, "
            "or give a JPEG, which can be read at a part of its size"
        )


def _factor(size: tuple[int, int], enough: int) -> int:
    """By how much both sides may be divided so that `enough` pixels are left; 1 for a picture that is not far larger,
    and for a strip, whose shape would change."""
    pixels = size[0] * size[1]
    return min(math.isqrt(pixels // enough), max(1, min(size) // 64)) if pixels >= SHRINKING * enough else 1


def _normalise(image: Image.Image, name: str, enough: int, size: tuple[int, int] | None = None) -> Image.Image:
    """size: before a draft. Returns `image` itself where nothing is to be done."""
    _check_pixels(image, name)
    size = image.size if size is None else size
    kept = image.info.get(NOTE, ())
    notes = dict.fromkeys(kept if isinstance(kept, tuple) else ())
    if (left := _left_out(image, name)) is not None:
        notes[left] = None
    out = _upright(_to_rgb(_smaller(image, enough), image), image)
    if math.prod(out.size) < math.prod(size):
        told = f"{name} ({size[0]} x {size[1]}) was read at {out.width} x {out.height} before the model's own resizing"
        notes[told] = None
    if out is image and (type(image) is not Image.Image or set(image.info) - {NOTE}):
        out = image.copy()  # a plain picture, of which nothing is left to be applied
    if out is not image:
        out.info = {NOTE: tuple(notes)} if notes else {}
    return out


def _smaller(image: Image.Image, enough: int) -> Image.Image:
    factor = _factor(image.size, enough)
    if factor == 1:
        return image
    if image.mode in ("P", "1"):  # whose numbers are no shades
        image = image.convert("RGBA" if "transparency" in image.info else "RGB")
    return image.resize((image.width // factor, image.height // factor), Image.Resampling.BOX)


def _upright(image: Image.Image, source: Image.Image) -> Image.Image:
    """Turned as the EXIF block of `source` says."""
    try:
        turn = source.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # a damaged EXIF block is no reason to refuse the picture
        return image
    method = TURNS.get(turn) if isinstance(turn, int) else None
    return image if method is None else image.transpose(method)


def _left_out(image: Image.Image, name: str) -> str | None:
    """A sentence if only a part of `image` is looked at. The second picture in a phone's MPO is a thumbnail."""
    try:
        several = getattr(image, "is_animated", False) and image.format != "MPO"
    except (OSError, ValueError, EOFError):  # a damaged later frame
        several = True
    return f"{name} has several frames or pages: only the first is looked at" if several else None


def _to_rgb(image: Image.Image, source: Image.Image) -> Image.Image:
    """`image` on white, in 8-bit RGB; `source`: what it was before it was made smaller, whose palette may be in part
    transparent."""
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in source.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    if image.mode[:1] in ("I", "F"):
        return _wide_gray(image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _wide_gray(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float gray to 8 bits: Pillow's own conversion would clip instead of scale."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    top = float(values.max(initial=0.0))
    if image.mode.startswith("I;16") or top > 255:
        values = values / (257.0 if top <= 65535 else top / 255)
    elif image.mode == "F" and top <= 1.0:
        values = values * 255
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))

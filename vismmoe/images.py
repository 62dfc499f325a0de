"""From whatever names an image to an upright, opaque RGB picture.

Order matters and is the same for every source: decode, turn by EXIF (once), flatten transparency on white, bring
to 8-bit RGB. All refusals are ImageError with a sentence. What was left out of a source (later frames) is noted in the
picture's `info`, so that a report can say it.
"""

from __future__ import annotations

import base64
import binascii
import io
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vismmoe.errors import ImageError
from vismmoe.fetch import fetch

ImageSource = str | Path | bytes | Image.Image  # path, http(s) URL, data URL, "-" for stdin; encoded bytes; a picture

MAX_BYTES = 256 * 1024**2  # encoded size
MAX_PIXELS = 160_000_000  # decoded size: a 12000 x 9000 photograph passes, a bomb does not
# Raster formats that Pillow decodes by itself; EPS and friends start other programs.
NOTE = "vismmoe_note"  # key in a picture's info
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")


def load_images(sources: Iterable[ImageSource]) -> tuple[Image.Image, ...]:
    """All images of a request, in order; stdin may be named once."""
    listed = list(sources)
    if sum(source == "-" for source in listed if isinstance(source, str)) > 1:
        raise ImageError("'-' (standard input) can be given for one image only")
    return tuple(load_image(source) for source in listed)


def load_image(source: ImageSource) -> Image.Image:
    """Return mode "RGB", upright, opaque. Of an animation the first frame counts.

    Raises ImageError when the source cannot be read, is no image, or is too large.
    """
    name = describe(source)
    if isinstance(source, Image.Image):
        with _damage_told(name):
            return _normalise(source, name)
    return decode(_read(source, name), name)


def notes_of(images: Iterable[Image.Image]) -> tuple[str, ...]:
    """What was left out of the images of a request, each sentence once."""
    return tuple(dict.fromkeys(str(image.info[NOTE]) for image in images if NOTE in image.info))


def decode(data: bytes, name: str) -> Image.Image:
    """Decode one encoded image of at most MAX_BYTES; `name` is for the messages."""
    if not data:
        raise ImageError(f"{name} is empty: give a PNG, JPEG, WebP, GIF, BMP or TIFF image")
    if len(data) > MAX_BYTES:
        raise ImageError(f"{name} has {len(data)} bytes, more than the {MAX_BYTES} that are read of one image")
    with _damage_told(name, data[:16]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of size; the limit below decides
        Image.init()  # registers all formats; which of them are built in differs between machines
        with Image.open(io.BytesIO(data), formats=[kind for kind in FORMATS if kind in Image.OPEN]) as image:
            _check_pixels(image, name)
            image.load()
            return _normalise(image, name)


@contextmanager
def _damage_told(name: str, start: bytes = b"") -> Iterator[None]:
    """Pillow's decoders answer damaged files with almost anything: one sentence instead."""
    try:
        yield
    except UnidentifiedImageError:
        raise ImageError(f"{name} is no image in a known format (it starts with {start!r})") from None
    except Image.DecompressionBombError:
        raise ImageError(f"{name} would decode to more than {MAX_PIXELS} pixels: scale it down first") from None
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
        raise ImageError(f"{name} is {width} x {height}, more than {MAX_PIXELS} pixels: scale it down first")


def _normalise(image: Image.Image, name: str) -> Image.Image:
    _check_pixels(image, name)
    try:
        upright = ImageOps.exif_transpose(image)
    except Exception:  # a damaged EXIF block is no reason to refuse the picture
        upright = image
    out = _to_rgb(upright)
    note = image.info.get(NOTE) or _left_out(image, name)
    out.info = {} if note is None else {NOTE: note}
    return out


def _left_out(image: Image.Image, name: str) -> str | None:
    """A sentence if only a part of `image` is looked at. The second picture in a phone's MPO is a thumbnail."""
    try:
        several = getattr(image, "is_animated", False) and image.format != "MPO"
    except (OSError, ValueError, EOFError):  # a damaged later frame
        several = True
    return f"{name} has several frames or pages: only the first is looked at" if several else None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    if image.mode[:1] in ("I", "F"):
        return _wide_gray(image).convert("RGB")
    return image.convert("RGB") if image.mode != "RGB" else image.copy()


def _wide_gray(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float gray to 8 bits: Pillow's own conversion would clip instead of scale."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    top = float(values.max(initial=0.0))
    if image.mode.startswith("I;16") or top > 255:
        values = values / (257.0 if top <= 65535 else top / 255)
    elif image.mode == "F" and top <= 1.0:
        values = values * 255
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))

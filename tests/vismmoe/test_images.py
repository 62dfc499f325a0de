"""Images of every kind come out upright, opaque, RGB; everything else is refused in a sentence."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vismmoe.images as images
from vismmoe.errors import ImageError
from vismmoe.images import decode, load_image, load_images, notes_of


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.fixture
def halves() -> Image.Image:
    """8 x 4: the left half red, the right half blue."""
    image = Image.new("RGB", (8, 4), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 4, 4))
    return image


def test_path_bytes_data_url_and_picture_are_the_same(halves: Image.Image, tmp_path: Path) -> None:
    data = encoded(halves)
    (tmp_path / "ä b.png").write_bytes(data)
    sources = [
        str(tmp_path / "ä b.png"), tmp_path / "ä b.png", data, halves,
        "data:image/png;base64," + base64.b64encode(data).decode(),
        "data:image/png;base64," + base64.encodebytes(data).decode().replace("+", "%2B"),
    ]  # fmt: skip
    for image in load_images(sources):
        assert image.mode == "RGB"
        assert image.tobytes() == halves.tobytes()


def test_standard_input_is_read_once(halves: Image.Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(encoded(halves))))
    assert load_image("-").size == (8, 4)
    with pytest.raises(ImageError, match="one image only"):
        load_images(["-", "-"])


def test_exif_orientation_is_applied_exactly_once(halves: Image.Image) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    turned = decode(encoded(halves, exif=exif.tobytes()), "x")
    assert turned.size == (4, 8)
    assert turned.getpixel((0, 0)) == (255, 0, 0)
    again = load_image(turned)
    assert again.tobytes() == turned.tobytes()


def test_a_damaged_exif_block_does_not_hide_the_picture(halves: Image.Image) -> None:
    data = encoded(halves, "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff", quality=95)
    assert decode(data, "x").size == (8, 4)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "GIF"])
def test_transparency_lies_on_white(kind: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((0, 128, 0, 255), (0, 0, 2, 4))
    options = {"lossless": True} if kind == "WEBP" else {}
    told = decode(encoded(image, kind, **options), "x")
    assert told.getpixel((3, 3)) == (255, 255, 255)
    assert told.getpixel((0, 0)) == pytest.approx((0, 128, 0), abs=2)


def test_a_palette_with_a_transparent_entry_lies_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    told = decode(encoded(image, transparency=0), "x")
    assert [told.getpixel((0, 0)), told.getpixel((1, 0))] == [(255, 255, 255), (40, 50, 60)]


def test_half_transparent_gray_is_mixed_with_white() -> None:
    told = decode(encoded(Image.new("LA", (1, 1), (0, 128))), "x")
    assert told.getpixel((0, 0)) == pytest.approx((127, 127, 127), abs=1)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    values = np.array([[0, 32768, 65535]], dtype=np.uint16)
    told = decode(encoded(Image.fromarray(values)), "x")
    assert [told.getpixel((x, 0))[0] for x in range(3)] == pytest.approx([0, 128, 255], abs=1)


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_float_images_are_read_by_their_range(top: float) -> None:
    told = decode(encoded(Image.fromarray(np.array([[0, top]], dtype=np.float32)), "TIFF"), "x")
    assert [told.getpixel((x, 0))[0] for x in range(2)] == [0, 255]


def test_cmyk_gray_and_bilevel_become_rgb() -> None:
    assert decode(encoded(Image.new("CMYK", (2, 2), (255, 0, 0, 0)), "TIFF"), "x").getpixel((0, 0)) == (0, 255, 255)
    assert decode(encoded(Image.new("L", (2, 2), 77)), "x").getpixel((0, 0)) == (77, 77, 77)
    assert decode(encoded(Image.new("1", (2, 2), 1)), "x").getpixel((0, 0)) == (255, 255, 255)


def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    first = decode(data, "x.gif")
    assert first.getpixel((0, 0)) == (255, 0, 0)
    told = ("x.gif has several frames or pages: only the first is looked at",)
    assert notes_of([first, first, Image.new("RGB", (3, 3))]) == told
    assert notes_of(load_images([first])) == told, "a picture that was loaded before keeps its note"
    phone = decode(encoded(frames[0], "MPO", save_all=True, append_images=frames[1:]), "x.jpg")
    assert notes_of([phone, decode(encoded(frames[0], "GIF"), "y.gif")]) == ()


def test_damage_in_a_picture_that_was_only_opened_is_told(make_picture: Callable[..., Image.Image]) -> None:
    with (
        Image.open(io.BytesIO(encoded(make_picture(64, 64))[:3000])) as lazy,
        pytest.raises(ImageError, match="damaged"),
    ):
        load_image(lazy)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    with pytest.raises(ImageError, match="pixels"):
        decode(bomb, "bomb.png")


def test_a_large_photograph_is_read_at_a_part_of_its_size_and_this_is_told(halves: Image.Image) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(halves.resize((1200, 600)), "JPEG", quality=95, exif=exif.tobytes())
    told = decode(data, "photo.jpg", enough=150 * 100)
    assert told.size == (150, 300), (
        "1200 x 600 has 48 times the pixels: a quarter of each side is left, and it is turned"
    )
    assert told.getpixel((75, 20)) == pytest.approx((255, 0, 0), abs=3)
    assert notes_of([told]) == ("photo.jpg (1200 x 600) was read at 150 x 300 before the model's own resizing",)
    assert notes_of(load_images([told])) == notes_of([told]), "once, however often it is handed over"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "L", "I;16", "CMYK", "1"])
def test_pictures_of_every_kind_can_be_made_smaller(halves: Image.Image, mode: str) -> None:
    large = halves.resize((512, 256), Image.Resampling.NEAREST)
    if mode == "I;16":
        large = Image.fromarray(np.asarray(large.convert("L"), dtype=np.uint16) * 257)
    data = encoded(large.convert(mode, dither=Image.Dither.NONE) if mode != "I;16" else large, "TIFF")
    small, whole = decode(data, "x", enough=100 * 100), decode(data, "x")
    assert (small.size, whole.size) == ((170, 85), (512, 256))
    for share in (0.25, 0.75):
        here, there = (one.getpixel((int(share * one.width), one.height // 2)) for one in (small, whole))
        assert here == pytest.approx(there, abs=2)


def test_what_is_not_far_larger_than_enough_is_left_to_the_model_s_processor(make_picture: Any) -> None:
    picture = make_picture(199, 200)
    assert load_image(picture, 100 * 100) is picture
    assert load_image(make_picture(20, 9000), 100).size == (20, 9000), "a strip keeps its shape"


def test_what_can_only_be_decoded_whole_has_a_limit_that_a_jpeg_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 300 * 200)
    large = Image.new("RGB", (600, 400), "green")
    with pytest.raises(ImageError, match=r"600 x 400, more than the 60000 pixels .* give a JPEG"):
        decode(encoded(large), "x", enough=100 * 100)
    assert decode(encoded(large, "JPEG"), "x", enough=100 * 100).size == (150, 100)
    with pytest.raises(ImageError, match="in memory"):
        load_image(large)


@pytest.mark.parametrize("length", [0, 3, 40, 200])
def test_a_cut_off_file_is_refused_by_name(make_picture: Callable[..., Image.Image], length: int) -> None:
    with pytest.raises(ImageError, match=r"cut\.png"):
        decode(encoded(make_picture(32, 32))[:length], "cut.png")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("none.png", "no image at"),
        (".", "folder"),
        ("/dev/null", "no regular file"),
        ("a\0b", "cannot be read"),
        (b"<html>not an image</html>", "known format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "known format"),
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,@@@", "base64"),
        ("data:image/png;base64,", "empty"),
        ("ftp://example.org/a.png", "ftp"),
        ("file:///etc/passwd", "file"),
    ],
)
def test_what_is_no_image_is_refused_in_a_sentence(source: Any, told: str) -> None:
    with pytest.raises(ImageError, match=told):
        load_image(source)


def test_messages_do_not_repeat_a_data_url() -> None:
    with pytest.raises(ImageError) as raised:
        load_image("data:image/png;base64," + "A" * 10_000)
    assert len(str(raised.value)) < 300

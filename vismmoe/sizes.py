"""Sizes in bytes, as people write them: `6GiB`, `512MiB`, `1.5GB`, or a plain number of bytes."""

from __future__ import annotations

import re

from vismmoe.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_WRITTEN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes meant by `text`; a fraction of a byte is cut off. UsageError if it is no size.

    `GB` is 10**9 and `GiB` is 2**30. `G` alone is refused, since it means one to some and the other to others.
    """
    match = _WRITTEN.fullmatch(str(text).strip())
    if match is None or match[2].lower() not in _UNITS:
        raise UsageError(
            f"{str(text)!r} is not a size. Write it like 6GiB, 512MiB, 1.5GB or as a plain number of bytes."
        )
    number, unit = match[1], _UNITS[match[2].lower()]
    # Whole numbers stay exact: a float would round sizes above 2**53 bytes.
    return int(float(number) * unit) if "." in number else int(number) * unit


def format_size(size_bytes: int) -> str:
    """`size_bytes` for people to read, in binary units with three digits: 1536 -> '1.50 KiB'."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    unit = ""
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007 (the unit at which it stops is the result)
        value /= 1024
        if abs(value) < 1023.5:
            break
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"

"""How far a long job is: a bar on a terminal, a line every few seconds elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
LINE_EVERY_S = 5.0


def track(items: Iterable[T], total: int | None, what: str, unit: str = "items") -> Iterator[T]:
    """Hand on `items` and tell how many are done and how many a second; `total` is None where nobody knows."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(items, total=total, desc=what, unit=f" {unit}", file=sys.stderr, dynamic_ncols=True)
        return
    started = told = time.monotonic()
    of_all = "" if total is None else f" of {total}"
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - told >= LINE_EVERY_S:
            told = now
            rate = done / (now - started)
            print(f"{what}: {done}{of_all} {unit}, {rate:.1f} {unit}/s", file=sys.stderr, flush=True)
        yield item

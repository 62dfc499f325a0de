"""What the disk under a checkpoint can do, and how to make it cold."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_BLOCK = 4096


def make_cold(files: Iterable[Path]) -> None:
    """Take the files out of the page cache."""
    for file in files:
        with suppress(OSError, AttributeError):
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def direct_rate(file: Path, piece_bytes: int, total_bytes: int = 1 << 30, threads: Iterable[int] = (1, 2, 4)) -> float:
    """Bytes a second of direct reads of pieces all over the file: the best of several numbers of threads.

    Falls back to the page cache, made cold before, where the file system has no direct reads.
    """
    piece = max(_BLOCK, piece_bytes // _BLOCK * _BLOCK)
    places = range(0, max(piece, file.stat().st_size - piece), piece)
    return max(_rate(file, piece, list(places)[: max(1, total_bytes // piece)], count) for count in threads)


def _rate(file: Path, piece: int, places: list[int], threads: int) -> float:
    make_cold([file])
    done = [0] * threads

    def read(number: int) -> None:
        descriptor = _open_direct(file)
        block = memoryview(mmap.mmap(-1, piece))
        try:
            for place in places[number::threads]:
                done[number] += os.preadv(descriptor, [block], place)
        finally:
            os.close(descriptor)

    workers = [threading.Thread(target=read, args=(number,)) for number in range(threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - started)


def _open_direct(file: Path) -> int:
    with suppress(OSError):
        return os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    return os.open(file, os.O_RDONLY)

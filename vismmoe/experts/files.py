"""One checkpoint file, read in large blocks: past the page cache (O_DIRECT) where that is proven to work."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from vismmoe.errors import CheckpointError

BLOCK = 4096  # alignment of offset, length and memory that every O_DIRECT file system accepts
STAGING_BYTES = 4 << 20  # the longest direct read: longer ones gain nothing more
_PROBE_BYTES = 16 * BLOCK
_MAX_BUFFERS = 1024  # IOV_MAX on Linux
_UNSTAGED_BYTES = 64 << 10  # from here on two small reads at the edges cost less than copying what lies between


class StagingPool:
    """Page-aligned read buffers, as many as there are reads at the same time (readers, and the thread that waits)."""

    def __init__(self, expert_bytes: int) -> None:
        self.block_bytes = min(STAGING_BYTES, -(-expert_bytes // BLOCK) * BLOCK + 2 * BLOCK)
        self._free: list[memoryview] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """(block_bytes,) bytes, for the length of the block."""
        with self._lock:
            block = self._free.pop() if self._free else None
        if block is None:
            block = memoryview(mmap.mmap(-1, self.block_bytes))
        try:
            yield block
        finally:
            with self._lock:
                self._free.append(block)


class ExpertFile:
    """One file, open for reading from any number of threads."""

    def __init__(self, path: Path, needed_bytes: int) -> None:
        """Raises CheckpointError when the file is missing or shorter than `needed_bytes`."""
        self.path = path
        self._direct: int | None = None
        self._anywhere = False  # direct reads may end in memory of any alignment
        try:
            self._buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror}. Is the checkpoint complete?") from error
        self._state = self._now()
        size = self._state[0]
        if size < needed_bytes:
            self.close()
            raise CheckpointError(
                f"{path} is {size} bytes long, but its experts reach to byte {needed_bytes}: the file is truncated. "
                "Download or copy it again."
            )

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct is not None

    @property
    def changed(self) -> bool:
        """Whether somebody has written to the file since it was opened."""
        return self._now() != self._state

    def close(self) -> None:
        """Close the file; twice is harmless. No read may be going on."""
        for fd in (self._buffered, self._direct):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._buffered, self._direct = -1, None

    def try_direct(self, offset: int, staging: StagingPool) -> str | None:
        """Turn direct I/O on if the bytes near `offset` come out the same both ways; else say why not."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return "this system has no O_DIRECT"
        try:
            self._direct = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | flag)
            reason = None if self._same_both_ways(offset, staging, 0) else "it returned other bytes than a normal read"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason and self._direct is not None:
            os.close(self._direct)
            self._direct = None
        if self._direct is not None:
            os.posix_fadvise(self._buffered, 0, 0, os.POSIX_FADV_RANDOM)  # what is read here are edges of one block
            with suppress(OSError):  # EINVAL: an older kernel, or a device that wants aligned memory
                self._anywhere = self._same_both_ways(offset, staging, -offset % BLOCK)
        return reason

    def read(self, offset: int, buffers: Sequence[memoryview], staging: StagingPool) -> None:
        """Fill the buffers, one after the other, with the bytes that start at `offset`. Raises CheckpointError."""
        try:
            if self._direct is None:
                self._read_plain(self._buffered, offset, buffers)
            elif _aligned(offset, buffers):
                self._read_plain(self._direct, offset, buffers)
            elif self._anywhere and min(map(len, buffers)) >= _UNSTAGED_BYTES:
                for buffer in buffers:
                    self._read_unstaged(self._direct, offset, buffer)
                    offset += len(buffer)
            else:
                with staging.borrow() as block:
                    self._read_staged(self._direct, offset, buffers, block)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read at byte {offset}: {error.strerror or error}") from error

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._buffered)
        return state.st_size, state.st_mtime_ns

    def _same_both_ways(self, offset: int, staging: StagingPool, shift: int) -> bool:
        """Whether a direct read into memory that is `shift` bytes off a page's start brings the same bytes."""
        assert self._direct is not None
        start = offset - offset % BLOCK
        with staging.borrow() as block:
            room = min(_PROBE_BYTES, len(block) - BLOCK)
            got = os.preadv(self._direct, [block[shift : shift + room]], start)
            return got > 0 and bytes(block[shift : shift + got]) == os.pread(self._buffered, got, start)

    def _read_plain(self, fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
        left = list(buffers)
        while left:
            got = os.preadv(fd, left[:_MAX_BUFFERS], offset)  # without the GIL
            if got == 0:
                raise self._ended(offset)
            offset += got
            left = _after(left, got)
            if left and fd == self._direct and got % BLOCK:
                raise self._ended(offset)  # only the end of a file cuts a direct read within a block

    def _read_unstaged(self, fd: int, offset: int, buffer: memoryview) -> None:
        """Whole blocks straight to their place, the edges through the page cache: nothing large is copied."""
        end = offset + len(buffer)
        first, last = -(-offset // BLOCK) * BLOCK, end - end % BLOCK
        self._read_plain(fd, first, [buffer[first - offset : last - offset]])
        for start, stop in ((offset, first), (last, end)):
            if stop > start:
                self._read_plain(self._buffered, start, [buffer[start - offset : stop - offset]])

    def _read_staged(self, fd: int, offset: int, buffers: Sequence[memoryview], block: memoryview) -> None:
        """Read whole blocks around the wanted bytes and copy these out."""
        left, source = list(buffers), np.frombuffer(block, np.uint8)
        end = offset + sum(len(buffer) for buffer in left)
        while offset < end:
            start = offset - offset % BLOCK
            want = min(len(block), -(-(end - start) // BLOCK) * BLOCK)
            got = os.preadv(fd, [block[:want]], start)
            skip, useful = offset - start, min(start + got, end) - offset
            if useful <= 0:
                raise self._ended(offset)
            _scatter(source[skip : skip + useful], left)
            left = _after(left, useful)
            offset += useful

    def _ended(self, offset: int) -> CheckpointError:
        return CheckpointError(f"{self.path} ends at byte {offset}, before its experts do: the file was truncated.")


def _aligned(offset: int, buffers: Sequence[memoryview]) -> bool:
    if offset % BLOCK or any(len(buffer) % BLOCK for buffer in buffers):
        return False
    return all(np.frombuffer(buffer, np.uint8).ctypes.data % BLOCK == 0 for buffer in buffers)


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is still to fill when `count` bytes have been."""
    done = 0
    while done < len(buffers) and count >= len(buffers[done]):
        count -= len(buffers[done])
        done += 1
    rest = buffers[done:]
    if count:
        rest[0] = rest[0][count:]
    return rest


def _scatter(source: np.ndarray[tuple[int], np.dtype[np.uint8]], buffers: Sequence[memoryview]) -> None:
    """Copy the source over the buffers, in order; numpy copies without the GIL, slices of memoryviews do not."""
    start = 0
    for buffer in buffers:
        count = min(len(buffer), len(source) - start)
        if count == 0:
            return
        np.copyto(np.frombuffer(buffer, np.uint8)[:count], source[start : start + count])
        start += count

"""One checkpoint file, read in large blocks: past the page cache (O_DIRECT) where that is proven to work."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vismmoe.errors import CheckpointError
from vismmoe.experts.places import BLOCK, Places
from vismmoe.types import ExpertLayout

STAGING_BYTES = 4 << 20  # the longest direct read: longer ones gain nothing more
_PROBE_BYTES = 16 * BLOCK
_MAX_BUFFERS = 1024  # IOV_MAX on Linux


class StagingPool:
    """Page-aligned read buffers, as many as there are reads at the same time (readers, and the thread that waits)."""

    def __init__(self, expert_bytes: int) -> None:
        self.block_bytes = _staging_block(expert_bytes)
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


def staging_bytes(layout: ExpertLayout, readers: int) -> int:
    """What so many threads that read touch of their staging at most. Of large experts the one that waits reads, too."""
    places, block = Places.in_host_memory(layout), _staging_block(layout.expert_bytes)
    if not places.shifts:
        return readers * block
    in_place = all(piece.in_place for expert, held in layout.ranges.items() for piece in places.pieces(expert, held))
    return 0 if in_place else (readers + 1) * block


def _staging_block(expert_bytes: int) -> int:
    return min(STAGING_BYTES, -(-expert_bytes // BLOCK) * BLOCK + 2 * BLOCK)


class ExpertFile:
    """One file, open for reading from any number of threads."""

    def __init__(self, path: Path, needed_bytes: int) -> None:
        """Raises CheckpointError when the file is missing or shorter than `needed_bytes`."""
        self.path = path
        self._direct: int | None = None
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
            reason = None if self._same_both_ways(offset, staging) else "it returned other bytes than a normal read"
        except OSError as error:
            reason = error.strerror or str(error)
        if reason and self._direct is not None:
            os.close(self._direct)
            self._direct = None
        return reason

    def read(self, offset: int, buffers: Sequence[memoryview], staging: StagingPool) -> None:
        """Fill the buffers, one after the other, with the bytes that start at `offset`. Raises CheckpointError."""
        with self._told(offset):
            if self._direct is None or _aligned(offset, buffers):
                self._read_plain(self._buffered if self._direct is None else self._direct, offset, buffers)
            else:
                self._read_staged(self._direct, offset, buffers, staging)

    def read_within(self, offset: int, length: int, room: memoryview, at: int, staging: StagingPool) -> None:
        """Bring `length` bytes from `offset` on to room[at:]; what lies around them in the file may go around them.

        Whole blocks go straight to where room[at:] begins as far into a block of memory as `offset` does into one of
        the file. Raises CheckpointError.
        """
        wanted = room[at : at + length]
        with self._told(offset):
            if self._direct is None:
                self._read_plain(self._buffered, offset, [wanted])
                return
            start, stop = offset - offset % BLOCK, -(-(offset + length) // BLOCK) * BLOCK
            start += BLOCK if at < offset - start else 0  # an edge that there is no room for is read apart
            stop -= BLOCK if at + stop - offset > len(room) else 0
            if start >= stop or (_address(room) + at - offset) % BLOCK:
                self._read_staged(self._direct, offset, [wanted], staging)
                return
            end = offset + length
            self._read_blocks(self._direct, start, room[at + start - offset : at + stop - offset], min(end, stop))
            for first, last in ((offset, start), (stop, end)):
                if first < last:
                    self._read_staged(self._direct, first, [wanted[first - offset : last - offset]], staging)

    @contextmanager
    def _told(self, offset: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read at byte {offset}: {error.strerror or error}") from error

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._buffered)
        return state.st_size, state.st_mtime_ns

    def _same_both_ways(self, offset: int, staging: StagingPool) -> bool:
        """Whether a direct read brings the bytes of a normal one."""
        assert self._direct is not None
        start = offset - offset % BLOCK
        with staging.borrow() as block:
            got = os.preadv(self._direct, [block[: min(_PROBE_BYTES, len(block))]], start)
            return got > 0 and bytes(block[:got]) == os.pread(self._buffered, got, start)

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

    def _read_blocks(self, fd: int, offset: int, memory: memoryview, end: int) -> None:
        """Whole blocks of the file to whole blocks of memory; they may go beyond the file's end, `end` may not."""
        while offset < end:
            got = os.preadv(fd, [memory], offset)
            if got == 0 or (got % BLOCK and offset + got < end):  # only a file's end cuts a direct read within a block
                raise self._ended(offset + got)
            offset += got
            memory = memory[got:]

    def _read_staged(self, fd: int, offset: int, buffers: Sequence[memoryview], staging: StagingPool) -> None:
        """Read whole blocks around the wanted bytes and copy these out."""
        left = list(buffers)
        end = offset + sum(len(buffer) for buffer in left)
        with staging.borrow() as block:
            source = np.frombuffer(block, np.uint8)
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
    return all(_address(buffer) % BLOCK == 0 for buffer in buffers)


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


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

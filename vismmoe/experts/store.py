"""Expert masters: byte ranges of the checkpoint, read-only.

What is read again must be what was read before: each expert's sum is kept from its first read. An expert that is read
for the first time after somebody wrote to its file is refused, since nobody can say what it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from vismmoe.errors import CheckpointError
from vismmoe.experts.files import ExpertFile, StagingPool
from vismmoe.experts.pace import Pace
from vismmoe.experts.places import DIRECT_FROM_BYTES, Places
from vismmoe.types import ExpertId, ExpertLayout

DirectIO = Literal["auto", "on", "off"]


class _Piece(NamedTuple):
    """One range of an expert: where it comes from and, in bytes from its slab's start, where it goes to."""

    file: int  # index into the open files
    offset: int
    length: int
    start: int
    first: int  # what lies around it in the file may go to slab[first:last]
    last: int


class _Read(NamedTuple):
    file: int
    offset: int
    buffer: memoryview


class ExpertStore:
    """Reads experts into slabs from any number of threads. Use it as a context manager, or close() it at the end."""

    def __init__(
        self,
        layout: ExpertLayout,
        files: Mapping[Path, ExpertFile],
        fallbacks: list[str],
        pace: Pace | None = None,
    ) -> None:
        self.layout = layout
        self.fallbacks = fallbacks  # what was asked for and is done differently, each said once
        self._files = tuple(files.values())
        self._pace = pace
        self._sums: dict[ExpertId, int] = {}
        self._staging = StagingPool(layout.expert_bytes)
        number = {path: index for index, path in enumerate(files)}
        places = Places.in_host_memory(layout)
        self._in_place = bool(places.shifts)
        self._pieces = {
            expert: tuple(
                _Piece(number[p.range.file], p.range.offset, p.range.length, p.start, p.first, p.last)
                for p in places.pieces(expert, ranges)
            )
            for expert, ranges in layout.ranges.items()
        }

    @classmethod
    def open(cls, layout: ExpertLayout, direct_io: DirectIO = "auto", disk_rate: int | None = None) -> ExpertStore:
        """Open the checkpoint's files and check that they are as long as the layout says. Raises CheckpointError.

        direct_io: past the page cache: always where the file system can, never, or "auto": where the experts are large
        enough to gain from it. disk_rate: bytes a second that reads are slowed down to; those of paced=False are not.
        """
        _check(layout)
        files: dict[Path, ExpertFile] = {}
        try:
            for path, needed in sorted(_needed_bytes(layout).items()):
                files[path] = ExpertFile(path, needed)
            direct = direct_io == "on" or (direct_io == "auto" and layout.expert_bytes >= DIRECT_FROM_BYTES)
            fallbacks = _turn_direct_on(files, layout) if direct else []
        except BaseException:
            for file in files.values():
                file.close()
            raise
        return cls(layout, files, fallbacks, Pace(disk_rate) if disk_rate else None)

    @property
    def direct(self) -> bool:
        """Whether every file is read past the page cache."""
        return all(file.direct for file in self._files)

    def read_into(self, expert: ExpertId, slab: torch.Tensor, paced: bool = True) -> None:
        """Fill the slab, (slab_bytes,) uint8 on the CPU, as Places.in_host_memory says. Raises CheckpointError."""
        self.read_batch([(expert, slab.numpy().data)], paced)

    def read_batch(self, items: Sequence[tuple[ExpertId, memoryview]], paced: bool = True) -> None:
        """The same for several experts: of small ones, what lies side by side in a file is read at one go."""
        began = time.perf_counter()
        self._read(items)
        for expert, slab in items:
            self._verify(expert, slab)
        if self._pace is not None and paced:
            self._pace.wait(len(items) * self.layout.expert_bytes, began)

    def close(self) -> None:
        """Close the files; twice is harmless. Close the transfers before: no read may be going on."""
        for file in self._files:
            file.close()

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, items: Sequence[tuple[ExpertId, memoryview]]) -> None:
        if self._in_place:
            for expert, slab in items:
                for piece in self._pieces[expert]:
                    room, at = slab[piece.first : piece.last], piece.start - piece.first
                    self._files[piece.file].read_within(piece.offset, piece.length, room, at, self._staging)
            return
        reads = [read for expert, slab in items for read in self._reads(expert, slab)]
        reads.sort(key=lambda read: read[:2])
        for run in _runs(reads):
            self._files[run[0].file].read(run[0].offset, [read.buffer for read in run], self._staging)

    def _verify(self, expert: ExpertId, slab: memoryview) -> None:
        files = [self._files[number] for number in dict.fromkeys(piece.file for piece in self._pieces[expert])]
        expected, found = self._sums.get(expert), self._sum(expert, slab)
        if expected is None:
            for file in files:
                if file.changed:
                    raise CheckpointError(f"{file.path} was written to while it is in use: load the model again.")
            self._sums[expert] = found
        elif found != expected:
            self._read([(expert, slab)])  # once more: what the bus or the drive garbled is right the second time
            if self._sum(expert, slab) != expected:
                raise CheckpointError(
                    f"Expert {expert.expert} of layer {expert.layer} has other bytes than when it was read first: "
                    f"{' or '.join(str(file.path) for file in files)} was changed or is damaged. Fetch it again."
                )

    def _sum(self, expert: ExpertId, slab: memoryview) -> int:
        return sum(_sum(read.buffer) for read in self._reads(expert, slab))

    def _reads(self, expert: ExpertId, slab: memoryview) -> Iterator[_Read]:
        for piece in self._pieces[expert]:
            yield _Read(piece.file, piece.offset, slab[piece.start : piece.start + piece.length])


def _sum(held: memoryview) -> int:
    """A change of any one bit changes it."""
    data = np.frombuffer(held, np.uint8)
    whole = len(data) - len(data) % 8
    return int(np.add.reduce(data[:whole].view(np.uint64))) ^ int(np.add.reduce(data[whole:], dtype=np.uint64))


def _runs(reads: Sequence[_Read]) -> Iterator[list[_Read]]:
    """Cut sorted reads into runs without a gap."""
    run: list[_Read] = []
    end = (-1, -1)
    for read in reads:
        if run and (read.file, read.offset) != end:
            yield run
            run = []
        run.append(read)
        end = (read.file, read.offset + len(read.buffer))
    if run:
        yield run


def _check(layout: ExpertLayout) -> None:
    weights = sum(math.prod(part.shape) for part in layout.parts) * layout.dtype.itemsize
    if weights != layout.expert_bytes or weights == 0:
        raise CheckpointError(f"An expert's weights take {weights} bytes, but its layout says {layout.expert_bytes}.")
    for expert, ranges in layout.ranges.items():
        found = sum(r.length for r in ranges)
        if found != layout.expert_bytes or any(r.offset < 0 or r.length <= 0 for r in ranges):
            raise CheckpointError(
                f"Expert {expert.expert} of layer {expert.layer} has {found} bytes in the checkpoint, "
                f"but should have {layout.expert_bytes}."
            )


def _needed_bytes(layout: ExpertLayout) -> dict[Path, int]:
    needed: dict[Path, int] = {}
    for ranges in layout.ranges.values():
        for r in ranges:
            needed[r.file] = max(needed.get(r.file, 0), r.offset + r.length)
    return needed


def _turn_direct_on(files: Mapping[Path, ExpertFile], layout: ExpertLayout) -> list[str]:
    """Try each file where its first expert lies; says once why the page cache is used instead."""
    staging, refused = StagingPool(layout.expert_bytes), ""
    first = {r.file: r.offset for ranges in layout.ranges.values() for r in ranges}
    for path, file in files.items():
        reason = file.try_direct(first[path], staging)
        if reason and not refused:
            refused = f"Direct I/O is off for {path.name} ({reason}): experts are read through the page cache."
    return [refused] if refused else []

"""Where in a slab the weights of an expert lie: arithmetic on bytes, nothing is allocated.

A direct read brings whole blocks of a file to whole blocks of memory. So in host memory each part of a large expert has
a *place* that begins on a block, and the part begins within it as far in as it begins in its block of the file. It then
comes to where the arithmetic finds it without being copied. How far in is a property of the expert, not of the slab:
wherever it lies, resident or streamed, its weights have the same alignment.

Small experts, and those in the memory of a GPU, lie packed: part after part, without gaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from vismmoe.types import ExpertId, ExpertLayout, ExpertRange, PartShape

BLOCK = 4096  # alignment of offset, length and memory that every O_DIRECT file system accepts
# Below this the time of a read is its latency, not its length, and the page cache does better than the disk itself.
DIRECT_FROM_BYTES = 256 << 10
_CACHE_LINE = 64


@dataclass(frozen=True)
class Piece:
    """One range of an expert, and what its read may write to."""

    range: ExpertRange
    start: int  # of its bytes, from the slab's start
    first: int  # bytes from `first` to `last` of the slab are this read's: its neighbourhood in the file may go there
    last: int

    @property
    def in_place(self) -> bool:
        """Whether whole blocks of the file come to whole blocks of the slab."""
        return (self.start - self.range.offset) % BLOCK == 0


@dataclass(frozen=True)
class Places:
    """Places of the parts in every slab of a pool. Offsets and lengths in bytes."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]  # of the parts themselves
    slab_bytes: int  # from one slab's start to where the last place ends
    stride: int  # from one slab's start to the next one's
    shifts: Mapping[ExpertId, tuple[int, ...]]  # how far into its place each part begins; empty: not at all

    @classmethod
    def packed(cls, layout: ExpertLayout) -> Places:
        """Part after part. Strides of whole cache lines give each weight the same alignment in every slab: matrix
        kernels may pick another path, with other rounding, when alignment differs."""
        lengths = tuple(_part_bytes(part, layout) for part in layout.parts)
        stride = -(-layout.expert_bytes // _CACHE_LINE) * _CACHE_LINE
        return cls((0, *accumulate(lengths))[:-1], lengths, layout.expert_bytes, stride, {})

    @classmethod
    def in_host_memory(cls, layout: ExpertLayout) -> Places:
        """Where experts are read to: large ones with room for whole blocks around each part, small ones packed."""
        packed = cls.packed(layout)
        if layout.expert_bytes < DIRECT_FROM_BYTES:
            return packed
        rooms = _rooms(packed.lengths)
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # a few, shared by many experts
        shifts = {}
        for expert, ranges in layout.ranges.items():
            found = tuple(_shift(part[0], layout) for part in _by_part(ranges, packed.lengths))
            shifts[expert] = known.setdefault(found, found)
        return cls((0, *accumulate(rooms))[:-1], packed.lengths, sum(rooms), sum(rooms), shifts)

    def spans(self, expert: ExpertId | None) -> list[slice]:
        """Where each part of the expert lies in a slab; None: an expert that begins where its places do."""
        shifts = self.shifts.get(expert) if expert is not None else None
        begins = self.starts if shifts is None else [s + shift for s, shift in zip(self.starts, shifts, strict=True)]
        return [slice(begin, begin + length) for begin, length in zip(begins, self.lengths, strict=True)]

    def pieces(self, expert: ExpertId, ranges: Sequence[ExpertRange]) -> tuple[Piece, ...]:
        """Where each of the expert's ranges goes to."""
        ends = (*self.starts[1:], self.slab_bytes)
        found = []
        parts = zip(_by_part(ranges, self.lengths), self.spans(expert), self.starts, ends, strict=True)
        for part, span, first, last in parts:
            start = span.start
            for held in part:
                end = start + held.length
                found.append(Piece(held, start, first, last if end == span.stop else end))
                start = first = end
        return tuple(found)


def slack_bytes(layout: ExpertLayout, packed: bool) -> int:
    """Bytes of a slab beside those of the expert."""
    held = Places.packed(layout)
    if not packed and layout.expert_bytes >= DIRECT_FROM_BYTES:
        return sum(_rooms(held.lengths)) - layout.expert_bytes
    return held.stride - layout.expert_bytes


def _rooms(lengths: Sequence[int]) -> list[int]:
    """Of each place: all blocks that the part can touch, however far into its first block it begins."""
    return [(-(-length // BLOCK) + 1) * BLOCK for length in lengths]


def _part_bytes(part: PartShape, layout: ExpertLayout) -> int:
    return math.prod(part.shape) * layout.dtype.itemsize


def _shift(first: ExpertRange, layout: ExpertLayout) -> int:
    """Numbers have to begin on a multiple of their own size; where the file's do not, they are copied to it."""
    return first.offset % BLOCK if first.offset % layout.dtype.itemsize == 0 else 0


def _by_part(ranges: Sequence[ExpertRange], lengths: Sequence[int]) -> Iterator[list[ExpertRange]]:
    left = iter(ranges)
    for length in lengths:
        part: list[ExpertRange] = []
        while sum(held.length for held in part) < length:
            part.append(next(left))
        yield part

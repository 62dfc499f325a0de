"""What no arrangement of the same work could beat: arithmetic on what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vismmoe.simulate.belady import BeladyCache
from vismmoe.types import ExpertId


@dataclass(frozen=True)
class Work:
    """One phase: bytes that the disk must deliver, and seconds that the arithmetic takes with everything at hand."""

    disk_bytes: float
    compute_s: float

    def seconds(self, bytes_per_s: float) -> float:
        """Disk and arithmetic at the same time, neither ever waiting for the other."""
        return max(self.disk_bytes / bytes_per_s, self.compute_s)

    def stall_s(self, bytes_per_s: float) -> float:
        return self.seconds(bytes_per_s) - self.compute_s


def belady_misses(visits: Sequence[Sequence[tuple[int, int]]], slabs: int, prefill_visits: int) -> tuple[int, int]:
    """(loads in the prefill, loads in decode) of the cache that knows the future."""
    wanted = [[ExpertId(*place) for place in visit] for visit in visits]
    cache = BeladyCache(slabs, wanted)
    loads = [sum(1 for _ in cache.misses(visit)) for visit in wanted]
    return sum(loads[:prefill_visits]), sum(loads[prefill_visits:])

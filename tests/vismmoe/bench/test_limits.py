from __future__ import annotations

import pytest

from vismmoe.bench.limits import Work, belady_misses


@pytest.mark.parametrize(("rate", "seconds", "stall"), [(100.0, 10.0, 6.0), (1000.0, 4.0, 0.0)])
def test_perfect_overlap_takes_as_long_as_the_longer_of_the_two(rate: float, seconds: float, stall: float) -> None:
    work = Work(disk_bytes=1000, compute_s=4.0)
    assert work.seconds(rate) == seconds
    assert work.stall_s(rate) == stall


def test_belady_keeps_what_is_needed_soonest() -> None:
    visits = [[(0, 0)], [(0, 1)], [(0, 2)], [(0, 0)], [(0, 2)], [(0, 1)]]
    # two slabs: 0, 1 and 2 are loaded once; 2 takes the place of 1, which is needed last and loaded a second time
    assert belady_misses(visits, 2, 3) == (3, 1)
    assert belady_misses(visits, 3, 3) == (3, 0)
    assert belady_misses(visits, 1, 3) == (3, 3)

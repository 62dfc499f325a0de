"""Belady's evictions on sequences that can be worked out by hand, and against every order of evictions there is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vismmoe.simulate.belady import BeladyCache
from vismmoe.types import ExpertId


def misses(slabs: int, visits: Sequence[Sequence[int]]) -> int:
    named = [[ExpertId(0, expert) for expert in visit] for visit in visits]
    cache = BeladyCache(slabs, named)
    return sum(len(list(cache.misses(visit))) for visit in named)


@pytest.mark.parametrize(
    ("slabs", "sequence", "loads"),
    [
        (3, "701203042303212017 01".replace(" ", ""), 9),  # the textbook's reference string
        (1, "0101", 4),
        (2, "0101", 2),
        (2, "012012", 4),  # least recently used: 6
    ],
)
def test_textbook_sequences(slabs: int, sequence: str, loads: int) -> None:
    assert misses(slabs, [[int(expert)] for expert in sequence]) == loads


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60)
def test_no_choice_of_evictions_loads_less(sequence: list[int], slabs: int) -> None:
    @cache
    def least(place: int, held: frozenset[int]) -> int:
        if place == len(sequence):
            return 0
        expert = sequence[place]
        if expert in held:
            return least(place + 1, held)
        if len(held) < slabs:
            return 1 + least(place + 1, held | {expert})
        return 1 + min(least(place + 1, held - {victim} | {expert}) for victim in held)

    assert misses(slabs, [[expert] for expert in sequence]) == least(0, frozenset())


def test_a_visit_uses_what_is_there_before_it_evicts() -> None:
    assert misses(2, [[0, 1], [2, 0, 1]]) == 3

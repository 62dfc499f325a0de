"""How far a retention would move if other questions of the same kind had been asked: a paired bootstrap."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vismmoe.evaluate.score import Reading, Scorer

DRAWS = 1000
COVERAGE = 0.95


@dataclass(frozen=True)
class Interval:
    """Bounds between which the middle 95 % of the draws lie."""

    low: float
    high: float


class _Units:
    """Readings by unit, with copies under names of their own for units that are drawn several times."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._copies: dict[tuple[str, int], list[Reading]] = {}
        self.own: defaultdict[str, list[Reading]] = defaultdict(list)
        for reading in readings:
            self.own[reading.unit].append(reading)

    def copy(self, unit: str, number: int) -> list[Reading]:
        if number == 0:
            return self.own[unit]
        key = unit, number
        if key not in self._copies:
            self._copies[key] = [replace(reading, unit=f"{unit}#{number}") for reading in self.own[unit]]
        return self._copies[key]


def retention_interval(
    scorer: Scorer, vanilla: Sequence[Reading], other: Sequence[Reading], draws: int = DRAWS, seed: int = 0
) -> Interval | None:
    """Of other / vanilla, as a share. Units are drawn with replacement, the same ones for both, stratum by stratum.

    None when the scorer gives too few draws a number. The readings must be of the same rows.
    """
    ours, theirs = _Units(vanilla), _Units(other)
    if list(ours.own) != list(theirs.own):
        raise ValueError("the two runs answered different questions")
    strata: defaultdict[str, list[str]] = defaultdict(list)
    for unit, own in ours.own.items():
        strata[own[0].stratum].append(unit)
    dice = random.Random(seed)
    ratios = []
    for _ in range(draws):
        drawn = [unit for units in strata.values() for unit in dice.choices(units, k=len(units))]
        seen: defaultdict[str, int] = defaultdict(int)
        first: list[Reading] = []
        second: list[Reading] = []
        for unit in drawn:
            first += ours.copy(unit, seen[unit])
            second += theirs.copy(unit, seen[unit])
            seen[unit] += 1
        before, after = scorer.total(first).value, scorer.total(second).value
        if before and after is not None:
            ratios.append(after / before)
    if len(ratios) < draws / 2:
        return None
    ratios.sort()
    tail = (1 - COVERAGE) / 2
    return Interval(ratios[int(tail * len(ratios))], ratios[min(len(ratios) - 1, int((1 - tail) * len(ratios)))])

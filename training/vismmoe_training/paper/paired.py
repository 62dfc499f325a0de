"""How far a difference would move if other pictures had been drawn: a paired bootstrap over pictures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DRAWS = 2000
COVERAGE = 0.95
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """A difference of two shares of vanilla's right answers, and where the middle 95 % of the draws lie."""

    value: float
    low: float
    high: float

    def points(self) -> str:
        return f"{100 * self.value:+.1f} ({100 * self.low:+.1f} to {100 * self.high:+.1f})"

    def to_json(self) -> dict[str, float]:
        return {"value": round(self.value, 6), "low": round(self.low, 6), "high": round(self.high, 6)}


def difference(
    one: Sequence[bool], other: Sequence[bool], whole: Sequence[bool], units: Sequence[tuple[Hashable, Hashable]]
) -> Difference:
    """(one - other) / whole in right answers to the same questions.

    units: each question's (stratum, picture). Pictures are drawn with replacement within their stratum, each with all
    of its questions, so that questions on one picture do not pass for independent ones.
    """
    gain, base = np.subtract(one, other, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    drawn = np.zeros((2, DRAWS))
    dice = np.random.default_rng(0)
    for stratum in dict.fromkeys(stratum for stratum, _ in units):
        pictures = list(dict.fromkeys(unit for unit in units if unit[0] == stratum))
        place = {unit: number for number, unit in enumerate(pictures)}
        sums = np.zeros((2, len(pictures)))
        for number, unit in enumerate(units):
            if unit in place:
                sums[:, place[unit]] += gain[number], base[number]
        times = dice.multinomial(len(pictures), np.full(len(pictures), 1 / len(pictures)), DRAWS)
        drawn += sums @ times.T
    low, high = np.quantile(drawn[0] / np.maximum(drawn[1], 1), [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Difference(float(gain.sum() / max(base.sum(), 1)), float(low), float(high))

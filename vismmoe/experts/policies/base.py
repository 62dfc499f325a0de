"""What a policy of eviction may look at, and the one thing it says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

HALF_LIFE_VISITS = 32  # of the frequency: a use weighs half as much so many visits of its layer later


@dataclass
class Use:
    """What is known of one expert, whether it has a slab or not. The cache keeps it, policies read it."""

    priority: float = 0.0  # the predictor's newest score; halves when its layer passes without a use
    last: int = 0  # tick of its last use, or of its arrival
    missed: int = 0  # visits of its layer since its last use
    frequency: float = -math.inf  # log2 of its uses, each faded by age, on a scale that need not be aged

    def used(self, visits: int) -> None:
        """It is used in its layer's visit of that number: exponential forgetting, kept as a logarithm (LRFU)."""
        self.missed = 0
        now = visits / HALF_LIFE_VISITS
        low, high = sorted((self.frequency, now))
        self.frequency = high + math.log2(1.0 + 2.0 ** (low - high))

    def chance(self, visits: int) -> float:
        """Faded share of so many visits of its layer, one or more, in which it was used."""
        faded: float = 2.0 ** (self.frequency - visits / HALF_LIFE_VISITS)
        whole: float = (1.0 - 2.0 ** (-visits / HALF_LIFE_VISITS)) / (2.0 ** (1.0 / HALF_LIFE_VISITS) - 1.0)
        return min(1.0, faded / whole)


class EvictionPolicy(Protocol):
    """Says who is worth least; which slabs may be taken at all is the cache's affair."""

    @property
    def name(self) -> str: ...

    def worth(self, use: Use) -> tuple[float, float]:
        """The expert with the least leaves first. It may change only with the fields of `use`."""
        ...

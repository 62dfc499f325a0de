"""Mean and spread over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One figure of a table: what each seed gave."""

    seeds: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(tuple(values))

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seeds)

    @property
    def spread(self) -> float:
        """Sample standard deviation over seeds; 0 for one seed."""
        return statistics.stdev(self.seeds) if len(self.seeds) > 1 else 0.0

    def percent(self) -> str:
        return f"{self.mean:.1%} ± {100 * self.spread:.1f}"

    def plain(self, digits: int = 1) -> str:
        return f"{self.mean:.{digits}f} ± {self.spread:.{digits}f}"

    def to_json(self) -> dict[str, float | list[float]]:
        rounded = [round(value, 6) for value in self.seeds]
        return {"mean": round(self.mean, 6), "spread": round(self.spread, 6), "seeds": rounded}

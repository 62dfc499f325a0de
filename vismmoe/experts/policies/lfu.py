"""The least often used leaves first; old uses fade, and an evicted expert's are remembered."""

from __future__ import annotations

from dataclasses import dataclass

from vismmoe.experts.policies.base import Use


@dataclass(frozen=True)
class LeastFrequent:
    """Of two equally frequent ones the longer unused leaves."""

    name: str = "lfu"

    def worth(self, use: Use) -> tuple[float, float]:
        return use.frequency, use.last

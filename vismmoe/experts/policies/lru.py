"""The longest unused leaves first."""

from __future__ import annotations

from dataclasses import dataclass

from vismmoe.experts.policies.base import Use


@dataclass(frozen=True)
class LeastRecent:
    """Hits nothing at all with fewer slabs than one token's cycle asks for."""

    name: str = "lru"

    def worth(self, use: Use) -> tuple[float, float]:
        return use.last, 0.0

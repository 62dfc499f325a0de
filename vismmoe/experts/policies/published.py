"""VisMMoE §4.3: the lowest predictor priority leaves first, among equals the longest unused."""

from __future__ import annotations

from dataclasses import dataclass

from vismmoe.experts.policies.base import Use


@dataclass(frozen=True)
class Published:
    """Without a predictor all priorities are 0, which makes it least recently used."""

    name: str = "published"

    def worth(self, use: Use) -> tuple[float, float]:
        return use.priority, use.last

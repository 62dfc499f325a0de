"""Who was left out most often when its layer ran leaves first (Least-Stale, SpecMD, arXiv 2602.03921).

Layers run in a fixed circle, so of two that are equally fresh the one used last has the longer way to its next use.
"""

from __future__ import annotations

from dataclasses import dataclass

from vismmoe.experts.policies.base import Use


@dataclass(frozen=True)
class LeastStale:
    """Keeps what the layers ahead used in the last token, however few the slabs are."""

    name: str = "least-stale"

    def worth(self, use: Use) -> tuple[float, float]:
        return -use.missed, -use.last

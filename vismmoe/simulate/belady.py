"""The limit of all rules: Belady's evictions, which know the future, with every load prefetched perfectly.

No cache of as many slabs loads fewer experts, whatever it foresees (a prefetch is a load, too); and no order of the
loads can end earlier than one that starts with the request and never rests.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from vismmoe.types import ExpertId


class BeladyCache:
    """Evicts whom the future needs last. `visits`: what each layer visit will ask for, in order."""

    def __init__(self, slabs: int, visits: Iterable[Sequence[ExpertId]]) -> None:
        self._slabs = slabs
        self._uses: defaultdict[ExpertId, deque[int]] = defaultdict(deque)
        for number, experts in enumerate(visits):
            for expert in experts:
                self._uses[expert].append(number)
        self._next: dict[ExpertId, float] = {}  # residents -> visit of their next use
        self._latest: list[tuple[float, ExpertId]] = []  # the same, latest first; places may be out of date

    def misses(self, experts: Sequence[ExpertId]) -> Iterator[ExpertId]:
        """What the next visit has to load; residents are used first."""
        absent = [expert for expert in experts if expert not in self._next]
        for expert in experts:
            if expert in self._next:
                self._use(expert)
        for expert in absent:
            if len(self._next) >= self._slabs:
                self._evict()
            self._use(expert)
            yield expert

    def _use(self, expert: ExpertId) -> None:
        uses = self._uses[expert]
        uses.popleft()
        self._next[expert] = following = uses[0] if uses else math.inf
        heapq.heappush(self._latest, (-following, expert))

    def _evict(self) -> None:
        while True:
            latest, expert = heapq.heappop(self._latest)
            if self._next.get(expert) == -latest:
                del self._next[expert]
                return

"""Who leaves first: the lowest predictor priority, among equals the longest unused (VisMMoE §4.3)."""

from __future__ import annotations

import heapq
from enum import Enum

from vismmoe.types import ExpertId


class Standing(Enum):
    """Where a resident expert stands with regard to eviction."""

    REQUIRED = "required"  # demanded by the layer that runs, or named by the newest lookahead list
    SPECULATIVE = "speculative"  # loaded on a guess, not used yet, its layer still ahead
    EXPIRED = "expired"  # its layer has finished for this token


class Resident:
    """One expert and its slab. The standing follows from the flags, so that the two cannot disagree."""

    __slots__ = (
        "airborne", "demanded", "expert", "guess", "held", "in_flight",
        "locks", "priority", "protected", "slot", "stamp", "used",
    )  # fmt: skip

    def __init__(self, expert: ExpertId, slot: int, priority: float) -> None:
        self.expert = expert
        self.slot = slot
        self.priority = priority
        self.held = False  # demanded by the layer that runs
        self.protected = False  # named by the newest lookahead list
        self.guess = False  # loaded on a guess and not used yet
        self.in_flight = True
        self.airborne = False  # in flight on a guess that no demand has met
        self.locks = 0
        self.used = 0  # tick of the last use
        self.demanded = -1  # step of the last demand
        self.stamp = 0  # number of its place in the order of eviction; 0: in none

    @property
    def standing(self) -> Standing:
        if self.held or self.protected:
            return Standing.REQUIRED
        return Standing.SPECULATIVE if self.guess else Standing.EXPIRED

    @property
    def evictable(self) -> bool:
        return not (self.held or self.protected or self.in_flight or self.locks)


_Place = tuple[float, int, int, Resident]  # priority, last use, stamp


class EvictionOrder:
    """Evictable residents, in order: offer() those that become so, withdraw() those that no longer are.

    Heaps with lazy deletion: a place whose stamp is no longer its resident's is void.
    """

    def __init__(self, slabs: int) -> None:
        self._limit = 4 * slabs + 64
        self._earlier: list[_Place] = []  # expired, last demanded in an earlier step
        self._current: list[_Place] = []  # expired, demanded in this step: speculation keeps its hands off them
        self._guesses: list[_Place] = []
        self._step = 0
        self._stamp = 0

    def offer(self, resident: Resident) -> None:
        """Give the resident its place by its present priority and last use, if it may be evicted at all."""
        resident.stamp = 0
        if not resident.evictable:
            return
        self._stamp += 1
        resident.stamp = self._stamp
        heap = self._heap_of(resident)
        heapq.heappush(heap, (resident.priority, resident.used, resident.stamp, resident))
        if len(heap) > self._limit:
            heap[:] = [place for place in heap if place[3].stamp == place[2]]
            heapq.heapify(heap)

    @staticmethod
    def withdraw(resident: Resident) -> None:
        """The resident may not be evicted any more."""
        resident.stamp = 0

    def begin_step(self, step: int) -> None:
        """What was demanded up to now belongs to an earlier step."""
        self._step = step
        for place in self._current:
            if place[3].stamp == place[2]:
                heapq.heappush(self._earlier, place)
        self._current.clear()

    def for_demand(self) -> Resident | None:
        """Expired ones first, then guesses."""
        expired = [place for place in (_first(self._earlier), _first(self._current)) if place is not None]
        place = min(expired) if expired else _first(self._guesses)
        return place[3] if place else None

    def for_guess(self, priority: float) -> Resident | None:
        """Only what expired in an earlier step, else a guess that is worth less."""
        place = _first(self._earlier)
        if place is None:
            place = _first(self._guesses)
            if place is not None and place[0] >= priority:
                return None
        return place[3] if place else None

    def _heap_of(self, resident: Resident) -> list[_Place]:
        if resident.guess:
            return self._guesses
        return self._current if resident.demanded == self._step else self._earlier


def _first(heap: list[_Place]) -> _Place | None:
    while heap:
        if heap[0][3].stamp == heap[0][2]:
            return heap[0]
        heapq.heappop(heap)
    return None

"""Who may leave, in order: what only passes through first, then by the policy's worth."""

from __future__ import annotations

import heapq
from enum import Enum

from vismmoe.experts.policies.base import EvictionPolicy, Use
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
        "locks", "passing", "protected", "slot", "stamp", "use",
    )  # fmt: skip

    def __init__(self, expert: ExpertId, slot: int, use: Use, passing: bool) -> None:
        self.expert = expert
        self.slot = slot
        self.use = use
        self.passing = passing  # loaded for a prefill that has no room for all: no part of decode's working set
        self.held = False  # demanded by the layer that runs
        self.protected = False  # named by the newest lookahead list
        self.guess = False  # loaded on a guess and not used yet
        self.in_flight = True
        self.airborne = False  # in flight on a guess that no demand has met
        self.locks = 0
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


_Place = tuple[bool, tuple[float, float], int, Resident]  # settled, worth, stamp: compared in this order


class EvictionOrder:
    """Evictable residents, in order: offer() those that become so, withdraw() those that no longer are.

    Heaps with lazy deletion: a place whose stamp is no longer its resident's is void.
    """

    def __init__(self, slabs: int, policy: EvictionPolicy) -> None:
        self._limit = 4 * slabs + 64
        self._policy = policy
        self._earlier: list[_Place] = []  # expired, last demanded in an earlier step, or passing through
        self._current: list[_Place] = []  # expired, demanded in this step: speculation keeps its hands off them
        self._guesses: list[_Place] = []
        self._step = 0
        self._stamp = 0

    def offer(self, resident: Resident) -> None:
        """Give the resident its place by its present worth, if it may be evicted at all."""
        resident.stamp = 0
        if not resident.evictable:
            return
        self._stamp += 1
        resident.stamp = self._stamp
        heap, use = self._heap_of(resident), resident.use
        # An unused guess is worth what was foretold of it, whatever the policy: it has no past to be judged by.
        worth = (use.priority, use.last) if resident.guess else self._policy.worth(use)
        # A stamp is given once, so that residents themselves are never compared.
        heapq.heappush(heap, (not resident.passing, worth, resident.stamp, resident))
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

    def for_demand(self, passing: bool = False) -> Resident | None:
        """Expired ones first, then guesses. passing: only one that passes through itself."""
        expired = [place for place in (_first(self._earlier), _first(self._current)) if place is not None]
        for place in (min(expired) if expired else None, _first(self._guesses)):
            if place is not None and (place[3].passing or not passing):
                return place[3]
        return None

    def for_guess(self, priority: float, passing: bool = False) -> Resident | None:
        """Only what expired in an earlier step, else a guess that is worth less. passing: as in for_demand."""
        place = _first(self._earlier)
        if place is None or (passing and not place[3].passing):
            place = _first(self._guesses)
            if place is None or place[3].use.priority >= priority or (passing and not place[3].passing):
                return None
        return place[3]

    def _heap_of(self, resident: Resident) -> list[_Place]:
        if resident.guess:
            return self._guesses
        # What passes through has run and nobody wants it again: a guess may have its slab at once.
        return self._current if resident.demanded == self._step and not resident.passing else self._earlier


def _first(heap: list[_Place]) -> _Place | None:
    while heap:
        if heap[0][3].stamp == heap[0][2]:
            return heap[0]
        heapq.heappop(heap)
    return None

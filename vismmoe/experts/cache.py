"""Who is in which slab: bookkeeping only, no tensors, no threads (VisMMoE §4.3, safety-guarded eviction).

A resident expert is Required, Speculative or Expired. Expired ones are evicted first, in the order of a policy
(vismmoe.experts.policies). Four things go beyond the paper: demand may take a guess's slab, and in the end that of an
expert which only a forecast protects, since a cache of few slabs would wait for ever otherwise; guesses never take the
slab of what this very step demanded and may want again; a forecast counts half each time its layer passes without a
use, so that old praise fades; and what a prefill asks for just once *passes through*: it takes few slabs, leaves before
all others and counts as no use, so that a prefill larger than the slabs does not wash decode's working set out of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vismmoe.experts.eviction import EvictionOrder, Resident, Standing
from vismmoe.experts.policies import DEFAULT_POLICY, EvictionPolicy, Use, get_policy
from vismmoe.types import ExpertId

__all__ = ["ExpertCache", "Placement", "Standing"]

_PASSAGE = 4  # a quarter of the slabs is the most that what passes through may take from the working set

_NEVER = Use()


class Placement(NamedTuple):
    """A slab given to an expert, and who had to leave it."""

    slot: int
    evicted: ExpertId | None


class ExpertCache:
    """Decides; moves nothing. To be called from one thread, the one that computes.

    A placed expert is in flight until landed() or forget(), and is not evicted before. `reserve` slabs are never in
    flight on guesses (pass top_k): demand then finds a slab without waiting for a guess to land.
    """

    def __init__(self, slabs: int, reserve: int = 1, policy: EvictionPolicy | None = None) -> None:
        assert slabs >= 0
        assert reserve >= 1
        self.slabs = slabs
        self.evictions = 0
        self.passage = min(slabs, max(2 * reserve, slabs // _PASSAGE))
        """Slabs that what passes through may take from others."""
        self._airborne_limit = slabs - reserve
        self._airborne = 0  # guesses in flight that no demand has met
        self._free = list(range(slabs - 1, -1, -1))
        self._residents: dict[ExpertId, Resident] = {}
        self._layers: defaultdict[int, set[Resident]] = defaultdict(set)
        self._protected: set[Resident] = set()
        self._order = EvictionOrder(slabs, policy or get_policy(DEFAULT_POLICY))
        self._uses: defaultdict[ExpertId, Use] = defaultdict(Use)
        self._visits: defaultdict[int, int] = defaultdict(int)  # layer -> how often it has run
        self._passing = 0  # residents that pass through
        self._tick = 0
        self._step = 0

    # ---- demand of the layer that runs

    def lookup(self, expert: ExpertId, passing: bool = False) -> int | None:
        """The expert's slab or None. A hit is Required until release() or expire_layer(); it may be in flight.

        passing: it is needed now and for nothing later (a prefill), so that this counts as no use.
        """
        resident = self._residents.get(expert)
        if resident is None:
            return None
        resident.guess = False
        self._no_longer_airborne(resident)
        self._hold(resident, passing)
        return resident.slot

    def require(self, expert: ExpertId, passing: bool = False) -> Placement | None:
        """Give a missing expert a slab; it is Required and in flight afterwards. passing: as in lookup().

        None when nothing may be evicted: run what is held, release() it and ask again. With a slab or more and nothing
        held, locked or demanded in flight, it is never None.
        """
        assert expert not in self._residents, expert
        victim = None
        if not self._free:
            victim = self._victim(expert.layer, passing)
            if victim is None:
                return None
        resident, evicted = self._place(expert, victim, 0.0, passing)
        self._hold(resident, passing)
        return Placement(resident.slot, evicted)

    def release(self, experts: Iterable[ExpertId]) -> None:
        """These have run in this wave: Expired from now on, so that the next wave may take their slabs."""
        for expert in experts:
            resident = self._residents.get(expert)
            if resident is not None:
                self._expire(resident)

    def expire_layer(self, layer: int) -> None:
        """The layer has finished for this token: its experts are Expired, and forecasts of it lose weight."""
        self._visits[layer] += 1
        for resident in self._layers[layer]:
            if resident.guess:
                resident.use.priority = 0.0  # foretold for this visit and not needed
            if resident.demanded != self._step:
                resident.use.priority /= 2
                resident.use.missed += 1
            self._expire(resident)

    def begin_step(self) -> None:
        """A new step: guesses may take the slabs of what was demanded before. Cheap.

        Once a token in decode; once a layer where a token demands more than the slabs hold (prefill, slabs below
        cycle_slabs), since guesses would find no room for the rest of that token otherwise.
        """
        self._step += 1
        self._order.begin_step(self._step)

    def note_use(self, expert: ExpertId) -> None:
        """An expert without a slab was used where it lies."""
        self._tick += 1
        use = self._uses[expert]
        use.last = self._tick
        use.used(self._visits[expert.layer])

    # ---- forecast

    def speculate(
        self, expert: ExpertId, priority: float, passing: bool = False, chance: float | None = None
    ) -> Placement | None:
        """Give a guess a slab; it is Speculative and in flight afterwards. passing: it is foreseen for a prefill.

        None when it is resident already, when as many guesses as allowed are in flight, or when nobody leaves: only
        experts that expired in an earlier step do, and guesses of strictly lower priority that nothing protects.
        chance: that the guess is right; whoever is as likely to be used when its own layer runs does not leave for it.
        """
        if expert in self._residents or self._airborne >= self._airborne_limit:
            return None
        victim = None
        if not self._free:
            victim = self._order.for_guess(priority, passing and self._passing >= self.passage)
            if victim is None or (chance is not None and self._is_as_likely(victim, chance)):
                return None
        resident, evicted = self._place(expert, victim, priority, passing)
        resident.guess = resident.airborne = True
        self._airborne += 1
        return Placement(resident.slot, evicted)

    def protect(self, experts: Iterable[ExpertId]) -> None:
        """The newest lookahead list, all its layers: those resident are Required. It replaces the list before.

        What is no longer named falls back to Speculative (if it was never used) or Expired. Absent experts are ignored.
        """
        found = map(self._residents.get, experts)
        named = {resident for resident in found if resident is not None}
        for resident in self._protected - named:
            resident.protected = False
            self._order.offer(resident)
        for resident in named - self._protected:
            resident.protected = True
            self._order.withdraw(resident)
        self._protected = named

    def prioritise(self, scores: Mapping[ExpertId, float]) -> None:
        """The predictor's newest scores, which order eviction. Absent experts are ignored."""
        for expert, score in scores.items():
            resident = self._residents.get(expert)
            if resident is not None and resident.use.priority != score:
                resident.use.priority = score
                self._order.offer(resident)

    # ---- movement, as the transfers report it

    def landed(self, expert: ExpertId) -> None:
        """The expert's bytes are in its slab."""
        resident = self._residents[expert]
        if resident.in_flight:
            resident.in_flight = False
            self._no_longer_airborne(resident)
            self._order.offer(resident)

    def forget(self, expert: ExpertId) -> None:
        """The expert's transfer failed or was dropped: its slab is free again."""
        resident = self._residents[expert]
        assert resident.in_flight, expert
        assert not resident.locks, expert
        self._no_longer_airborne(resident)
        self._remove(resident)
        self._free.append(resident.slot)

    def lock(self, expert: ExpertId) -> None:
        """Not to be evicted, whatever its standing, before as many unlock()s."""
        resident = self._residents[expert]
        resident.locks += 1
        self._order.withdraw(resident)

    def unlock(self, expert: ExpertId) -> None:
        """Take back one lock()."""
        resident = self._residents[expert]
        assert resident.locks > 0, expert
        resident.locks -= 1
        self._order.offer(resident)

    # ---- questions, which change nothing

    def slot(self, expert: ExpertId) -> int | None:
        """The expert's slab, without counting as a use."""
        resident = self._residents.get(expert)
        return None if resident is None else resident.slot

    def standing(self, expert: ExpertId) -> Standing | None:
        """Required, Speculative, Expired; None when not resident."""
        resident = self._residents.get(expert)
        return None if resident is None else resident.standing

    def in_flight(self, expert: ExpertId) -> bool:
        """Whether the expert has a slab that is not filled yet."""
        resident = self._residents.get(expert)
        return resident is not None and resident.in_flight

    def frequency(self, expert: ExpertId) -> float:
        """How often it was used, old uses faded: comparable between experts, resident or not."""
        return self._uses.get(expert, _NEVER).frequency

    def chance(self, expert: ExpertId) -> float:
        """Share of its layer's visits that used it, of late; 0 for what was never used."""
        visits = self._visits.get(expert.layer, 0)
        return self._uses.get(expert, _NEVER).chance(visits) if visits else 0.0

    def residents(self) -> tuple[ExpertId, ...]:
        """All experts that have a slab, those in flight included."""
        return tuple(self._residents)

    def __contains__(self, expert: object) -> bool:
        return expert in self._residents

    def __len__(self) -> int:
        return len(self._residents)

    # ---- inside

    def _victim(self, layer: int, passing: bool) -> Resident | None:
        """Who leaves for a demand of this layer."""
        if passing and self._passing >= self.passage:
            victim = self._order.for_demand(passing=True)
            if victim is not None or any(r.passing and r.held for r in self._layers[layer]):
                return victim  # or none: the next wave waits for this one
        return self._order.for_demand() or self._least_protected()

    def _is_as_likely(self, resident: Resident, chance: float) -> bool:
        """Whether an expert that would leave for a guess is as likely to be needed as that."""
        return not (resident.passing or resident.guess) and self.chance(resident.expert) >= chance

    def _hold(self, resident: Resident, passing: bool) -> None:
        resident.held = True
        resident.demanded = self._step
        if not passing:
            self._tick += 1
            resident.use.last = self._tick
            resident.use.used(self._visits[resident.expert.layer])
            self._settle(resident)
        self._order.withdraw(resident)

    def _settle(self, resident: Resident) -> None:
        """It no longer passes through: it is a part of the working set, or it is gone."""
        if resident.passing:
            resident.passing = False
            self._passing -= 1

    def _expire(self, resident: Resident) -> None:
        resident.held = resident.guess = False  # airborne stays: the slab cannot be had before it is filled
        if resident.protected:
            resident.protected = False
            self._protected.discard(resident)
        self._order.offer(resident)

    def _no_longer_airborne(self, resident: Resident) -> None:
        if resident.airborne:
            resident.airborne = False
            self._airborne -= 1

    def _place(
        self, expert: ExpertId, victim: Resident | None, priority: float, passing: bool
    ) -> tuple[Resident, ExpertId | None]:
        evicted = None
        if victim is None:
            slot = self._free.pop()
        else:
            slot, evicted = victim.slot, victim.expert
            self._remove(victim)
            self.evictions += 1
        resident = Resident(expert, slot, self._uses[expert], passing)
        self._passing += passing
        self._tick += 1
        resident.use.last = self._tick
        resident.use.priority = priority
        resident.use.missed = 0
        self._residents[expert] = resident
        self._layers[expert.layer].add(resident)
        return resident, evicted

    def _remove(self, resident: Resident) -> None:
        self._settle(resident)
        self._order.withdraw(resident)
        self._protected.discard(resident)
        self._layers[resident.expert.layer].discard(resident)
        del self._residents[resident.expert]

    def _least_protected(self) -> Resident | None:
        """Demand beats forecast: who is protected by a forecast alone, least priority first."""
        idle = [r for r in self._protected if not (r.held or r.in_flight or r.locks)]
        return min(idle, key=lambda r: (r.use.priority, r.use.last)) if idle else None

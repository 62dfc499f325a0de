"""The books of what is loaded ahead: which copies were started on a guess, which of them were used, dropped or in vain.

Two guess: the predictor (vismmoe.prefetch) and the reading ahead of wide prefills (vismmoe.read_ahead).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.transfers import Ticket, Transfers
from vismmoe.session import Asker
from vismmoe.types import ExpertId, Phase
from vismmoe.watchdog import Watchdog


class Guesses:
    """Experts that were loaded ahead and not used yet. To be used by one thread, the one that computes."""

    def __init__(
        self,
        cache: ExpertCache,
        transfers: Transfers,
        watchdog: Watchdog,
        expert_bytes: int,
        below: Container[ExpertId] = (),
    ) -> None:
        """below: experts that would run where they lie, so that there is nothing to load."""
        self._cache = cache
        self._transfers = transfers
        self._watchdog = watchdog
        self._expert_bytes = expert_bytes
        self._below = below
        self._open: dict[ExpertId, Phase] = {}  # -> phase that it was issued in
        self._early = 0  # issued before the request that they are for has begun

    def needless(self, expert: ExpertId) -> bool:
        """Whether it is there, on its way, or runs where it lies."""
        return expert in self._cache or expert in self._below

    def start(
        self, asker: Asker | None, wanted: Iterable[tuple[ExpertId, float]], *, passing: bool, worth: bool = False
    ) -> int:
        """Start copies of what is absent, in this order, while slabs may be taken for them; how many of `wanted` are
        done with. With each expert its priority. asker None: the request is still to come.

        worth: the priority is a chance of use, and nobody leaves who is likelier to be used than the guess.
        """
        placed: list[tuple[ExpertId, int, float]] = []
        done = 0
        for expert, priority in wanted:
            if not self.needless(expert):
                placement = self._cache.speculate(expert, priority, passing, priority if worth else None)
                if placement is None:
                    break  # no room for this one, hence for none that is less urgent
                self.evicted(placement.evicted)
                placed.append((expert, placement.slot, priority))
            done += 1
        if placed:
            self._note(asker, [expert for expert, _, _ in placed])
            self._transfers.speculate_batch(placed)
        return done

    def drop(self, asker: Asker | None, keep: Callable[[ExpertId], bool]) -> None:
        """Take what nobody has begun to read and keep() denies out of the queue."""
        for expert in self._transfers.drop_stale(keep):
            self._forget(asker, expert)

    def settle(self, asker: Asker) -> None:
        """Take note of copies that have finished, and of those that were started for this request before it began."""
        if self._early:
            asker.counters["prefill"].prefetched += self._early
            self._early = 0
        for ticket in self._transfers.drain():
            if ticket.error is not None:
                self._forget(asker, ticket.expert)  # demand will meet the error again, if it is ever needed
            else:
                self.landed(asker, ticket)

    def landed(self, asker: Asker, ticket: Ticket) -> None:
        """A copy, ahead or on demand, has filled its slab."""
        self._cache.landed(ticket.expert)
        asker.counting.bytes_loaded += self._expert_bytes

    def used(self, asker: Asker, expert: ExpertId) -> None:
        """The expert was needed and has a slab: was it loaded ahead?"""
        issued = self._open.pop(expert, None)
        if issued is not None:
            asker.counters[issued].prefetched_used += 1
            if issued == "decode":
                self._watchdog.used()

    def evicted(self, expert: ExpertId | None) -> None:
        """The expert has lost its slab: if it was a guess, it was a wrong one."""
        if expert is not None:
            self._open.pop(expert, None)

    def begin_request(self) -> None:
        """Guesses of an earlier request are no longer counted; what is resident stays."""
        if not self._early:
            self._open.clear()

    def _note(self, asker: Asker | None, experts: list[ExpertId]) -> None:
        if asker is None:
            self._early += len(experts)
            self._open.update(dict.fromkeys(experts, "prefill"))
            return
        phase = asker.phase
        self._open.update(dict.fromkeys(experts, phase))
        asker.counting.prefetched += len(experts)
        if phase == "decode":
            self._watchdog.issued(len(experts))

    def _forget(self, asker: Asker | None, expert: ExpertId) -> None:
        """A copy was dropped before it began: it was never loaded."""
        self._cache.forget(expert)
        issued = self._open.pop(expert, None)
        if issued is None:
            return
        if asker is None:
            self._early -= 1
            return
        asker.counters[issued].prefetched -= 1
        if issued == "decode":
            self._watchdog.issued(-1)

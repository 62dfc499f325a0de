"""The experts that one layer needs, on their way: demand before speculation, in waves when slabs are few."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.transfers import Ticket, Transfers
from vismmoe.guesses import Guesses
from vismmoe.session import Asker
from vismmoe.types import ExpertId


class LayerDemand:
    """What is resident comes first, then what was on its way, then the rest; each expert is loaded once a forward."""

    def __init__(
        self,
        needed: Mapping[ExpertId, Sequence[Asker]],
        lasting: Collection[ExpertId],
        cache: ExpertCache,
        transfers: Transfers,
        guesses: Guesses,
        run_below: Callable[[ExpertId], bool] = lambda _: False,
    ) -> None:
        """Counts the accesses, holds what is resident and starts as many reads as slabs allow.

        needed: expert -> the requests that need it in this forward, one or more. The first of them is told of the load;
        the others find the expert there, which is a hit.
        lasting: those of `needed` that decode may want again; the others only pass through the slabs.
        run_below: whether a missing expert runs where it lies, in host memory; if so it stays there until it has run.
        """
        self._needed = needed
        self._lasting = lasting
        self._cache = cache
        self._transfers = transfers
        self._guesses = guesses
        self._run_below = run_below
        self._below: deque[ExpertId] = deque()
        self._ready: deque[tuple[ExpertId, int]] = deque()
        self._coming: deque[Ticket] = deque()
        self._waiting: deque[ExpertId] = deque()
        for expert in needed:
            self._access(expert)
        self._start_reads()

    def arrivals(self, together: bool = False) -> Iterator[Sequence[tuple[ExpertId, int | None]]]:
        """(expert, slot) of every needed expert, once each, its slab filled; without a slot it runs where it lies. With
        fewer slabs than experts, each slab goes to the next expert as soon as the caller comes back for more.

        together: all that are there at the same moment at once, else one by one.
        """
        while self._ready or self._below or self._coming or self._waiting:
            if self._below and not self._ready:
                yield [(self._below.popleft(), None)]
                continue
            if not self._ready and not self._coming:  # the cache promises a slab when nothing is held; never spin
                raise RuntimeError(f"no slab can be freed for {self._waiting[0]} of {self._cache.slabs}")
            if not self._ready:
                self._ready.append(self._wait(self._next_arrival()))
            group = [self._ready.popleft()]
            while together and self._ready:
                group.append(self._ready.popleft())
            yield group
            if self._waiting:
                self._cache.release(expert for expert, _ in group)
                self._start_reads()

    @property
    def served(self) -> bool:
        """Whether every needed expert has a slab, or had one."""
        return not self._waiting

    def let_pass(self, experts: Collection[ExpertId]) -> None:
        """They have run: unless they are to last, their slabs may be had, first by what still waits for one."""
        self._cache.release(expert for expert in experts if expert not in self._lasting)
        self._start_reads()

    def _next_arrival(self) -> Ticket:
        """One that is there, else the one that was ordered first."""
        for place, ticket in enumerate(self._coming):
            if ticket.done:
                del self._coming[place]
                return ticket
        return self._coming.popleft()

    def _access(self, expert: ExpertId) -> None:
        first, *others = self._needed[expert]
        for session in others:
            session.counting.accesses += 1
            session.counting.hits += 1
        counting = first.counting
        counting.accesses += 1
        slot = self._cache.lookup(expert, expert not in self._lasting)
        if slot is None:
            if self._run_below(expert):
                counting.cpu_runs += 1
                self._below.append(expert)
                if expert in self._lasting:
                    self._cache.note_use(expert)
                return
            counting.demand_loads += 1
            self._waiting.append(expert)
            return
        counting.hits += 1
        self._guesses.used(first, expert)
        ticket = self._transfers.ticket(expert)
        if ticket is None:
            self._ready.append((expert, slot))
        else:
            ticket.promote()  # it is demanded now: before all guesses, and not to be dropped with them
            self._coming.append(ticket)

    def _start_reads(self) -> None:
        placed: list[tuple[ExpertId, int]] = []
        while self._waiting:
            expert = self._waiting[0]
            placement = self._cache.require(expert, expert not in self._lasting)
            if placement is None:
                break
            self._guesses.evicted(placement.evicted)
            placed.append((self._waiting.popleft(), placement.slot))
        if placed:
            self._coming.extend(self._transfers.demand_batch(placed))

    def _wait(self, ticket: Ticket) -> tuple[ExpertId, int]:
        started = self._transfers.now()
        try:
            ticket.wait()
        except Exception:
            self._cache.forget(ticket.expert)
            raise
        first = self._needed[ticket.expert][0]
        first.counting.stall_ms += (self._transfers.now() - started) * 1e3
        self._guesses.landed(first, ticket)
        return ticket.expert, ticket.slot

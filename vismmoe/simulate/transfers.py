"""Transfers in simulated time: the runtime's own queue of tickets, served by a disk and a link that only count.

Mirrors experts/transfers.py: demand before speculation, small experts read several at a time, and a thread that waits
for what nobody has begun to read reads it itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vismmoe.experts.tickets import State, Ticket, TicketQueue
from vismmoe.experts.transfers import batch_size
from vismmoe.simulate.profile import DeviceProfile
from vismmoe.types import ExpertId


@dataclass(frozen=True)
class Read:
    """Experts that were read together. Times in seconds since the simulation began."""

    experts: tuple[ExpertId, ...]
    speculative: bool
    start: float
    end: float


class SimulatedTransfers:
    """Implements vismmoe.traffic.Transfers; its clock moves when advance() or a wait moves it."""

    def __init__(
        self,
        profile: DeviceProfile,
        expert_bytes: int,
        *,
        readers: int = 1,
        host_experts: int = 0,
        preloaded: bool = False,
    ) -> None:
        """host_experts: room for copies in host memory, filled at first reads. preloaded: all experts are in there."""
        self.reads: list[Read] = []
        self._profile = profile
        self._expert_bytes = expert_bytes
        self._host_experts, self._preloaded = host_experts, preloaded
        self._copies: set[ExpertId] = set()
        self._channels = [0.0] * profile.parallel_reads  # when each is free
        self._queue = TicketQueue(batch_size(expert_bytes))
        self._open: dict[ExpertId, Ticket] = {}
        self._arrived: list[Ticket] = []
        self._now = 0.0
        self._idle = readers
        self._events: list[tuple[float, int, list[Ticket]]] = []  # a reader ends this batch, or wakes (none)
        self._age = 0

    # ---- time

    def now(self) -> float:
        """Seconds since the simulation began."""
        return self._now

    def advance(self, seconds: float) -> None:
        """The computing thread is busy for so long; readers go on meanwhile."""
        self._run_readers(self._now + seconds)
        self._now += seconds

    # ---- orders, as the runtime gives them

    def demand_batch(self, placed: Sequence[tuple[ExpertId, int]]) -> list[Ticket]:
        """See CpuTransfers."""
        return self._enqueue([Ticket(self, expert, slot, False, 0.0) for expert, slot in placed])

    def speculate_batch(self, placed: Sequence[tuple[ExpertId, int, float]]) -> list[Ticket]:
        """See CpuTransfers."""
        return self._enqueue([Ticket(self, expert, slot, True, priority) for expert, slot, priority in placed])

    def ticket(self, expert: ExpertId) -> Ticket | None:
        """See CpuTransfers."""
        return self._open.get(expert)

    def drain(self) -> list[Ticket]:
        """See CpuTransfers."""
        arrived, self._arrived = self._arrived, []
        ready = [ticket for ticket in arrived if self._open.get(ticket.expert) is ticket]
        for ticket in ready:
            del self._open[ticket.expert]
        return ready

    def drop_stale(self, keep: Callable[[ExpertId], bool]) -> list[ExpertId]:
        """See CpuTransfers."""
        dropped = self._queue.drop(keep)
        for ticket in dropped:
            del self._open[ticket.expert]
        return [ticket.expert for ticket in dropped]

    # ---- for tickets

    def promote(self, ticket: Ticket) -> None:
        """See Ticket.promote."""
        self._queue.promote(ticket)

    def finish(self, ticket: Ticket) -> None:
        """See Ticket.wait: the clock goes on to the moment when the ticket is done."""
        if not ticket.done:
            batch: list[Ticket] = []
            self._queue.claim(ticket, batch)
            if batch:
                end = self._serve(batch, self._now)
                self._run_readers(end)
                self._now = end
                self._conclude(batch)
            while not ticket.done:
                self._now = max(self._now, self._events[0][0])
                self._run_readers(self._now)
        if self._open.get(ticket.expert) is ticket:
            del self._open[ticket.expert]

    # ---- inside

    def _enqueue(self, tickets: list[Ticket]) -> list[Ticket]:
        for ticket in tickets:
            self._open[ticket.expert] = ticket
            self._queue.add(ticket)
        for _ in range(min(self._idle, len(tickets))):
            self._idle -= 1
            self._at(self._now + self._profile.wake_ms / 1e3, [])
        return tickets

    def _at(self, time: float, batch: list[Ticket]) -> None:
        self._age += 1
        heapq.heappush(self._events, (time, self._age, batch))

    def _run_readers(self, until: float) -> None:
        """Let every reader do what it does up to that time."""
        while self._events and self._events[0][0] <= until:
            time, _, done = heapq.heappop(self._events)
            self._conclude(done)
            batch = self._queue.take()
            if batch:
                self._at(self._serve(batch, time), batch)
            else:
                self._idle += 1

    def _serve(self, batch: list[Ticket], start: float) -> float:
        """When the batch is in its slabs, if it is asked for at `start`."""
        channel = min(range(len(self._channels)), key=self._channels.__getitem__)
        begin = max(start, self._channels[channel])
        end = self._channels[channel] = begin + self._seconds([ticket.expert for ticket in batch])
        experts = tuple(ticket.expert for ticket in batch)
        self.reads.append(Read(experts, all(ticket.speculative for ticket in batch), begin, end))
        return end

    def _seconds(self, experts: list[ExpertId]) -> float:
        fresh = [] if self._preloaded else [expert for expert in experts if expert not in self._copies]
        self._copies.update(fresh[: max(0, self._host_experts - len(self._copies))])
        disk = self._profile.disk_s(len(fresh) * self._expert_bytes) if fresh else 0.0
        return disk + self._profile.link_s(len(experts) * self._expert_bytes)

    def _conclude(self, batch: list[Ticket]) -> None:
        for ticket in batch:
            ticket.filled = True
            ticket.state = State.DONE
            if ticket.speculative:
                self._arrived.append(ticket)

"""Which transfer is next: demand as it came, then speculation by priority. No threads: the owner holds the lock."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

from vismmoe.errors import CheckpointError
from vismmoe.types import ExpertId


class State(Enum):
    """The life of a transfer."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"  # the slab is filled, or there is an error
    DROPPED = "dropped"


class Waiter(Protocol):
    """Who brings a transfer to its end."""

    def finish(self, ticket: Ticket) -> None:
        """Return when the ticket is done."""

    def promote(self, ticket: Ticket) -> None:
        """Move a queued speculation to the end of the demand queue."""


class Ticket:
    """One transfer of one expert into one slab."""

    __slots__ = (
        "_owner", "bytes_read", "error", "event", "expert", "filled", "priority", "slot", "speculative", "state",
    )  # fmt: skip

    def __init__(self, owner: Waiter, expert: ExpertId, slot: int, speculative: bool, priority: float) -> None:
        self._owner = owner
        self.expert = expert
        self.slot = slot
        self.speculative = speculative  # a guess, unless it was promoted
        self.priority = priority
        self.state = State.QUEUED
        self.filled = False
        self.bytes_read = 0  # from disk; 0 also for a host copy
        self.error: Exception | None = None
        self.event: Any = None  # of a CUDA stream: before the copy "the slab is free", after it "the slab is filled"

    @property
    def done(self) -> bool:
        """Whether wait() would return, or raise, at once."""
        return self.state is State.DONE or self.state is State.DROPPED

    def promote(self) -> None:
        """It is demanded now, if it was a guess: it goes before all guesses. Does not block."""
        if self.speculative:
            self._owner.promote(self)

    def wait(self) -> int:
        """Block until the slab is filled and return the bytes that came from disk.

        Whatever nobody has begun to read is read by the waiting thread itself, without a detour over another thread.
        Raises CheckpointError when the expert could not be read, RuntimeError when the transfer was dropped,
        interrupted or cut off by close(): the expert is then for cache.forget().
        """
        self._owner.finish(self)
        if self.error is None:
            return self.bytes_read
        if isinstance(self.error, RuntimeError):
            raise RuntimeError(str(self.error))
        raise CheckpointError(str(self.error)) from self.error


class TicketQueue:
    """Queued tickets. A ticket that is no longer queued may still lie in here and is skipped."""

    def __init__(self, batch: int) -> None:
        self._batch = batch  # tickets that are read together
        self._demand: deque[Ticket] = deque()
        self._guesses: list[tuple[float, int, Ticket]] = []
        self._age = 0

    def add(self, ticket: Ticket) -> None:
        """Queue a ticket, by its `speculative` and `priority`."""
        if ticket.speculative:
            self._age += 1
            heapq.heappush(self._guesses, (-ticket.priority, self._age, ticket))
        else:
            self._demand.append(ticket)

    def promote(self, ticket: Ticket) -> None:
        """A queued guess becomes a demand; its old place is never reached, since demands go first."""
        ticket.speculative = False
        if ticket.state is State.QUEUED:
            self._demand.append(ticket)

    def take(self) -> list[Ticket]:
        """The next tickets to read together, now running: demands alone or guesses alone, none if nothing is queued."""
        batch: list[Ticket] = []
        while self._demand and len(batch) < self._batch:
            _start(self._demand.popleft(), batch)
        if batch:
            return batch
        while self._guesses and len(batch) < self._batch:
            _start(heapq.heappop(self._guesses)[2], batch)
        return batch

    def claim(self, ticket: Ticket, batch: list[Ticket]) -> None:
        """Put this ticket, now running, into the empty batch, with the demands that are next; nothing if not queued."""
        _start(ticket, batch)
        while batch and self._demand and len(batch) < self._batch:
            _start(self._demand.popleft(), batch)

    def drop(self, keep: Callable[[ExpertId], bool]) -> list[Ticket]:
        """Take out the queued guesses that keep() denies."""
        queued = [place for place in self._guesses if place[2].state is State.QUEUED and place[2].speculative]
        dropped = [place[2] for place in queued if not keep(place[2].expert)]
        for ticket in dropped:
            ticket.state = State.DROPPED
            ticket.error = RuntimeError(f"The transfer of {ticket.expert} was dropped as stale.")
        self._guesses = [place for place in queued if place[2].state is State.QUEUED]
        heapq.heapify(self._guesses)
        return dropped

    def clear(self) -> list[Ticket]:
        """Take out everything that is queued."""
        tickets = [*self._demand, *(place[2] for place in self._guesses)]
        self._demand.clear()
        self._guesses.clear()
        return [ticket for ticket in tickets if ticket.state is State.QUEUED]


def _start(ticket: Ticket, batch: list[Ticket]) -> None:
    if ticket.state is State.QUEUED:
        batch.append(ticket)  # first: an interrupt in between leaves no running ticket without a runner
        ticket.state = State.RUNNING

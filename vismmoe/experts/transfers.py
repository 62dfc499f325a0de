"""Moves experts into slabs beside the computation: the only file with streams and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from vismmoe.errors import CheckpointError, UsageError, VisMMoEError
from vismmoe.experts.host import HostTier
from vismmoe.experts.slabs import SlabPool
from vismmoe.experts.tickets import State, Ticket, TicketQueue
from vismmoe.types import ExpertId

__all__ = ["CpuTransfers", "CudaTransfers", "Masters", "Ticket", "Transfers", "batch_size"]

# Small experts are read several at a time, since a hand-over between threads costs more than their bytes; large ones
# one at a time, so that the first can run while the next is read.
_BATCH_BYTES = 1 << 20


def batch_size(expert_bytes: int) -> int:
    """Experts that are read together, at most."""
    return max(1, _BATCH_BYTES // max(1, expert_bytes))


class Transfers(Protocol):
    """What orders experts to be moved into slabs: threads that do it, or a simulation that counts."""

    def now(self) -> float:
        """Seconds on the clock that waits are measured with."""

    def demand_batch(self, placed: Sequence[tuple[ExpertId, int]]) -> list[Ticket]:
        """Start to fill the slabs with experts that are needed now."""

    def speculate_batch(self, placed: Sequence[tuple[ExpertId, int, float]]) -> list[Ticket]:
        """Fill the slabs when nothing that is needed now is left to do; by priority."""

    def ticket(self, expert: ExpertId) -> Ticket | None:
        """The expert's open transfer."""

    def drain(self) -> list[Ticket]:
        """Guesses that have finished and that nobody waited for."""

    def drop_stale(self, keep: Callable[[ExpertId], bool]) -> list[ExpertId]:
        """Drop the guesses that nobody has begun to read and that keep() denies."""


class Masters(Protocol):
    """Where experts come from: an ExpertStore, or a slow or failing one in tests."""

    def read_batch(self, items: Sequence[tuple[ExpertId, memoryview]]) -> None:
        """Fill each memory with its expert."""


class CpuTransfers:
    """Reader threads that fill slabs on the CPU. Demand goes before speculation, speculation by priority, then by age.

    One thread (the one that computes) gives orders; any may wait. An expert has one open transfer at the most: it is
    open until it was waited for, drained or dropped. Use it as a context manager, or close() it at the end.

    host: what a slab held before goes there, and what lies there is not read again.
    """

    def __init__(self, store: Masters, slabs: SlabPool, readers: int = 1, host: HostTier | None = None) -> None:
        if readers < 1:
            raise UsageError(f"readers is {readers}: give 1 or more threads that read experts.")
        self.fallbacks: list[str] = []
        self._store = store
        self._slabs = slabs
        self._host = host
        self._holds: dict[int, ExpertId] = {}  # slab -> the expert whose bytes lie in it
        self._batch = batch_size(slabs.expert_bytes)
        self._queue = TicketQueue(self._batch)
        self._open: dict[ExpertId, Ticket] = {}
        self._arrived: list[Ticket] = []  # guesses that nobody has waited for yet
        self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._threads = [
            threading.Thread(target=self._read_on, name=f"vismmoe-reader-{i}", daemon=True) for i in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    def now(self) -> float:
        """Seconds on the clock that waits are measured with."""
        return time.perf_counter()

    # ---- orders

    def demand(self, expert: ExpertId, slot: int) -> Ticket:
        """Start to fill the slab with an expert that is needed now."""
        return self.demand_batch([(expert, slot)])[0]

    def demand_batch(self, placed: Sequence[tuple[ExpertId, int]]) -> list[Ticket]:
        """The same for several (expert, slab): cheaper, and neighbours in the file are read together."""
        return self._enqueue([Ticket(self, expert, slot, False, 0.0) for expert, slot in placed])

    def speculate(self, expert: ExpertId, slot: int, priority: float = 0.0) -> Ticket:
        """Fill the slab when nothing that is needed now is left to do."""
        return self._enqueue([Ticket(self, expert, slot, True, priority)])[0]

    def speculate_batch(self, placed: Sequence[tuple[ExpertId, int, float]]) -> list[Ticket]:
        """The same for several (expert, slab, priority), cheaper."""
        return self._enqueue([Ticket(self, expert, slot, True, priority) for expert, slot, priority in placed])

    def ticket(self, expert: ExpertId) -> Ticket | None:
        """The expert's open transfer; None: if it has a slab, this is filled."""
        return self._open.get(expert)

    def drain(self) -> list[Ticket]:
        """Guesses that have finished and that nobody waited for: to be told to the cache, each once.

        For each: cache.landed(ticket.expert), or cache.forget(ticket.expert) if it has an error.
        """
        if not self._arrived:
            return []
        with self._lock:
            arrived, self._arrived = self._arrived, []
        ready: list[Ticket] = []
        later: list[Ticket] = []
        for ticket in arrived:
            if self._open.get(ticket.expert) is ticket:  # else somebody has waited for it
                (ready if self._is_filled(ticket) else later).append(ticket)
        with self._lock:
            self._arrived += later
        for ticket in ready:
            del self._open[ticket.expert]
        return ready

    def drop_stale(self, keep: Callable[[ExpertId], bool]) -> list[ExpertId]:
        """Drop the guesses that nobody has begun to read and that keep() denies; the cache must forget() each."""
        with self._lock:
            dropped = self._queue.drop(keep)
        for ticket in dropped:
            del self._open[ticket.expert]
        return [ticket.expert for ticket in dropped]

    def close(self) -> None:
        """Queued transfers fail, running ones end, threads are joined. Twice is harmless."""
        with self._lock:
            self._closed = True
            for ticket in self._queue.clear():
                ticket.error = RuntimeError(f"The transfer of {ticket.expert} was cut off: transfers are closed.")
                ticket.state = State.DONE
            self._work.notify_all()
            self._finished.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> CpuTransfers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- for tickets

    def promote(self, ticket: Ticket) -> None:
        """See Ticket.promote."""
        with self._lock:
            self._queue.promote(ticket)

    def finish(self, ticket: Ticket) -> None:
        """See Ticket.wait: the waiting thread lends a hand, else it sleeps."""
        if not ticket.done:
            batch: list[Ticket] = []
            try:
                with self._lock:
                    self._queue.claim(ticket, batch)
                    while not batch and not ticket.done:
                        self._finished.wait()
                self._attempt(batch)
            finally:
                self._conclude(batch)
        if self._open.get(ticket.expert) is ticket:
            del self._open[ticket.expert]
        self._before_use(ticket)

    # ---- inside

    def _enqueue(self, tickets: list[Ticket]) -> list[Ticket]:
        with self._lock:
            if self._closed:
                raise RuntimeError("The transfers are closed.")
            for ticket in tickets:
                if ticket.expert in self._open:
                    raise RuntimeError(f"A transfer of {ticket.expert} is open already.")
                self._open[ticket.expert] = ticket
                self._before_overwrite(ticket)
                self._queue.add(ticket)
            self._work.notify(len(tickets))
        return tickets

    def _read_on(self) -> None:
        while True:
            with self._lock:
                while not (batch := self._queue.take()):
                    if self._closed:
                        return
                    self._work.wait()
            try:
                self._attempt(batch)
            finally:
                self._conclude(batch)

    def _conclude(self, batch: list[Ticket]) -> None:
        """Mark these as done, come what may: nobody must wait for ever."""
        if not batch:
            return
        with self._lock:
            for ticket in batch:
                if not ticket.filled and ticket.error is None:
                    ticket.error = RuntimeError(f"The transfer of {ticket.expert} was interrupted.")
                ticket.state = State.DONE
                if ticket.speculative:
                    self._arrived.append(ticket)
            self._finished.notify_all()

    def _attempt(self, batch: list[Ticket]) -> None:
        if not batch:
            return
        try:
            self._load(batch)
            for ticket in batch:
                self._holds[ticket.slot] = ticket.expert
                ticket.filled = True
        except Exception as error:
            if len(batch) > 1:  # one by one, so that only those fail that have to
                for ticket in batch:
                    self._attempt([ticket])
            else:
                batch[0].error = _told(batch[0].expert, error)

    def _load(self, batch: list[Ticket]) -> None:
        """Fill the slabs of the batch; what they held before goes to the host tier, what lies there comes up."""
        missing = batch
        if self._host is not None:
            for ticket in batch:
                self._put_down(ticket, self._host)
            missing = [ticket for ticket in batch if not self._bring_up(ticket, self._host)]
        self._read(missing)
        for ticket in missing:
            ticket.bytes_read = self._slabs.expert_bytes

    def _put_down(self, ticket: Ticket, host: HostTier) -> None:
        leaving = self._holds.pop(ticket.slot, None)
        if leaving is not None:
            host.offer(leaving, lambda row: self._copy_out(ticket, row))

    def _bring_up(self, ticket: Ticket, host: HostTier) -> bool:
        with host.moving_up(ticket.expert) as row:
            if row is not None:
                self._copy_in(ticket, row)
            return row is not None

    def _copy_out(self, ticket: Ticket, row: torch.Tensor) -> None:
        _copy(row, self._slabs.bytes(ticket.slot))

    def _copy_in(self, ticket: Ticket, row: torch.Tensor) -> None:
        _copy(self._slabs.bytes(ticket.slot), row)

    def _read(self, batch: list[Ticket]) -> None:
        if batch:
            self._store.read_batch([(ticket.expert, self._slabs.buffer(ticket.slot)) for ticket in batch])

    def _before_overwrite(self, ticket: Ticket) -> None:
        """The slab is about to be filled anew."""

    def _before_use(self, ticket: Ticket) -> None:
        """The slab is about to be used by the calling thread."""

    def _is_filled(self, ticket: Ticket) -> bool:
        return True


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """numpy copies without the GIL and without waking torch's threads, which are computing."""
    np.copyto(target.numpy(), source.numpy())


def _told(expert: ExpertId, error: Exception) -> VisMMoEError:
    if isinstance(error, VisMMoEError):
        return error
    told = CheckpointError(f"Expert {expert.expert} of layer {expert.layer} could not be read: {error!r}")
    told.__cause__ = error
    return told


class CudaTransfers(CpuTransfers):
    """The same into device memory: disk or host copy -> pinned staging -> copy stream -> slab.

    Events order the streams, and no host thread waits for the device: a copy starts after what was computing with the
    slab when the order was given, and what is launched after wait() starts after the copy.
    """

    def __init__(self, store: Masters, slabs: SlabPool, readers: int = 1, host: HostTier | None = None) -> None:
        self._device = slabs.device
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stages: list[_Stage] = []  # free ones; as many exist as threads that read at the same time
        self._pin = True
        super().__init__(store, slabs, readers, host)

    def close(self) -> None:
        """Also waits for the last copy, whose memory may then be freed."""
        super().close()
        self._copies.synchronize()

    def _copy_out(self, ticket: Ticket, row: torch.Tensor) -> None:
        self._copy_now(ticket, row, self._slabs.bytes(ticket.slot))

    def _copy_in(self, ticket: Ticket, row: torch.Tensor) -> None:
        ticket.event = self._copy_now(ticket, self._slabs.bytes(ticket.slot), row)

    def _copy_now(self, ticket: Ticket, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Copy once the slab is free; returns when the copy is done, since the row may go to another expert then."""
        with torch.cuda.stream(self._copies):
            if ticket.event is not None:
                self._copies.wait_event(ticket.event)
            target.copy_(source, non_blocking=True)
            done: torch.cuda.Event = self._copies.record_event()
        done.synchronize()  # this reader waits, nobody else
        return done

    def _read(self, batch: list[Ticket]) -> None:
        if not batch:
            return
        stage = self._borrow()
        try:
            self._store.read_batch([(t.expert, stage.rows.buffer(i)) for i, t in enumerate(batch)])
            with torch.cuda.stream(self._copies):
                for row, ticket in enumerate(batch):
                    if ticket.event is not None:
                        self._copies.wait_event(ticket.event)
                    self._slabs.take(ticket.slot, stage.rows, row, ticket.expert)
                filled = self._copies.record_event()
            for ticket in batch:
                ticket.event = filled
            stage.busy = filled
        finally:
            with self._lock:
                self._stages.append(stage)

    def _borrow(self) -> _Stage:
        with self._lock:
            stage = self._stages.pop() if self._stages else None
        if stage is None:
            stage = self._new_stage()
        if stage.busy is not None:
            stage.busy.synchronize()  # its last copy still reads from it
        return stage

    def _new_stage(self) -> _Stage:
        layout = self._slabs.layout
        if self._pin:
            try:
                return _Stage(SlabPool(self._batch, layout, pin=True))
            except RuntimeError as error:  # containers, WSL, a low limit of locked memory
                self._pin = False
                reason = str(error).splitlines()[0]
                self.fallbacks.append(f"Pinned memory is not to be had ({reason}): staging is pageable.")
        return _Stage(SlabPool(self._batch, layout))

    def _before_overwrite(self, ticket: Ticket) -> None:
        ticket.event = torch.cuda.current_stream(self._device).record_event()

    def _before_use(self, ticket: Ticket) -> None:
        if ticket.filled:
            torch.cuda.current_stream(self._device).wait_event(ticket.event)

    def _is_filled(self, ticket: Ticket) -> bool:
        return not ticket.filled or bool(ticket.event.query())


class _Stage:
    """A staging buffer, one row an expert, and the last copy out of it."""

    def __init__(self, rows: SlabPool) -> None:
        self.rows = rows
        self.busy: torch.cuda.Event | None = None

"""Experts in host memory, between disk and device: what leaves the device is kept here, what goes up leaves.

So no expert takes memory twice. (Keeping a copy of everything that is read was measured against it by
benchmarks/host_tier.py and finds less.) The least often used makes room.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from vismmoe.errors import BudgetError
from vismmoe.experts.slabs import SlabPool
from vismmoe.types import ExpertId, ExpertLayout

Worth = Callable[[ExpertId], float]  # who is worth least makes room


class HostTier:
    """Room for `capacity` experts. Any thread may ask; a row that is being filled, read or run is left alone."""

    def __init__(self, capacity: int, layout: ExpertLayout, worth: Worth, pin: bool = False) -> None:
        """pin: between disk and GPU: packed as there, and in page-locked memory, if it is to be had."""
        self.capacity = capacity
        self.fallbacks: list[str] = []
        self.most = 0  # experts held at the same time, at most
        self._worth = worth
        self._pool = self._allocate(capacity, layout, pin)
        self._free = list(range(capacity - 1, -1, -1))
        self._row_of: dict[ExpertId, int] = {}
        self._busy: dict[ExpertId, int] = {}  # how many use the row now
        self._order: list[tuple[float, ExpertId]] = []  # worth when it was looked at last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, expert: object) -> bool:
        return expert in self._row_of

    def offer(self, expert: ExpertId, copy: Callable[[Tensor], None]) -> bool:
        """Keep an expert that leaves the device, if it is worth more than another one here.

        copy: fills (slab_bytes,) uint8 with it; called in the calling thread, only if it is kept.
        """
        worth = self._worth(expert)
        with self._lock:
            if expert in self._row_of or (not self._free and not self._make_room(worth)):
                return False
            row = self._free.pop()
        try:
            copy(self._pool.bytes(row))
        except BaseException:
            with self._lock:
                self._free.append(row)
            raise
        with self._lock:
            if expert in self._row_of:  # another reader was faster
                self._free.append(row)
                return False
            self._row_of[expert] = row
            self.most = max(self.most, len(self._row_of))
            heapq.heappush(self._order, (worth, expert))
            if len(self._order) > 2 * self.capacity + 64:  # places of those that have gone
                self._order = [(self._worth(held), held) for held in self._row_of]
                heapq.heapify(self._order)
        return True

    @contextmanager
    def moving_up(self, expert: ExpertId) -> Iterator[Tensor | None]:
        """(slab_bytes,) uint8 of the expert, which is no longer here after the block; None if it is not here."""
        row = self._begin(expert)
        done = False
        try:
            yield None if row is None else self._pool.bytes(row)
            done = True
        finally:
            if row is not None:
                self._end(expert, drop=done)

    def run_here(self, expert: ExpertId) -> Mapping[str, Tensor] | None:
        """Weights of the expert where it lies, None if it is not here. stop_running() afterwards."""
        row = self._begin(expert)
        return None if row is None else self._pool.weights(row, expert)

    def stop_running(self, expert: ExpertId) -> None:
        """The weights that run_here() gave are not used any more."""
        self._end(expert, drop=False)

    def let_go(self) -> None:
        """Nothing runs any more: the forward that did has failed. No reader may be at work."""
        self._busy.clear()

    # ---- inside

    def _begin(self, expert: ExpertId) -> int | None:
        with self._lock:
            row = self._row_of.get(expert)
            if row is not None:
                self._busy[expert] = self._busy.get(expert, 0) + 1
            return row

    def _end(self, expert: ExpertId, drop: bool) -> None:
        with self._lock:
            self._busy[expert] -= 1
            if not self._busy[expert]:
                del self._busy[expert]
                if drop:
                    self._free.append(self._row_of.pop(expert))

    def _make_room(self, worth: float) -> bool:
        """Free the row of who is worth least and less than `worth`. Worths only grow, so an old one is looked up."""
        skipped = []
        found = False
        while self._order and not found:
            noted, expert = heapq.heappop(self._order)
            if expert not in self._row_of:
                continue
            now = self._worth(expert)
            if now > noted:
                heapq.heappush(self._order, (now, expert))
            elif now >= worth:
                skipped.append((noted, expert))
                break
            elif expert in self._busy:
                skipped.append((noted, expert))
            else:
                self._free.append(self._row_of.pop(expert))
                found = True
        for place in skipped:
            heapq.heappush(self._order, place)
        return found

    def _allocate(self, capacity: int, layout: ExpertLayout, pin: bool) -> SlabPool:
        if pin:
            try:
                return SlabPool(capacity, layout, pin=True, packed=True)
            except RuntimeError as error:  # containers, WSL, a low limit of locked memory
                reason = str(error).splitlines()[0]
                self.fallbacks.append(f"Pinned memory is not to be had ({reason}): host copies are pageable.")
        try:
            return SlabPool(capacity, layout, packed=pin)
        except (RuntimeError, MemoryError) as error:
            raise BudgetError(
                f"--host-memory: {capacity * layout.expert_bytes} bytes for copies of experts cannot be had. Give less."
            ) from error

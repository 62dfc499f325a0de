"""Copies of experts in host memory: filled at their first read, never evicted."""

from __future__ import annotations

import threading

import numpy as np

from vismmoe.errors import BudgetError
from vismmoe.types import ExpertId


class HostCopies:
    """Room for `capacity` experts; first come, first kept. Any thread may ask."""

    def __init__(self, capacity: int, expert_bytes: int) -> None:
        try:
            self._rows = np.empty((capacity, expert_bytes), np.uint8)  # pages are only taken when a row is filled
        except MemoryError as error:
            raise BudgetError(
                f"--host-memory: {capacity * expert_bytes} bytes for copies of experts cannot be had. Give less."
            ) from error
        self._row_of: dict[ExpertId, int] = {}
        self._filling: set[ExpertId] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._row_of)

    def copy_into(self, expert: ExpertId, slab: memoryview) -> bool:
        """Fill the slab from the copy, if there is one."""
        row = self._row_of.get(expert)
        if row is None:
            return False
        np.copyto(np.frombuffer(slab, np.uint8), self._rows[row])
        return True

    def keep(self, expert: ExpertId, slab: memoryview) -> None:
        """Keep a copy of the filled slab, if there is room and none yet."""
        with self._lock:
            row = len(self._row_of) + len(self._filling)
            if row >= len(self._rows) or expert in self._row_of or expert in self._filling:
                return
            self._filling.add(expert)
        np.copyto(self._rows[row], np.frombuffer(slab, np.uint8))
        with self._lock:  # only now may others read it
            self._filling.remove(expert)
            self._row_of[expert] = row

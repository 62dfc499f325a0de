"""Reads as slow as those of a slower disk: to see what it would do, where the page cache answers at once."""

from __future__ import annotations

import threading
import time


class Pace:
    """A disk of `rate` bytes a second that serves one read after another, whoever asks."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._free = 0.0  # when the disk has done what it was asked for
        self._lock = threading.Lock()

    def wait(self, size: int, began: float) -> None:
        """Return when such a disk would have read `size` bytes that were asked for at `began`."""
        with self._lock:
            self._free = max(began, self._free) + size / self._rate
            end = self._free
        time.sleep(max(0.0, end - time.perf_counter()))

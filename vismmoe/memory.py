"""What memory and processors this process may use, and what it has used, as the kernel tells it (Linux)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_QUOTA_V2 = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_PERIOD_V1 = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


class ResidentPeak:
    """How far this process's resident memory has grown at most since this object was made, in bytes.

    Pages of program files (torch's libraries, as more of their code is used) are taken out: they are shared and the
    kernel may drop them at any time. 0 where the kernel does not tell.
    """

    def __init__(self) -> None:
        with suppress(OSError):
            _CLEAR_REFS.write_text("5")  # the kernel forgets earlier peaks of this process
        self._start, self._files = _status_bytes("VmRSS"), _status_bytes("RssFile")

    def bytes(self) -> int:
        files = max(0, _status_bytes("RssFile") - self._files)
        return max(0, _status_bytes("VmHWM") - self._start - files)


SMALL_EXPERT_BYTES = 256 * 1024


def arithmetic_threads(expert_bytes: int) -> int:
    """Threads for a model with experts of this size.

    A product with a small expert is over before a second thread has woken up: on two cores the reference model (24 KB
    an expert) ran nine times slower on two threads than on one.
    """
    return 1 if expert_bytes < SMALL_EXPERT_BYTES else usable_cpus()


def usable_cpus() -> int:
    """Processors that affinity and the cgroup's quota leave to this process; the host may have many more."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, allowed if quota is None else min(allowed, round(quota)))


def _cgroup_quota() -> float | None:
    try:
        if _QUOTA_V2.is_file():
            limit, period = _QUOTA_V2.read_text().split()
        else:
            limit, period = _QUOTA_V1.read_text(), _PERIOD_V1.read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError):  # "max": no quota
        return None


def _status_bytes(key: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0

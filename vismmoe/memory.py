"""How much memory this process has used, as the kernel tells it (Linux), and how many threads suit its experts."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from vismmoe.limits import usable_cpus

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LEAST_MAPPED, _MOST_MAPPED = 128 * 1024, 1024**2


def return_freed_memory(planned_bytes: int) -> None:
    """Let glibc give a freed block of 1/256 of the plan or more back to the system at once (128 KiB to 1 MiB).

    Left to itself it raises that limit to the size of what it sees freed, up to 32 MiB, and what was freed between two
    blocks that stay is then lost: 0.3 GiB beside 2.4 GiB of DeepSeek-VL2 after loading, 0.2 GiB in a prefill of
    Qwen3-VL-30B-A3B's shapes. For the whole process; nothing where the C library is another one.
    """
    limit = min(_MOST_MAPPED, max(_LEAST_MAPPED, planned_bytes // 256))
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            library.mallopt(option, limit)


def process_peak_bytes() -> int:
    """The most resident memory that this process ever had, mapped files included."""
    return _status_bytes("VmHWM")


SMALL_EXPERT_BYTES = 256 * 1024


def arithmetic_threads(expert_bytes: int) -> int:
    """Threads for a model with experts of this size.

    A product with a small expert is over before a second thread has woken up: on two cores the reference model (24 KB
    an expert) ran nine times slower on two threads than on one.
    """
    return 1 if expert_bytes < SMALL_EXPERT_BYTES else usable_cpus()


def _status_bytes(key: str) -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0

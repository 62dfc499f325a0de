"""What the kernel tells of memory and processors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vismmoe import memory
from vismmoe.limits import usable_cpus
from vismmoe.memory import ResidentPeak, arithmetic_threads, process_peak_bytes

MIB = 1024**2


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands for the kernel's: what it counts of a real process is not exact on a machine of many cores."""
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "clear_refs")
    return tmp_path / "status"


def tell(status: Path, now_mib: int, peak_mib: int, files_mib: int) -> None:
    status.write_text(
        f"Name:\tpython\nVmHWM:\t  {peak_mib * 1024} kB\nVmRSS:\t  {now_mib * 1024} kB\n"
        f"RssAnon:\t  1 kB\nRssFile:\t  {files_mib * 1024} kB\n"
    )


def test_the_peak_is_remembered_after_memory_is_given_back_and_program_files_do_not_count(status: Path) -> None:
    tell(status, now_mib=100, peak_mib=100, files_mib=40)
    peak = ResidentPeak()
    tell(status, now_mib=105, peak_mib=180, files_mib=50)
    assert peak.bytes() == 70 * MIB
    assert process_peak_bytes() == 180 * MIB


def test_an_earlier_peak_is_forgotten_by_the_kernel_on_request(status: Path) -> None:
    tell(status, now_mib=100, peak_mib=900, files_mib=40)
    ResidentPeak()
    assert (status.parent / "clear_refs").read_text() == "5"


def test_a_kernel_that_does_not_tell_gives_zero(status: Path) -> None:
    assert ResidentPeak().bytes() == process_peak_bytes() == 0


def test_the_real_kernel_is_understood() -> None:
    assert process_peak_bytes() > MIB


def test_small_experts_run_on_one_thread_and_large_ones_on_all_that_may_be_used() -> None:
    assert arithmetic_threads(24 * 1024) == 1
    assert arithmetic_threads(9 * 1024**2) == usable_cpus()


FREED = """
import ctypes
from vismmoe.memory import return_freed_memory

class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "mapped", *map(str, range(6)))]

library = ctypes.CDLL(None)
if not hasattr(library, "mallinfo2"):
    print("mapped")  # another C library than glibc
    raise SystemExit
library.mallinfo2.restype = Heap
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]
return_freed_memory(0)
library.free(library.malloc(20 << 20))  # after this glibc would put everything up to 20 MiB into its heap
before = library.mallinfo2().mapped
held = library.malloc(256 << 10)
print("mapped" if library.mallinfo2().mapped == before + 1 else "in the heap")
"""


def test_a_large_block_is_returned_to_the_system_when_it_is_freed_whatever_was_freed_before() -> None:
    told = subprocess.run([sys.executable, "-c", FREED], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "mapped"

"""What the kernel tells of memory and processors."""

from __future__ import annotations

import torch

from vismmoe.limits import usable_cpus
from vismmoe.memory import ResidentPeak, arithmetic_threads

MIB = 1024**2


def test_the_peak_is_remembered_after_memory_is_given_back() -> None:
    peak = ResidentPeak()
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    del held
    assert 60 * MIB < peak.bytes() < 90 * MIB


def test_an_earlier_peak_does_not_count() -> None:
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    del held
    peak = ResidentPeak()
    assert peak.bytes() < 32 * MIB


def test_small_experts_run_on_one_thread_and_large_ones_on_all_that_may_be_used() -> None:
    assert arithmetic_threads(24 * 1024) == 1
    assert arithmetic_threads(9 * 1024**2) == usable_cpus()

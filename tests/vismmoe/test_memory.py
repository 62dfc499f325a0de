"""What the kernel tells of memory and processors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vismmoe.memory as memory
from vismmoe.memory import ResidentPeak, arithmetic_threads, usable_cpus

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


@pytest.mark.parametrize(("quota", "cpus"), [("150000 100000", 2), ("100000 100000", 1), ("max 100000", 64)])
def test_the_cgroup_quota_limits_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(memory, "_QUOTA_V2", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert usable_cpus() == cpus


def test_small_experts_run_on_one_thread_and_large_ones_on_all_that_may_be_used() -> None:
    assert arithmetic_threads(24 * 1024) == 1
    assert arithmetic_threads(9 * 1024**2) == usable_cpus()

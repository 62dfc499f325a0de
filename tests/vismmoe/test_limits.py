"""What cgroups of both versions leave to a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from vismmoe.limits import Cgroups, available_memory, usable_cpus

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def v2(tmp_path: Path) -> Cgroups:
    """A process in /jobs/mine of a unified hierarchy."""
    (tmp_path / "own").write_text("0::/jobs/mine\n")
    write(tmp_path / "fs/jobs/mine", memory__max="max", cpu__max="max 100000")
    return Cgroups(tmp_path / "fs", tmp_path / "own")


@pytest.fixture
def v1(tmp_path: Path) -> Cgroups:
    """A process in a container whose host's path is not mounted."""
    (tmp_path / "own").write_text("9:name=systemd:/\n4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n")
    return Cgroups(tmp_path / "fs", tmp_path / "own")


def test_without_limits_nothing_is_said(v2: Cgroups, tmp_path: Path) -> None:
    assert v2.memory_left() is None
    assert v2.cpus() is None
    nowhere = Cgroups(tmp_path / "no", tmp_path / "such")
    assert nowhere.memory_left() is None
    assert available_memory(nowhere, tmp_path / "either") is None


def test_the_tightest_of_all_groups_above_counts_and_page_cache_is_free(v2: Cgroups) -> None:
    write(v2.root / "jobs/mine", memory__max=6 * GIB, memory__current=GIB, memory__stat="anon 5\nfile 0")
    write(v2.root / "jobs", memory__max=4 * GIB, memory__current=2 * GIB, memory__stat=f"anon 5\nfile {GIB}")
    assert v2.memory_left() == 3 * GIB


def test_version_1_is_read_too_and_its_huge_number_means_no_limit(v1: Cgroups) -> None:
    memory = v1.root / "memory"
    write(memory, memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    assert v1.memory_left() is None
    write(memory, memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB, memory__stat="total_cache 1000")
    assert v1.memory_left() == GIB + 1000


def test_free_memory_counts_when_it_is_less_than_the_limit(v2: Cgroups, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 1000 kB\n")
    write(v2.root / "jobs/mine", memory__max=GIB, memory__current=0, memory__stat="file 0")
    assert available_memory(v2, tmp_path / "meminfo") == 1000 * 1024


@pytest.mark.parametrize(("quota", "cpus"), [("150000 100000", 2), ("100000 100000", 1), ("max 100000", 64)])
def test_the_quota_limits_processors(v2: Cgroups, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int) -> None:
    write(v2.root / "jobs", cpu__max=quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert usable_cpus(v2) == cpus


def test_the_quota_of_version_1_limits_processors(v1: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    write(v1.root / "cpu,cpuacct", cpu__cfs_quota_us=300000, cpu__cfs_period_us=100000)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    assert usable_cpus(v1) == 3
    write(v1.root / "cpu,cpuacct", cpu__cfs_quota_us=-1)
    assert usable_cpus(v1) == 64

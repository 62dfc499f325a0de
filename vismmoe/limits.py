"""What the machine and its cgroups (v1 and v2) leave to this process: memory and processors (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Cgroups:
    """The control groups that this process is in. A group's limit holds for all groups below it."""

    root: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")

    def memory_left(self) -> int | None:
        """Bytes that may still be taken; page cache counts as free, since the kernel gives it back. None: no limit."""
        left = [_left(*held) for group in self._groups("memory") if (held := _memory(group)) is not None]
        return min(left) if left else None

    def cpus(self) -> float | None:
        """Processors' worth of time a second. None: no limit."""
        found = [quota for name in ("cpu", "cpu,cpuacct") for group in self._groups(name) if (quota := _quota(group))]
        return min(found) if found else None

    def _groups(self, controller: str) -> Iterator[Path]:
        """Folders of this process's group and all above it. Inside a container the path is often the host's, and only
        the top is there."""
        for line in _read(self.own).splitlines():
            number, names, path = [*line.split(":", 2), "", ""][:3]
            unified = number == "0" and not names
            if not unified and controller not in (names, *names.split(",")):
                continue
            top = self.root if unified else self.root / controller
            for folder in (Path(path), *Path(path).parents):
                yield top / str(folder).lstrip("/")


def available_memory(groups: Cgroups = Cgroups(), meminfo: Path = _MEMINFO) -> int | None:
    """Bytes of RAM that this process may still take. None where the system does not tell."""
    told = [line.split()[1] for line in _read(meminfo).splitlines() if line.startswith("MemAvailable:")]
    found = [int(kib) * 1024 for kib in told]
    left = groups.memory_left()
    return min([*found, *([] if left is None else [left])], default=None)


def usable_cpus(groups: Cgroups = Cgroups()) -> int:
    """Processors that affinity and the cgroup's quota leave to this process; the host may have many more."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = groups.cpus()
    return max(1, allowed if quota is None else min(allowed, round(quota)))


_Memory = tuple[int, int, int]  # limit, usage, of it page cache; in bytes


def _memory(group: Path) -> _Memory | None:
    for limit, usage, cached in (
        ("memory.max", "memory.current", "file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        told = _read(group / limit).strip()
        if told.isdigit() and int(told) < 1 << 62:  # v1 writes a huge number for "none", v2 the word "max"
            stat = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
            return int(told), int(_read(group / usage).strip() or 0), int(stat.get(cached, 0))
    return None


def _left(limit: int, usage: int, cached: int) -> int:
    return max(0, limit - max(0, usage - cached))


def _quota(group: Path) -> float | None:
    told = _read(group / "cpu.max").split() or [
        _read(group / "cpu.cfs_quota_us").strip(),
        _read(group / "cpu.cfs_period_us").strip(),
    ]
    if len(told) == 2 and told[0].isdigit() and told[1].isdigit() and int(told[0]) and int(told[1]):
        return int(told[0]) / int(told[1])
    return None  # "max", -1 or no such controller


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
